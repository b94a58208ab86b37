"""Admission: how many sequences may be inside the engine at once, and how many may wait for a place.

First come, first served. A request weighs as many places as it has sequences, but never more than there are, so that
a wide request waits for an empty house instead of for ever.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from headrace.base.errors import OverloadedError


@dataclass(slots=True, eq=False)
class _Waiter:
    weight: int
    is_admitted: asyncio.Future[None]
    has_place: bool = False


class Admission:
    """The places of one model.

    Args:
        capacity: sequences that may run at once, ≥ 1.
        max_waiting: requests that may wait.
        retry_after_s: gives when a refused caller should come back.
    """

    def __init__(self, capacity: int, max_waiting: int, retry_after_s: Callable[[], float] = lambda: 1.0) -> None:
        self.capacity = capacity
        self.max_waiting = max_waiting
        self.num_running = 0
        self._retry_after_s = retry_after_s
        self._waiting: deque[_Waiter] = deque()

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    def check_room(self) -> None:
        """Refuses at once, before any work, when neither a place nor a place in the queue is free.

        Raises:
            OverloadedError: ``queue_full``.
        """
        if len(self._waiting) >= self.max_waiting and self.num_running >= self.capacity:
            raise self._full()

    async def enter(self, weight: int, on_wait: Callable[[asyncio.Future[None]], None]) -> int:
        """Waits for a place; a caller that gives up is cancelled.

        Args:
            on_wait: given the future that is waited for, so that a deadline can fail it.
        Returns:
            The weight to give back to ``leave``.
        Raises:
            OverloadedError: ``queue_full``.
        """
        weight = min(weight, self.capacity)
        if not self._waiting and self.num_running + weight <= self.capacity:
            self.num_running += weight
            return weight
        if len(self._waiting) >= self.max_waiting:
            raise self._full()
        waiter = _Waiter(weight, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        on_wait(waiter.is_admitted)
        try:
            await waiter.is_admitted
        except BaseException:
            if waiter.has_place:
                self.leave(weight)  # admitted and cancelled in the same turn of the loop
            elif waiter in self._waiting:
                self._waiting.remove(waiter)
                self._admit()
            raise
        return weight

    def leave(self, weight: int) -> None:
        """Gives places back."""
        self.num_running -= weight
        assert self.num_running >= 0, "more places were given back than taken"
        self._admit()

    def _full(self) -> OverloadedError:
        return OverloadedError(
            f"{self.num_running} sequences run and {len(self._waiting)} requests wait, the limits are "
            f"{self.capacity} and {self.max_waiting}: try again later",
            retry_after_s=self._retry_after_s(),
        )

    def _admit(self) -> None:
        while self._waiting and self.num_running + self._waiting[0].weight <= self.capacity:
            waiter = self._waiting.popleft()
            if not waiter.is_admitted.done():  # else it was failed or cancelled and is not yet awake
                waiter.has_place = True
                self.num_running += waiter.weight
                waiter.is_admitted.set_result(None)
