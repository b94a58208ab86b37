"""How late the generator itself is: what must be known before its figures are believed."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable
from typing import Final

from headrace.bench.records import Lag
from headrace.bench.timer import Call, Timer

INTERVAL_S: Final = 0.01
MAX_READINGS: Final = 2**16


class Readings:
    """Numbers of which percentiles will be wanted, in bounded memory.

    When ``MAX_READINGS`` are held every second one is dropped, and from then on only every second one is taken, and so
    on: an even sample of the whole. The largest is always kept.
    """

    def __init__(self) -> None:
        self._values = array("f")
        self._stride = 1
        self._until_next = 0
        self._largest = float("-inf")

    def add(self, value: float) -> None:
        """Takes a number."""
        self._largest = max(self._largest, value)
        if self._until_next:
            self._until_next -= 1
            return
        self._until_next = self._stride - 1
        self._values.append(value)
        if len(self._values) >= MAX_READINGS:
            self._values = self._values[::2]
            self._stride *= 2

    def values(self) -> list[float]:
        """Gives the sample and the largest number, in no order."""
        return [*self._values, self._largest] if self._values else []


class LagMeter:
    """Wakes up a hundred times a second and notes how late."""

    def __init__(self, timer: Timer) -> None:
        self._timer = timer
        self._call: Call | None = None
        self._due_s = 0.0
        self.lags_s = Readings()

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
        self.lags_s.add(max(0.0, now_s - self._due_s))
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
