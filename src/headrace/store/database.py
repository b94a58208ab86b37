"""Opens the database and brings it to the newest schema; several processes may do so at once."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Final

from sqlalchemy import Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, DatabaseError, NoSuchModuleError

from headrace.base.errors import ConfigError, MachineError

_MIGRATIONS: Final = Path(__file__).parent / "migrations"
# A writer waits this long for another one's transaction before it gives up.
_BUSY_TIMEOUT_MS: Final = 5_000


def sqlite_url(file: Path) -> str:
    """Gives the URL of a SQLite file."""
    return f"sqlite:///{file}"


def open_database(url: str, *, is_migrated: bool = False) -> Engine:
    """Opens a database, made or migrated where needed.

    Args:
        is_migrated: this run has opened it before, so its schema is the newest.

    Raises:
        ConfigError: the URL is malformed, or names a kind of database that this release does not know.
        MachineError: the database cannot be opened, or is damaged.
    """
    try:
        backend = make_url(url).get_backend_name()
        if backend != "sqlite":
            raise ConfigError(f"store.url names a {backend} database: this release keeps its state in sqlite:///…")
        engine = create_engine(url)
    except (ArgumentError, NoSuchModuleError) as error:
        raise ConfigError(f"store.url {url!r} is not a database URL: write sqlite:///FILE") from error
    event.listen(engine, "connect", _set_pragmas)
    event.listen(engine, "begin", _begin)
    try:
        if not is_migrated:
            migrate(engine)
    except (DatabaseError, sqlite3.DatabaseError) as error:
        engine.dispose()
        reason = str(error.orig if isinstance(error, DatabaseError) else error)
        raise MachineError(f"database {url}: {reason}: restore it from a backup or move it away") from error
    return engine


def migrate(engine: Engine, revision: str = "head") -> None:
    """Brings the schema to ``revision``, inside one transaction that shuts other migrations out."""
    # Late: it takes longer to import than all else here, and a schema that is known to be the newest needs it not.
    from alembic import command
    from alembic.config import Config as AlembicConfig

    config = AlembicConfig()
    config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
    with engine.connect().execution_options(headrace_begin="BEGIN IMMEDIATE") as connection, connection.begin():
        config.attributes["connection"] = connection
        command.upgrade(config, revision)


def _set_pragmas(connection: sqlite3.Connection, _record: object) -> None:
    # We begin transactions ourselves: the module's own way would commit before each change of the schema.
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout = {_BUSY_TIMEOUT_MS}")
    cursor.execute("PRAGMA journal_mode = WAL")
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.close()


def _begin(connection: Connection) -> None:
    connection.exec_driver_sql(connection.get_execution_options().get("headrace_begin", "BEGIN"))
