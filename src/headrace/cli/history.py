"""Keeps the history of runs for ``headrace status --history``; it never gets in a server's way."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from headrace.base.errors import HeadraceError
from headrace.base.log import get_log

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from headrace.base.clock import Clock
    from headrace.base.config import Config

# The database's library takes half a second of CPU to import.
_DELAY_S = 5.0

log = get_log(__name__)


def open_store(url: str | None, state: str | None) -> Engine:
    """Opens the database that the settings name; by default a file in the state folder."""
    from headrace.fleet.sockets import state_folder
    from headrace.store.database import open_database, sqlite_url

    return open_database(url or sqlite_url(state_folder(state, os.environ) / "headrace.db"))


class RunRecord:
    """The row of one run. Written on a thread of its own: the supervisor must not wait for a disk.

    A fault of the database is logged and the server goes on; it serves well without a history.
    """

    def __init__(self, config: Config, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._started_at_s = clock.wall_s()
        self._timer: threading.Timer | None = None
        self._row: tuple[Engine, int] | None = None

    def begin(self, *, model: str, port: int) -> None:
        """Writes the start, after a while: the first requests need the CPU more."""
        self._timer = threading.Timer(_DELAY_S, self._write_start, (model, port))
        self._timer.start()

    def end(self, exit_code: int) -> None:
        """Writes the end, now; nothing for a run that never became ready."""
        if self._timer is None:
            return
        self._timer.cancel()
        self._timer.join()
        if self._row is None:
            self._timer.function(*self._timer.args)
        if self._row is None:
            return
        from sqlalchemy.exc import DatabaseError

        from headrace.store.runs import end_run

        engine, run_id = self._row
        try:
            end_run(engine, run_id, ended_at_s=self._clock.wall_s(), exit_code=exit_code)
        except DatabaseError as error:
            log.warning("history_failed", reason=str(error.orig))
        engine.dispose()

    def _write_start(self, model: str, port: int) -> None:
        from sqlalchemy.exc import DatabaseError

        import headrace
        from headrace.store.runs import add_run

        try:
            engine = open_store(self._config.store.url, self._config.paths.state)
            run_id = add_run(
                engine,
                model=model,
                version=headrace.__version__,
                port=port,
                pid=os.getpid(),
                started_at_s=self._started_at_s,
            )
        except DatabaseError as error:
            log.warning("history_failed", reason=str(error.orig))
        except HeadraceError as error:
            log.warning("history_failed", reason=error.message)
        else:
            self._row = engine, run_id
