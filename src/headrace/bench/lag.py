"""How late the generator itself is: what must be known before its figures are believed."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable
from typing import Final

from headrace.bench.records import Lag
from headrace.bench.timer import Call, Timer

INTERVAL_S: Final = 0.01


class LagMeter:
    """Wakes up a hundred times a second and notes how late. Memory: 400 bytes a second."""

    def __init__(self, timer: Timer) -> None:
        self._timer = timer
        self._call: Call | None = None
        self._due_s = 0.0
        self.lags_s = array("f")

    def start(self, at_s: float) -> None:
        """Begins at a moment."""
        self._due_s = at_s
        self._call = self._timer.call_at(at_s, self._wake)

    def stop(self) -> None:
        """Ends it."""
        if self._call is not None:
            self._call.cancel()

    def _wake(self) -> None:
        now_s = time.monotonic()
        self.lags_s.append(max(0.0, now_s - self._due_s))
        # What was missed while the loop stood still is not made up for: it was one lag, and it has been noted.
        self._due_s += INTERVAL_S * (1 + int(max(0.0, now_s - self._due_s) / INTERVAL_S))
        self._call = self._timer.call_at(self._due_s, self._wake)


def summarize_lags(lags_s: Iterable[float]) -> Lag:
    """Gives median, 99th percentile and maximum; all zero where there are none."""
    ordered = sorted(lags_s)
    if not ordered:
        return Lag(0.0, 0.0, 0.0)
    last = len(ordered) - 1
    return Lag(*(round(ordered[round(share * last)], 6) for share in (0.5, 0.99, 1.0)))
