from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import inspect

from headrace.base.errors import ConfigError, MachineError
from headrace.store.database import open_database, sqlite_url
from headrace.store.runs import add_run, end_run, list_runs
from headrace.store.tables import metadata


def test_migrations_from_empty_give_exactly_the_tables(tmp_path: Path) -> None:
    engine = open_database(sqlite_url(tmp_path / "a.db"))

    with engine.connect() as connection:
        difference = compare_metadata(MigrationContext.configure(connection), metadata)
        checks = inspect(connection).get_check_constraints("runs")
    engine.dispose()

    assert difference == []
    assert [check["name"] for check in checks] == ["ck_runs_ended_with_code"]


def test_run_is_there_after_reopening(tmp_path: Path) -> None:
    engine = open_database(sqlite_url(tmp_path / "a.db"))
    run_id = add_run(engine, model="m", version="1", port=8000, pid=7, started_at_s=100.0)
    add_run(engine, model="n", version="1", port=8001, pid=8, started_at_s=200.0)
    end_run(engine, run_id, ended_at_s=150.0, exit_code=0)
    engine.dispose()

    engine = open_database(sqlite_url(tmp_path / "a.db"))
    runs = list_runs(engine, limit=10)
    latest = list_runs(engine, limit=1)
    engine.dispose()

    assert [(run.model, run.ended_at_s, run.exit_code) for run in runs] == [("n", None, None), ("m", 150.0, 0)]
    assert [run.model for run in latest] == ["n"]


def test_processes_that_open_a_new_database_together_all_get_it(tmp_path: Path) -> None:
    url = sqlite_url(tmp_path / "a.db")

    def open_and_add(_index: int) -> None:
        engine = open_database(url)
        add_run(engine, model="m", version="1", port=1, pid=1, started_at_s=1.0)
        engine.dispose()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(open_and_add, range(4)))

    engine = open_database(url)
    assert len(list_runs(engine, limit=10)) == 4
    engine.dispose()


def test_damaged_database_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "a.db").write_bytes(b"SQLite format 3\x00" + b"\xff" * 4096)

    with pytest.raises(MachineError, match="restore it from a backup"):
        open_database(sqlite_url(tmp_path / "a.db"))

    assert (tmp_path / "a.db").stat().st_size == 4112


def test_database_that_cannot_be_opened_says_so(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="unable to open"):
        open_database(sqlite_url(tmp_path / "none" / "a.db"))


@pytest.mark.parametrize("url", ["nonsense", "mysql://h/d", "sqlite+nothing:///x"])
def test_wrong_url_is_a_config_error(url: str) -> None:
    with pytest.raises(ConfigError, match=r"store\.url"):
        open_database(url)
