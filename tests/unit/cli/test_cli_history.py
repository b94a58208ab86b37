from pathlib import Path

import pytest

from headrace.base.clock import ManualClock
from headrace.base.config import Config, load_config
from headrace.cli.history import RunRecord, open_store
from headrace.store.runs import Run, list_runs


def settings(folder: Path) -> Config:
    folder.mkdir(mode=0o700, exist_ok=True)
    return load_config(None, {}, {"paths.state": str(folder)})


def runs_in(folder: Path) -> list[Run]:
    engine = open_store(None, str(folder))
    runs = list_runs(engine, limit=10)
    engine.dispose()
    return runs


def test_run_that_ends_at_once_is_written_whole(tmp_path: Path) -> None:
    clock = ManualClock(wall_start_s=1000.0)
    record = RunRecord(settings(tmp_path / "state"), clock)

    record.begin(model="m", port=8000)
    clock.advance(2.0)
    record.end(75)

    (run,) = runs_in(tmp_path / "state")
    assert (run.model, run.port, run.started_at_s, run.ended_at_s, run.exit_code) == ("m", 8000, 1000.0, 1002.0, 75)


def test_run_that_never_became_ready_leaves_no_row(tmp_path: Path) -> None:
    record = RunRecord(settings(tmp_path / "state"), ManualClock())

    record.end(11)

    assert runs_in(tmp_path / "state") == []


def test_damaged_database_is_logged_and_nothing_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = settings(tmp_path / "state")
    (tmp_path / "state" / "headrace.db").write_bytes(b"SQLite format 3\x00" + b"\xff" * 4096)
    record = RunRecord(config, ManualClock())

    record.begin(model="m", port=8000)
    record.end(0)

    assert "history_failed" in capsys.readouterr().err
