"""A ticket: what one request holds while it is inside a front, whatever it asks for.

Its deadlines, its places, the stream of its events, and the error that ends it from outside. Every request of every
kind has one, from its endpoint's first step until its answer is written, so the drain, the queue's deadline and the
quarantine cover all alike. What the request wants and says is its owner's: ``gateway.run``, ``gateway.encoding``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

from headrace.base.errors import DeadlineError, HeadraceError, WorkerLostError
from headrace.gateway.deadlines import Deadline
from headrace.gateway.ledger import Record
from headrace.gateway.pipeline import Pipeline
from headrace.replica.events import EventStream

# The worker's own time-out is a backstop for a front that died; the front's comes first.
BACKSTOP_S: Final = 5.0
# A prompt's first token may wait this long per token when the worker has not yet measured its prefill rate.
_SLOWEST_PREFILL_TOKENS_PER_S: Final = 50.0
MAX_ATTEMPTS: Final = 2

_T = TypeVar("_T")


class Ticket:
    """One request inside the front. ``close`` it in any case.

    Args:
        record: gets the moments and attempts.
        is_stream: its answer is a stream, which the drain gives more time.
    """

    def __init__(self, pipeline: Pipeline, record: Record, *, is_stream: bool) -> None:
        self.record = record
        self.is_stream = is_stream
        self.is_submitted = False
        self.events: EventStream | None = None
        self._pipeline = pipeline
        self._weight = 0
        self._deadlines: list[Deadline] = []
        self._queue_deadline: Deadline | None = None
        self._output_deadline: Deadline | None = None
        self._waiting_on: asyncio.Future[None] | None = None
        self._failure: HeadraceError | None = None
        self._identity: bytes | None = None
        self._is_alone = False
        self._is_closed = False
        pipeline.take_on(self)

    def start_clocks(self) -> None:
        """Starts the deadlines of the whole request and of its wait to be started.

        Raises:
            OverloadedError: there is no place, and none in the queue.
        """
        pipeline = self._pipeline
        pipeline.admission.check_room()
        self._deadlines.append(pipeline.deadlines.after(pipeline.limits.request_timeout_s, self._on_total_timeout))
        self._reset_queue_deadline()

    def check(self) -> None:
        """Raises what ended the request while it was doing something that cannot be interrupted."""
        if self._failure is not None:
            raise self._failure

    async def until_failed(self, work: Awaitable[_T]) -> _T:
        """Waits for ``work``, or for what ends the request meanwhile; the work is then cancelled.

        Raises:
            HeadraceError: what ``fail`` was given.
        """
        self.check()
        failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting_on = failed
        task = asyncio.ensure_future(work)
        awaited: tuple[asyncio.Future[Any], ...] = (task, failed)
        try:
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            self.check()
            return await task
        finally:
            task.cancel()
            self._waiting_on = None
            if failed.done():
                failed.exception()  # heard, by way of `check`

    def check_suspect(self, identity: Callable[[], bytes]) -> None:
        """Refuses a request that was running at several deaths of a worker.

        Args:
            identity: computes its fingerprint, which is only needed when anything is suspected.
        Raises:
            QuarantinedError: with ``request_quarantined``.
        """
        if not self._pipeline.quarantine.is_empty:
            self._identity = identity()
            self._pipeline.quarantine.check(self._identity)

    async def enter(self, weight: int) -> None:
        """Waits for so many places.

        Raises:
            HeadraceError: the queue is full, or the request was ended while it waited.
        """
        self._weight = await self._pipeline.admission.enter(weight, self._set_waiting_on)
        self._waiting_on = None
        self.check()

    def submit(self, start: Callable[[], EventStream]) -> EventStream:
        """Hands the request to the replica.

        Args:
            start: does it.
        Raises:
            WorkerLostError: there is no link; nothing was started.
        """
        self.record.num_attempts += 1
        self.is_submitted = True
        self.events = start()
        return self.events

    async def outlive_worker(self, identity: Callable[[], bytes]) -> None:
        """Waits for the next worker after one died; returns when the request may be submitted once more.

        Raises:
            HeadraceError: it had begun to answer, was retried before, is quarantined, or was ended meanwhile.
        """
        pipeline = self._pipeline
        known = self._identity = self._identity or identity()
        pipeline.quarantine.note_death(known)
        self._release_alone()
        if self.events is not None and self.events.has_tokens:
            raise WorkerLostError("the model's worker ended while it ran this request")
        pipeline.quarantine.check(known)
        if self.record.num_attempts >= MAX_ATTEMPTS or pipeline.is_draining:
            raise WorkerLostError("the model's worker ended while it ran this request, twice")
        self.events = None
        self.is_submitted = False
        self.record.started_at_s = None
        self._reset_queue_deadline()
        if self._output_deadline is not None:
            self._output_deadline.cancel()
            self._output_deadline = None
        await self.until_failed(self._wait_turn())

    def note_started(self) -> None:
        """Notes that the worker has begun; the first output has its own deadline from now on."""
        if self.record.started_at_s is not None:
            return
        pipeline = self._pipeline
        self.record.started_at_s = pipeline.clock.now_s()
        if self._queue_deadline is not None:
            self._queue_deadline.cancel()
        status = pipeline.replica.status
        rate = status.prefill_tokens_per_s if status is not None else 0.0
        wait_s = pipeline.limits.first_token_timeout_s
        wait_s += self.record.prompt_tokens / (rate or _SLOWEST_PREFILL_TOKENS_PER_S)
        self._output_deadline = pipeline.deadlines.after(wait_s, self._on_output_timeout)
        self._deadlines.append(self._output_deadline)

    def note_output(self) -> None:
        """Notes that something of the answer has come: it is no suspect, and only its whole life is limited."""
        self._release_alone()
        if self._output_deadline is not None:
            self._output_deadline.cancel()
        if self._queue_deadline is not None:
            self._queue_deadline.cancel()

    def fail(self, error: HeadraceError) -> None:
        """Ends the request from outside: a deadline, a drain."""
        self._failure = self._failure or error
        if self.events is not None:
            self.events.fail(error)
        elif self._waiting_on is not None and not self._waiting_on.done():
            self._waiting_on.set_exception(error)

    def close(self) -> None:
        """Aborts what still runs and gives everything back; safe to call again."""
        if self._is_closed:
            return
        self._is_closed = True
        for deadline in self._deadlines:
            deadline.cancel()
        if self.events is not None:
            self.events.close()
        self._release_alone()
        if self._weight:
            self._pipeline.admission.leave(self._weight)
        self._pipeline.forget(self)

    def _set_waiting_on(self, future: asyncio.Future[None]) -> None:
        self._waiting_on = future

    async def _wait_turn(self) -> None:
        await self._pipeline.quarantine.alone.acquire()
        self._is_alone = True
        await self._pipeline.replica.wait_ready()

    def _release_alone(self) -> None:
        if self._is_alone:
            self._is_alone = False
            self._pipeline.quarantine.alone.release()

    def _reset_queue_deadline(self) -> None:
        if self._queue_deadline is not None:
            self._queue_deadline.cancel()
        limit_s = self._pipeline.limits.queue_timeout_s
        self._queue_deadline = self._pipeline.deadlines.after(limit_s, self._on_queue_timeout)
        self._deadlines.append(self._queue_deadline)

    def _on_queue_timeout(self) -> None:
        limit_s = self._pipeline.limits.queue_timeout_s
        message = f"the request has waited {limit_s:g} s without being started, the limit: try again later"
        self.fail(self._pipeline.overloaded(message, "queue_timeout"))

    def _on_output_timeout(self) -> None:
        self.fail(DeadlineError("the first output did not come in time: send less or try again later"))

    def _on_total_timeout(self) -> None:
        limit_s = self._pipeline.limits.request_timeout_s
        self.fail(DeadlineError(f"the request has run for {limit_s:g} s, the limit: ask for less"))
