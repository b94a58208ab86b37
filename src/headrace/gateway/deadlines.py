"""Deadlines of many requests on one injected clock: a heap that is looked at a few times a second.

An asyncio timer per wait costs more than a streamed token; time-outs here are seconds long, so 50 ms of grain will do.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from typing import Final

from headrace.base.clock import Clock

GRAIN_S: Final = 0.05
_MIN_CANCELLED: Final = 256


class Deadline:
    """One deadline: calls ``expire`` once when it passes, unless cancelled before."""

    __slots__ = ("_owner", "due_at_s", "expire")

    def __init__(self, due_at_s: float, expire: Callable[[], None], owner: Deadlines) -> None:
        self.due_at_s = due_at_s
        self.expire: Callable[[], None] | None = expire
        self._owner = owner

    def cancel(self) -> None:
        """Forgets it; safe to call again."""
        if self.expire is not None:
            self.expire = None
            self._owner.note_cancelled()

    def __lt__(self, other: Deadline) -> bool:
        return self.due_at_s < other.due_at_s


class Deadlines:
    """All deadlines of a front."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._heap: list[Deadline] = []
        self._num_cancelled = 0

    def __len__(self) -> int:
        return len(self._heap)

    def after(self, delay_s: float, expire: Callable[[], None]) -> Deadline:
        """Makes a deadline ``delay_s`` from now."""
        deadline = Deadline(self._clock.now_s() + delay_s, expire, self)
        heapq.heappush(self._heap, deadline)
        return deadline

    def note_cancelled(self) -> None:
        """Counts a cancelled deadline; when they are most of the heap, it is built anew (amortised O(1))."""
        self._num_cancelled += 1
        if self._num_cancelled > _MIN_CANCELLED and 2 * self._num_cancelled > len(self._heap):
            self._heap = [deadline for deadline in self._heap if deadline.expire is not None]
            heapq.heapify(self._heap)
            self._num_cancelled = 0

    def run_due(self) -> None:
        """Calls everything whose time has come. Cost: O(log n) per deadline that passed."""
        now_s = self._clock.now_s()
        while self._heap and self._heap[0].due_at_s <= now_s:
            deadline = heapq.heappop(self._heap)
            expire = deadline.expire
            if expire is None:
                self._num_cancelled -= 1
            else:
                deadline.expire = None
                expire()

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            await asyncio.sleep(GRAIN_S)
            self.run_due()
