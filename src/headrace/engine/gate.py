"""The gate before threads that several workers share: each steps in its turn, and none waits in the kernel for another.

The workers are processes of one supervisor and see one page of memory: a slot of four numbers each. Who goes is
``policy.turns``'s decision, which every worker takes for itself; a record lock keeps two from deciding at once, and the
kernel frees it when its holder dies. A worker that must wait goes back to its loop and serves its link; an event
descriptor ends its wait. With nobody else at the gate a step costs one look at the page.

    page: [clock_s, waiting_at_s, holding_at_s, pid] × workers, f64, native order; at the end [floor_s, …, …, …]
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
from headrace.policy.turns import Slot, TurnConfig, advanced, decide
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
        self._clock = clock
        self._config = config or TurnConfig()
        self._memory_fd = launch.memory_fd
        self._memory = mmap.mmap(launch.memory_fd, GATE_MEMORY_BYTES)
        self._at = launch.index * _SLOT.size
        self._clock_s = 0.0
        self._is_holding = False
        self._is_waiting = False
        self._write(0.0, 0.0, 0.0)  # what a worker before us left behind

    def enter(self) -> bool:
        """Takes the turn if it is ours; else the worker waits for ``wake_fd``, at most ``policy.turns.LOOK_S``."""
        now_s = self._clock.now_s()
        if self._is_holding and not self._is_anybody_waiting():
            self._put(_HOLDING, now_s)
            return True
        with self._locked():
            if not self._is_waiting and not self._is_holding:
                (floor_s,) = _NUMBER.unpack_from(self._memory, _FLOOR_AT)
                self._clock_s = max(self._clock_s, floor_s)
            self._write(self._clock_s, now_s, now_s if self._is_holding else 0.0)
            slots = self._slots(now_s)
            decision = decide(slots, self._index, self._config, now_s)
            self._is_waiting = not decision.may_go
            self._is_holding = decision.may_go
            if decision.may_go:
                self._write(self._clock_s, 0.0, now_s)
                _NUMBER.pack_into(self._memory, _FLOOR_AT, self._clock_s)
            else:
                self._write(self._clock_s, now_s, 0.0)
        if not decision.may_go:
            # The next one's wait is over; one that runs ends its steps in a row.
            running = [index for index, slot in enumerate(slots) if slot.holding_at_s and index != self._index]
            self._wake(running if decision.first is None else [decision.first])
        return decision.may_go

    def note_step(self, step_s: float) -> None:
        """Counts a step; the turn is kept until ``enter`` or ``rest`` gives it to another."""
        self._clock_s = advanced(self._clock_s, step_s, self._share)
        self._put(_CLOCK, self._clock_s)

    def rest(self) -> None:
        """Gives the turn up: there is nothing to step for. Cheap when it is not held."""
        if not self._is_holding and not self._is_waiting:
            return
        was_holding, self._is_holding, self._is_waiting = self._is_holding, False, False
        now_s = self._clock.now_s()
        with self._locked():
            self._write(self._clock_s, 0.0, 0.0)
            slots = self._slots(now_s)
        since_s = now_s - self._config.absent_s
        waiting = [(slot.clock_s, index) for index, slot in enumerate(slots) if slot.waiting_at_s > since_s]
        if waiting and was_holding:
            self._wake([min(waiting)[1]])

    def close(self) -> None:
        """Gives the turn up for good."""
        self.rest()
        self._memory.close()

    @property
    def is_contended(self) -> bool:
        """Whether another worker waits: steps in a row would keep it waiting."""
        return self._is_anybody_waiting()

    def _wake(self, indexes: Sequence[int]) -> None:
        for index in indexes:
            with contextlib.suppress(BlockingIOError):  # its counter is full: it has been woken often enough
                os.eventfd_write(self._wake_fds[index], 1)

    def _is_anybody_waiting(self) -> bool:
        return any(
            _NUMBER.unpack_from(self._memory, index * _SLOT.size + _WAITING * _NUMBER.size)[0]
            for index in range(len(self._wake_fds))
            if index != self._index
        )

    def _slots(self, now_s: float) -> list[Slot]:
        """Reads all slots; one whose process is gone counts as empty."""
        slots = []
        for index in range(len(self._wake_fds)):
            clock_s, waiting_at_s, holding_at_s, pid = _SLOT.unpack_from(self._memory, index * _SLOT.size)
            is_old = now_s - max(waiting_at_s, holding_at_s) > 2e-3
            if holding_at_s and is_old and index != self._index and not _is_alive(int(pid)):
                waiting_at_s = holding_at_s = 0.0
            slots.append(Slot(clock_s, waiting_at_s, holding_at_s))
        return slots

    def _put(self, field: int, value: float) -> None:
        _NUMBER.pack_into(self._memory, self._at + field * _NUMBER.size, value)

    def _write(self, clock_s: float, waiting_at_s: float, holding_at_s: float) -> None:
        _SLOT.pack_into(self._memory, self._at, clock_s, waiting_at_s, holding_at_s, os.getpid())

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
