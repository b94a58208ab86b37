"""The events of one request on their way from a replica to the pipeline: one producer, one consumer, bounded.

The producer pushes from the link's read callback; the consumer takes everything that has arrived at once, so a slow
consumer makes bigger batches instead of more wake-ups.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Final

from headrace.base.errors import OverloadedError
from headrace.protocol.frames import Event, Failed, Finished, Tokens

# api.md: a stalled reader holds at most 256 KiB; the transport's own high-water mark is 64 KiB of them.
MAX_PENDING_BYTES: Final = 192 * 2**10
# A Python integer and its list slot, and a log-probability entry with its two lists: measured with sys.getsizeof.
_ID_BYTES: Final = 40
_TOP_BYTES: Final = 72


class EventStream:
    """Events of the requests in ``request_ids``, until each has ended.

    Args:
        request_ids: the submitted requests that report here.
        abort: called with each id that still runs when the stream is closed.
    """

    def __init__(self, request_ids: list[str], abort: Callable[[list[str]], None]) -> None:
        self.open_ids = set(request_ids)
        self.has_started = False
        self.has_tokens = False
        self.on_overrun: Callable[[], None] | None = None
        self._abort = abort
        self._events: list[Event] = []
        self._pending_bytes = 0
        self._failure: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def push(self, event: Event) -> None:
        """Adds an event; a consumer that let more than ``MAX_PENDING_BYTES`` pile up loses the stream."""
        if self._failure is not None:
            return
        if isinstance(event, Tokens):
            self.has_started = True
            self.has_tokens = True
            self._pending_bytes += _size(event) if event.logprobs else _ID_BYTES * len(event.ids)
            if self._pending_bytes > MAX_PENDING_BYTES and self.on_overrun is not None:
                self.fail(OverloadedError("the client reads too slowly", code="slow_client"))
                self.on_overrun()
                return
        elif isinstance(event, (Finished, Failed)):
            self.open_ids.discard(event.request_id)
        else:
            self.has_started = True
        self._events.append(event)
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def fail(self, error: Exception) -> None:
        """Ends the stream with an error, which the consumer sees after what has arrived before."""
        if self._failure is None:
            self._failure = error
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_result(None)

    async def take(self) -> list[Event]:
        """Waits for events and gives all that have arrived; an empty list when every request has ended.

        Raises:
            HeadraceError: what ``fail`` was given.
        """
        if not self._events and self._failure is None:
            if not self.open_ids:
                return []
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._events:
            events = self._events
            self._events = []
            self._pending_bytes = 0
            return events
        if self._failure is not None:
            raise self._failure
        return []

    async def __aiter__(self) -> AsyncIterator[Event]:
        """Yields the events one by one."""
        while events := await self.take():
            for event in events:
                yield event

    def close(self) -> None:
        """Aborts what still runs; safe to call again."""
        if self.open_ids:
            ids = list(self.open_ids)
            self.open_ids.clear()
            self._abort(ids)


def _size(event: Tokens) -> int:
    """Gives about how much memory tokens with log-probabilities hold, bytes."""
    return _ID_BYTES * len(event.ids) + sum(_TOP_BYTES * (2 + len(entry.top_ids)) for entry in event.logprobs)
