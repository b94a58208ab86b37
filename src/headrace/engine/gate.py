"""The gate before threads that several workers share: each steps in its turn, and none waits in the kernel for another.

The workers are processes of one supervisor and see one page of memory: a slot of four numbers each. Who goes is
``policy.turns``'s decision, which every worker takes for itself; a record lock keeps two from deciding at once, and the
kernel frees it when its holder dies. A worker that must wait goes back to its loop and serves its link; an event
descriptor ends its wait. With nobody else at the gate a step costs one look at the page.

    page: [clock_s, waiting_at_s, holding_until_s, pid] × workers, f64, native order; at the end [floor_s, …, …, …]
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
import time
from collections.abc import Iterator, Sequence
from typing import Final

from headrace.base.clock import Clock
from headrace.policy.turns import Slot, TurnConfig, advanced, decide, respected_until_s
from headrace.protocol.launch import GATE_MEMORY_BYTES, GateLaunch

_SLOT: Final = struct.Struct("4d")
_NUMBER: Final = struct.Struct("d")
_CLOCK, _WAITING, _HOLDING, _PID = range(4)
_FLOOR_AT: Final = GATE_MEMORY_BYTES - _SLOT.size
# The lock is held for microseconds. Who does not get it in 10 ms (its holder was stopped) goes on without: the page
# only advises.
_LOCK_TRIES: Final = 50
_LOCK_PAUSE_S: Final = 0.0002


class Gate:
    """One worker's place at the gate. Not for several threads.

    Args:
        clock: the same for all workers (``CLOCK_MONOTONIC``).
    """

    def __init__(self, launch: GateLaunch, clock: Clock, config: TurnConfig | None = None) -> None:
        self.wake_fd = launch.wake_fds[launch.index]
        self._wake_fds = launch.wake_fds
        self._index = launch.index
        self._share = launch.share
        self._slowdown = launch.total_share / launch.share
        self._clock = clock
        self._config = config or TurnConfig()
        self._memory_fd = launch.memory_fd
        self._memory = mmap.mmap(launch.memory_fd, GATE_MEMORY_BYTES)
        self._at = launch.index * _SLOT.size
        self._clock_s = 0.0
        self._is_holding = False
        self._is_waiting = False
        self._waiting_since_s = 0.0
        self._waited_s = 0.0
        self._held_s = 0.0
        self._charged_at_s = 0.0
        self._write(0.0, 0.0, 0.0)  # what a worker before us left behind

    def enter(self, step_s: float = 0.0) -> bool:
        """Takes the turn if it is ours; else the worker waits for ``wake_fd``, at most ``policy.turns.LOOK_S``.

        Args:
            step_s: what the step is expected to take.
        """
        now_s = self._clock.now_s()
        until_s = respected_until_s(self._config, now_s, step_s)
        if self._is_holding:
            self._charge(now_s)
            if not self.is_contended:
                self._put(_HOLDING, until_s)
                return True
        with self._locked():
            if not self._is_waiting and not self._is_holding:
                (floor_s,) = _NUMBER.unpack_from(self._memory, _FLOOR_AT)
                self._clock_s = max(self._clock_s, floor_s)
            self._write(self._clock_s, now_s, until_s if self._is_holding else 0.0)
            slots = self._slots()
            decision = decide(slots, self._index, self._config, now_s)
            if decision.may_go:
                self._write(self._clock_s, 0.0, until_s)
                _NUMBER.pack_into(self._memory, _FLOOR_AT, self._clock_s)
            else:
                self._write(self._clock_s, now_s, 0.0)
        self._note(now_s, may_go=decision.may_go)
        if not decision.may_go:
            # The next one's wait is over; one that runs ends its steps in a row.
            running = [index for index, slot in enumerate(slots) if slot.holding_until_s and index != self._index]
            self._wake(running if decision.first is None else [decision.first])
        return decision.may_go

    def leave(self) -> None:
        """Ends a step: the turn goes to whoever has waited for it, so the next step begins while we say what ours gave.

        With nobody waiting the turn is kept, until ``enter`` or ``rest`` gives it away.
        """
        now_s = self._clock.now_s()
        self._charge(now_s)
        if not self.is_contended:
            return
        with self._locked():
            decision = decide(self._slots(), self._index, self._config, now_s)
            if decision.first is None or decision.may_go:
                return
            self._write(self._clock_s, 0.0, 0.0)
        self._is_holding = False
        self._wake([decision.first])

    def rest(self) -> None:
        """Gives the turn up: there is nothing to step for. Cheap when it is not held."""
        if not self._is_holding and not self._is_waiting:
            return
        now_s = self._clock.now_s()
        was_holding = self._is_holding
        if was_holding:
            self._charge(now_s)
        self._is_holding = self._is_waiting = False
        with self._locked():
            self._write(self._clock_s, 0.0, 0.0)
            slots = self._slots()
        since_s = now_s - self._config.absent_s
        waiting = [(slot.clock_s, index) for index, slot in enumerate(slots) if slot.waiting_at_s > since_s]
        if waiting and was_holding:
            self._wake([min(waiting)[1]])

    def close(self) -> None:
        """Gives the turn up for good."""
        self.rest()
        self._memory.close()

    @property
    def slowdown(self) -> float:
        """How many times as long its steps take with their waits when all are busy."""
        return self._slowdown

    @property
    def waited_s(self) -> float:
        """How long it has waited for its turns, all together."""
        return self._waited_s

    @property
    def held_s(self) -> float:
        """How long it has held the turn, all together."""
        return self._held_s

    @property
    def is_contended(self) -> bool:
        """Whether another worker waits: steps in a row would keep it waiting. Cost: about a microsecond."""
        return any(
            _NUMBER.unpack_from(self._memory, index * _SLOT.size + _WAITING * _NUMBER.size)[0]
            for index in range(len(self._wake_fds))
            if index != self._index
        )

    def _charge(self, now_s: float) -> None:
        """Counts the time since the last charge, during which nobody else could step."""
        passed_s = now_s - self._charged_at_s
        self._charged_at_s = now_s
        self._held_s += passed_s
        self._clock_s = advanced(self._clock_s, passed_s, self._share)
        self._put(_CLOCK, self._clock_s)

    def _note(self, now_s: float, *, may_go: bool) -> None:
        if may_go:
            if self._is_waiting:
                self._waited_s += now_s - self._waiting_since_s
            self._charged_at_s = now_s
        elif not self._is_waiting:
            self._waiting_since_s = now_s
        self._is_waiting, self._is_holding = not may_go, may_go

    def _wake(self, indexes: Sequence[int]) -> None:
        for index in indexes:
            with contextlib.suppress(BlockingIOError):  # its counter is full: it has been woken often enough
                os.eventfd_write(self._wake_fds[index], 1)

    def _slots(self) -> list[Slot]:
        """Reads all slots; one that runs though its process is gone counts as empty."""
        slots = []
        for index in range(len(self._wake_fds)):
            clock_s, waiting_at_s, until_s, pid = _SLOT.unpack_from(self._memory, index * _SLOT.size)
            if until_s and index != self._index and not _is_alive(int(pid)):
                waiting_at_s = until_s = 0.0
            slots.append(Slot(clock_s, waiting_at_s, until_s))
        return slots

    def _put(self, field: int, value: float) -> None:
        _NUMBER.pack_into(self._memory, self._at + field * _NUMBER.size, value)

    def _write(self, clock_s: float, waiting_at_s: float, holding_until_s: float) -> None:
        _SLOT.pack_into(self._memory, self._at, clock_s, waiting_at_s, holding_until_s, os.getpid())

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        has_lock = False
        for _ in range(_LOCK_TRIES):
            try:
                fcntl.lockf(self._memory_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                time.sleep(_LOCK_PAUSE_S)
                continue
            has_lock = True
            break
        try:
            yield
        finally:
            if has_lock:
                fcntl.lockf(self._memory_fd, fcntl.LOCK_UN)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
