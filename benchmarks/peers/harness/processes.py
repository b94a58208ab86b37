"""Processes of the engines: started in a group of their own, stopped while others are measured, ended for sure."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

END_S = 20


class CellError(Exception):
    """An engine could not do a cell; the text says why, and stands in the results in the figure's place."""


def end_on_signals() -> None:
    """SIGTERM and SIGINT raise KeyboardInterrupt from now on, also under nohup, so that what was started is ended."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)


class Group:
    """One engine's processes.

    Args:
        log: gets what they print to stderr, and stdout where it is not piped.
        can_pause: whether idle threads may be frozen while others are measured; not under a supervisor with a clock.
    """

    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        log: Path,
        variables: Mapping[str, str],
        is_piped: bool = False,
        can_pause: bool = True,
    ) -> None:
        self._can_pause = can_pause
        self._log = log
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                [str(word) for word in command],
                stdin=subprocess.PIPE if is_piped else subprocess.DEVNULL,
                stdout=subprocess.PIPE if is_piped else errors,
                stderr=errors,
                env={**os.environ, **variables},
                start_new_session=True,
                text=is_piped,
            )

    def pause(self) -> None:
        """Freezes all threads, so that a pool that spins while it waits takes nothing from the next engine."""
        if self._can_pause:
            self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Lets them run again."""
        if self._can_pause:
            self._signal(signal.SIGCONT)

    def peak_bytes(self) -> int:
        """Returns the sum of the processes' largest resident sizes, with what several of them share counted once.

        The kernel keeps the largest resident size (VmHWM) of each process alone; what they share now, resident less
        proportional size (PSS), is taken off.
        """
        return sum(_peak_bytes(pid) - _shared_bytes(pid) for pid in descendants(self.process.pid))

    def end(self) -> None:
        """Ends the processes, by force after ``END_S`` seconds."""
        self.resume()
        self._signal(signal.SIGTERM)
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self.process.wait()

    def last_words(self) -> str:
        """Returns the end of the log."""
        return self._log.read_text(errors="replace")[-1500:]

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


def descendants(pid: int) -> list[int]:
    """Returns the process and all that it started, directly or not."""
    found = [pid]
    for known in found:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{known}/task").iterdir():
                found += [int(word) for word in (task / "children").read_text().split()]
    return found


def _peak_bytes(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return 1024 * int(status.partition("VmHWM:")[2].split()[0]) if "VmHWM:" in status else 0


def _shared_bytes(pid: int) -> int:
    """What others pay for of a process's resident pages. Pages that no other process maps are all its own."""
    try:
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    except OSError:
        return 0
    resident, proportional = (int(fields[name].split()[0]) for name in ("Rss", "Pss"))
    return 1024 * (resident - proportional)


def wait_until(deadline_s: float, what: str, group: Group) -> None:
    """Sleeps a little; raises when the process is gone or the time is up."""
    if group.process.poll() is not None:
        raise CellError(f"{what} ended with {group.process.returncode}: {group.last_words()}")
    if time.monotonic() > deadline_s:
        raise CellError(f"{what} took too long")
    time.sleep(0.005)
