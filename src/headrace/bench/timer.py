"""Calls at exact moments. Event loops wake up to a millisecond late, which is half of what we may be off by.

On Linux one timerfd wakes the loop, armed for the earliest call; elsewhere the loop's own timer does. The standard
library has timerfd from Python 3.13 on, so libc is called directly.
"""

from __future__ import annotations

import asyncio
import ctypes
import heapq
import os
import sys
import time
from collections.abc import Callable
from typing import Final

_CLOCK_MONOTONIC: Final = 1
_TFD_TIMER_ABSTIME: Final = 1
_TFD_NONBLOCK_CLOEXEC: Final = os.O_NONBLOCK | getattr(os, "O_CLOEXEC", 0)
# A call that is due within this time is made at once: waking up again would take longer.
_SLACK_S: Final = 20e-6


class _Moment(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Setting(ctypes.Structure):
    _fields_ = (("interval", _Moment), ("value", _Moment))


class Call:
    """A call that is to be made; cancelled by ``cancel``."""

    __slots__ = ("callback",)

    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        """Takes the call back; harmless when it was made."""
        self.callback = None


class Timer:
    """Makes calls at moments of ``time.monotonic``, in their order, on the running event loop.

    Callbacks must not raise. Close it before the loop ends.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: list[tuple[float, int, Call]] = []
        self._num_calls = 0
        self._armed_s = float("inf")
        self._handle: asyncio.TimerHandle | None = None
        self._libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
        self._fd = -1
        if self._libc is not None:
            self._fd = self._libc.timerfd_create(_CLOCK_MONOTONIC, _TFD_NONBLOCK_CLOEXEC)
            if self._fd >= 0:
                loop.add_reader(self._fd, self._wake)
        self._setting = _Setting()

    def call_at(self, at_s: float, callback: Callable[[], None]) -> Call:
        """Makes a call at ``at_s``, or as soon as possible where that has passed."""
        call = Call(callback)
        self._num_calls += 1
        heapq.heappush(self._calls, (at_s, self._num_calls, call))
        if at_s < self._armed_s:
            self._arm(at_s)
        return call

    def close(self) -> None:
        """Makes no further call."""
        self._calls.clear()
        if self._handle is not None:
            self._handle.cancel()
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _arm(self, at_s: float) -> None:
        self._armed_s = at_s
        if self._fd < 0:
            if self._handle is not None:
                self._handle.cancel()
            self._handle = self._loop.call_later(max(0.0, at_s - time.monotonic()), self._make_calls)
            return
        assert self._libc is not None
        nanoseconds = max(1, int(at_s * 1e9))  # all zero would disarm it
        value = self._setting.value
        value.seconds, value.nanoseconds = divmod(nanoseconds, 1_000_000_000)
        self._libc.timerfd_settime(self._fd, _TFD_TIMER_ABSTIME, ctypes.byref(self._setting), None)

    def _wake(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return  # it was armed anew in between
        self._make_calls()

    def _make_calls(self) -> None:
        self._armed_s = float("inf")
        calls = self._calls
        # Only what is due now: calls that these bring about wait for the loop to look at its sockets.
        limit_s = time.monotonic() + _SLACK_S
        while calls and calls[0][0] <= limit_s:
            callback = heapq.heappop(calls)[2].callback
            if callback is not None:
                callback()
        while calls and calls[0][2].callback is None:
            heapq.heappop(calls)
        if calls and calls[0][0] < self._armed_s:
            self._arm(calls[0][0])
