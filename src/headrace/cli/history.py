"""Keeps the history of runs for ``headrace status --history``; it never gets in a server's way.

The database's library takes 24 MiB and half a second of CPU to import. So the supervisor, which stays for days, never
loads it while it serves: a run's start is written by a process of its own (``python -m headrace.cli.history``: the run
as JSON in, what came of it as JSON out), its end by the supervisor itself when all else has ended.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import msgspec

import headrace
from headrace.base.errors import HeadraceError
from headrace.base.log import get_log

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from headrace.base.clock import Clock
    from headrace.base.config import Config

_DELAY_S: Final = 5.0
# Import, migration, and the longest wait for another writer, on a machine that is busy with the first requests.
_LIMIT_S: Final = 60.0
_PROCESS: Final = (sys.executable, "-P", "-m", "headrace.cli.history")

log = get_log(__name__)


class Run(msgspec.Struct, frozen=True):
    """A run as it is written at its start.

    Args:
        url, state: of the database, as the settings have them.
        pid: the supervisor's.
    """

    url: str | None
    state: str | None
    model: str
    port: int
    pid: int
    started_at_s: float


class Written(msgspec.Struct, frozen=True):
    """What came of writing: the row's id, or why there is none."""

    run_id: int | None = None
    problem: str | None = None


def open_store(url: str | None, state: str | None, *, is_migrated: bool = False) -> Engine:
    """Opens the database that the settings name; by default a file in the state folder."""
    from headrace.fleet.sockets import state_folder
    from headrace.store.database import open_database, sqlite_url

    file = url or sqlite_url(state_folder(state, os.environ) / "headrace.db")
    return open_database(file, is_migrated=is_migrated)


def write(run: Run, run_id: int | None = None, end: tuple[float, int] | None = None) -> Written:
    """Writes a run's start where it has no row yet, and its end: the moment and the exit code, if they are given."""
    from sqlalchemy.exc import DatabaseError

    from headrace.store.runs import add_run, end_run

    try:
        engine = open_store(run.url, run.state, is_migrated=run_id is not None)
        try:
            if run_id is None:
                run_id = add_run(
                    engine,
                    model=run.model,
                    version=headrace.__version__,
                    port=run.port,
                    pid=run.pid,
                    started_at_s=run.started_at_s,
                )
            if end is not None:
                end_run(engine, run_id, ended_at_s=end[0], exit_code=end[1])
        finally:
            engine.dispose()
    except DatabaseError as error:
        return Written(problem=str(error.orig))
    except HeadraceError as error:
        return Written(problem=error.message)
    return Written(run_id=run_id)


def write_apart(run: Run, command: Sequence[str] = _PROCESS) -> Written:
    """Writes a run's start in a process of its own, and waits for it.

    Args:
        command: tests put a stand-in here.
    """
    try:
        done = subprocess.run(
            command,
            input=msgspec.json.encode(run),
            stdout=subprocess.PIPE,
            timeout=_LIMIT_S,
            check=True,
            process_group=0,  # a terminal's Ctrl-C is for the server, which drains first
        )
        return msgspec.json.decode(done.stdout, type=Written)
    except (OSError, subprocess.SubprocessError, msgspec.MsgspecError) as error:
        return Written(problem=f"the process that writes it failed: {error}")


class RunRecord:
    """The row of one run. The supervisor's loop waits neither for the disk nor for the library.

    A fault of the database is logged and the server goes on; it serves well without a history.

    Args:
        delay_s: from the start of a run to its row: the first requests need the CPU more.
    """

    def __init__(self, config: Config, clock: Clock, *, delay_s: float = _DELAY_S) -> None:
        self._config = config
        self._clock = clock
        self._delay_s = delay_s
        self._started_at_s = clock.wall_s()
        self._run: Run | None = None
        self._timer: threading.Timer | None = None
        self._written: Written | None = None

    def begin(self, *, model: str, port: int) -> None:
        """Writes the start, after a while."""
        self._run = Run(
            self._config.store.url,
            self._config.paths.state,
            model,
            port,
            os.getpid(),
            self._started_at_s,
        )
        self._timer = threading.Timer(self._delay_s, self._write_start, (self._run,))
        self._timer.start()

    def wait_written(self) -> None:
        """Waits until the start has been written, or could not be."""
        if self._timer is not None:
            self._timer.join()

    def end(self, exit_code: int) -> None:
        """Writes the end, now; nothing for a run that never became ready, or whose start could not be written."""
        if self._run is None or self._timer is None:
            return
        self._timer.cancel()
        self.wait_written()
        started = self._written or Written()
        if started.problem is None:
            _note(write(self._run, started.run_id, (self._clock.wall_s(), exit_code)))

    def _write_start(self, run: Run) -> None:
        self._written = _note(write_apart(run))


def _note(written: Written) -> Written:
    if written.problem is not None:
        log.warning("history_failed", reason=written.problem)
    return written


def main() -> int:
    """Writes the start of the run on stdin, giving way to all other processes; says on stdout what came of it."""
    os.setpriority(os.PRIO_PROCESS, 0, 19)
    run = msgspec.json.decode(sys.stdin.buffer.read(), type=Run)
    sys.stdout.buffer.write(msgspec.json.encode(write(run)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
