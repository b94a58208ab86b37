import subprocess
import sys
from pathlib import Path

import pytest

from headrace.base.clock import ManualClock
from headrace.base.config import Config, load_config
from headrace.cli.history import Run as Start
from headrace.cli.history import RunRecord, open_store, write_apart
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


def test_run_that_lasts_is_written_at_its_start_and_at_its_end(tmp_path: Path) -> None:
    clock = ManualClock(wall_start_s=1000.0)
    record = RunRecord(settings(tmp_path / "state"), clock, delay_s=0.0)

    record.begin(model="m", port=8000)
    record.wait_written()
    (begun,) = runs_in(tmp_path / "state")
    clock.advance(60.0)
    record.end(0)

    (run,) = runs_in(tmp_path / "state")
    assert (begun.model, begun.started_at_s, begun.ended_at_s, begun.exit_code) == ("m", 1000.0, None, None)
    assert (run.id, run.started_at_s, run.ended_at_s, run.exit_code) == (begun.id, 1000.0, 1060.0, 0)


def test_start_that_cannot_be_written_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = settings(tmp_path / "state")
    (tmp_path / "state" / "headrace.db").write_bytes(b"SQLite format 3\x00" + b"\xff" * 4096)
    record = RunRecord(config, ManualClock(), delay_s=0.0)

    record.begin(model="m", port=8000)
    record.wait_written()
    record.end(0)

    assert capsys.readouterr().err.count("history_failed") == 1


def test_process_that_fails_is_a_problem_and_no_fault() -> None:
    start = Start(url=None, state=None, model="m", port=8000, pid=1, started_at_s=0.0)

    failed = write_apart(start, (sys.executable, "-c", "raise SystemExit(3)"))
    missing = write_apart(start, ("/no/such/program",))

    assert failed.problem is not None
    assert "exit status 3" in failed.problem
    assert missing.problem is not None
    assert "No such file" in missing.problem


def test_server_never_loads_the_database_library_while_it_serves(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir(mode=0o700)
    program = f"""
import sys
from headrace.base.clock import SystemClock
from headrace.base.config import load_config
from headrace.cli.history import RunRecord
record = RunRecord(load_config(None, {{}}, {{"paths.state": {str(tmp_path / "state")!r}}}), SystemClock(), delay_s=0.0)
record.begin(model="m", port=8000)
record.wait_written()
print("sqlalchemy" in sys.modules or "alembic" in sys.modules)
record.end(0)
print("alembic" in sys.modules)
"""

    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert said.stdout.split() == ["False", "False"]
    assert runs_in(tmp_path / "state")[0].exit_code == 0
