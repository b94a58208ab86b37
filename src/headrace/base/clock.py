"""The clock port: time enters every package through here, so that tests and the simulator can hold it still.

Intervals and deadlines use ``now_s`` (monotonic); only what people read as a date uses ``wall_s``.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Something that tells the time."""

    def now_s(self) -> float:
        """Seconds on a clock that never goes back; its zero means nothing."""
        ...

    def wall_s(self) -> float:
        """Seconds since 1970 UTC; may jump."""
        ...


class SystemClock:
    """The machine's clocks."""

    def now_s(self) -> float:
        """Seconds on the machine's monotonic clock."""
        return time.monotonic()

    def wall_s(self) -> float:
        """Seconds since 1970 UTC."""
        return time.time()


class ManualClock:
    """A clock that moves only when told to.

    Args:
        start_s: first reading of ``now_s``.
        wall_start_s: first reading of ``wall_s``.
    """

    def __init__(self, start_s: float = 0.0, *, wall_start_s: float = 1_700_000_000.0) -> None:
        self._now_s = start_s
        self._wall_s = wall_start_s

    def now_s(self) -> float:
        """The reading that ``advance`` has brought about."""
        return self._now_s

    def wall_s(self) -> float:
        """The wall reading, advanced together with ``now_s``."""
        return self._wall_s

    def advance(self, duration_s: float) -> None:
        """Moves both readings on by ``duration_s`` ≥ 0."""
        assert duration_s >= 0, "a clock does not go back"
        self._now_s += duration_s
        self._wall_s += duration_s
