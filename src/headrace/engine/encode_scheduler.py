"""The scheduler of a model that makes vectors: requests of many inputs each, from Encode to their one ending.

A step takes whole inputs until its rows are full: they differ in length and lie one after the other, so nothing is
padded. Requests of equal priority take turns, one input each, so a batch of ten thousand delays a single text by one
step. Nothing is kept between steps: no pages, no preemption.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.base.errors import ContextLengthError, DeadlineError, NumericalError, OverloadedError, RequestError
from headrace.engine.blocks import BlockPool
from headrace.engine.scheduler import Totals
from headrace.engine.validate import MAX_MARKS, check_encode
from headrace.protocol.frames import (
    ID_BYTES,
    Encode,
    Encoded,
    EncodeForm,
    Event,
    Failed,
    Finished,
    FinishReason,
    Started,
)

Float32s = npt.NDArray[np.float32]
Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class EncodeConfig:
    """Limits of one worker.

    Args:
        width: elements of a vector.
        context_tokens: tokens of one input.
        max_sequences, max_step_tokens, max_marks: inputs, rows and marks of a step; any input fits one.
        queue_limit: requests that may be here.
        forms: what may be wanted of an input.
    """

    vocab_size: int
    width: int
    context_tokens: int
    max_sequences: int = 32
    max_step_tokens: int = 512
    max_marks: int = MAX_MARKS
    queue_limit: int = 4096
    forms: tuple[EncodeForm, ...] = (EncodeForm.POOLED,)


@dataclass(slots=True, eq=False)
class _Request:
    """One Encode and how far it is. ``turn`` grows when it is served: the least recently served goes first."""

    owner: int
    encode: Encode
    order: int
    arrived_at_s: float
    turn: int
    num_planned: int = 0
    num_done: int = 0
    started_at_s: float | None = None
    is_ended: bool = False
    deadline_at_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.deadline_at_s = self.arrived_at_s + self.encode.timeout_s

    @property
    def has_more(self) -> bool:
        return self.num_planned < len(self.encode.inputs)


class Item(NamedTuple):
    """One input in a step."""

    request: _Request
    number: int

    @property
    def ids(self) -> Int32s:
        """Its tokens."""
        return np.frombuffer(self.request.encode.inputs[self.number], "<i4")

    @property
    def num_tokens(self) -> int:
        """How many they are."""
        return len(self.request.encode.inputs[self.number]) // ID_BYTES

    @property
    def second_start(self) -> int:
        """Where its second text begins; its length where it has none."""
        starts = self.request.encode.second_starts
        return starts[self.number] if starts else self.num_tokens

    @property
    def marks(self) -> list[int]:
        """The positions whose tokens are wanted."""
        marks = self.request.encode.marks
        return marks[self.number] if marks else []


@dataclass(frozen=True, slots=True)
class EncodePlan:
    """The inputs of a step, in row order."""

    items: tuple[Item, ...]
    num_rows: int
    reason: str


class EncodeScheduler:
    """Requests, and which of their inputs the next step takes. Has the shape of ``engine.work.WorkScheduler``."""

    def __init__(self, config: EncodeConfig) -> None:
        assert config.max_step_tokens >= config.context_tokens, "one input must fit a step"
        self.config = config
        self.pool = BlockPool(0)
        self.totals = Totals()
        self._requests: dict[tuple[int, str], _Request] = {}
        self._deadlines: list[tuple[float, int, _Request]] = []
        self._outbox: dict[int, list[Event]] = {}
        self._num_orders = 0
        self._num_turns = 0

    @property
    def num_running(self) -> int:
        """Requests of which an input has run."""
        return sum(request.started_at_s is not None for request in self._requests.values())

    @property
    def num_waiting(self) -> int:
        """Requests of which none has."""
        return len(self._requests) - self.num_running

    @property
    def has_work(self) -> bool:
        """Whether a step would do something."""
        return bool(self._requests)

    def take_events(self) -> dict[int, list[Event]]:
        """Hands over what the peers must hear, by owner, in order; the outbox is empty afterwards."""
        events, self._outbox = self._outbox, {}
        return events

    def has_request(self, owner: int, request_id: str) -> bool:
        """Whether this request has not ended."""
        return (owner, request_id) in self._requests

    def submit(self, owner: int, encode: Encode, now_s: float) -> None:
        """Queues a request, or refuses it with a Failed event. The caller has checked that its id is not in use."""
        self.totals.received += 1
        try:
            check_encode(
                encode,
                vocab_size=self.config.vocab_size,
                context_tokens=self.config.context_tokens,
                width=self.config.width,
                forms=self.config.forms,
                max_marks=self.config.max_marks,
            )
            if len(self._requests) >= self.config.queue_limit:
                raise OverloadedError(f"{len(self._requests)} requests wait, the limit is {self.config.queue_limit}")
        except (RequestError, ContextLengthError, OverloadedError) as error:
            self.totals.refused += 1
            self._tell(owner, Failed(encode.request_id, error.stable_code, error.message, has_started=False))
            return
        self._num_orders += 1
        # A newcomer stands before all who have been served since it came.
        request = _Request(owner, encode, self._num_orders, now_s, turn=self._num_turns)
        self._requests[owner, encode.request_id] = request
        heapq.heappush(self._deadlines, (request.deadline_at_s, request.order, request))

    def abort(self, owner: int, request_id: str, now_s: float) -> None:
        """Ends a request with Finished(aborted); one that has ended already is left alone."""
        request = self._requests.get((owner, request_id))
        if request is not None:
            self._end(request)
            self.totals.aborted += 1
            self._tell(owner, _finished(request, FinishReason.ABORTED, now_s))

    def abort_owner(self, owner: int) -> int:
        """Ends all requests of a peer that is gone, without a word; returns how many there were."""
        requests = [request for request in self._requests.values() if request.owner == owner]
        for request in requests:
            self._end(request)
        self.totals.aborted += len(requests)
        self._outbox.pop(owner, None)
        return len(requests)

    def plan(self, now_s: float, max_steps: int = 1) -> EncodePlan | None:
        """Fails what ran out of time and takes the inputs of the next step; None when there is nothing to run.

        ``max_steps`` is for schedulers of tokens: a step of texts is always one.
        """
        self._fail_late(now_s)
        queue = [(r.encode.priority, r.turn, r.order, r) for r in self._requests.values() if r.has_more]
        heapq.heapify(queue)
        items: list[Item] = []
        room, marks_left = self.config.max_step_tokens, self.config.max_marks
        while queue and len(items) < self.config.max_sequences:
            priority, _, order, request = heapq.heappop(queue)
            item = Item(request, request.num_planned)
            if item.num_tokens > room or len(item.marks) > marks_left:
                continue  # its next input is too long for what is left; somebody else's may fit
            room -= item.num_tokens
            marks_left -= len(item.marks)
            items.append(item)
            self._take(request, now_s)
            if request.has_more:
                heapq.heappush(queue, (priority, request.turn, order, request))
        if not items:
            return None
        return EncodePlan(tuple(items), self.config.max_step_tokens - room, "full" if queue else "all")

    def complete(self, plan: EncodePlan, results: Sequence[Float32s], now_s: float) -> None:
        """Takes what was made of a step's items, each of its form's shape.

        A value that is not a number fails its own request only.
        """
        self.totals.steps += 1
        for item, result in zip(plan.items, results, strict=True):
            request = item.request
            if request.is_ended:
                continue
            if not np.isfinite(result).all():
                message = f"the model produced a value that is not a number for input {item.number}"
                self._fail(request, NumericalError.code, message)
                continue
            shaped = _shortened(result, request.encode)
            self._tell(request.owner, Encoded(request.encode.request_id, item.number, shaped.tobytes()))
            self.totals.prompt_tokens += item.num_tokens
            request.num_done += 1
            if request.num_done == len(request.encode.inputs):
                self._end(request)
                self.totals.finished += 1
                self._tell(request.owner, _finished(request, FinishReason.STOP, now_s))

    def fail_step(self, plan: EncodePlan, code: str, message: str) -> None:
        """Ends every request of a step that could not be run."""
        for item in plan.items:
            if not item.request.is_ended:
                self._fail(item.request, code, message)

    def fail_all(self, code: str, message: str) -> None:
        """Ends every request."""
        for request in list(self._requests.values()):
            self._fail(request, code, message)

    def _take(self, request: _Request, now_s: float) -> None:
        request.num_planned += 1
        self._num_turns += 1
        request.turn = self._num_turns
        if request.started_at_s is None:
            request.started_at_s = now_s
            self._tell(request.owner, Started(request.encode.request_id, 0))

    def _fail_late(self, now_s: float) -> None:
        while self._deadlines and (self._deadlines[0][2].is_ended or self._deadlines[0][0] <= now_s):
            request = heapq.heappop(self._deadlines)[2]
            if not request.is_ended:
                message = f"the request ran out of its {request.encode.timeout_s} s"
                self._fail(request, DeadlineError.code, message)

    def _fail(self, request: _Request, code: str, message: str) -> None:
        self._end(request)
        self.totals.failed += 1
        has_started = request.started_at_s is not None
        self._tell(request.owner, Failed(request.encode.request_id, code, message, has_started))

    def _end(self, request: _Request) -> None:
        request.is_ended = True
        del self._requests[request.owner, request.encode.request_id]

    def _tell(self, owner: int, event: Event) -> None:
        self._outbox.setdefault(owner, []).append(event)


def _shortened(vectors: Float32s, encode: Encode) -> Float32s:
    """Returns the first ``dimensions`` elements at length 1 (Kusupati et al., Matryoshka embeddings, 2022)."""
    dimensions = encode.dimensions
    if (dimensions is None or dimensions == vectors.shape[-1]) and not encode.is_normalised:
        return vectors
    short = vectors[..., :dimensions]
    lengths = np.sqrt((short.astype(np.float64) ** 2).sum(axis=-1, keepdims=True))
    return (short / np.where(lengths == 0.0, 1.0, lengths)).astype(np.float32)


def _finished(request: _Request, reason: FinishReason, now_s: float) -> Finished:
    started_at_s = now_s if request.started_at_s is None else request.started_at_s
    return Finished(
        request_id=request.encode.request_id,
        reason=reason,
        prompt_tokens=sum(map(len, request.encode.inputs)) // ID_BYTES,
        cached_tokens=0,
        output_tokens=0,
        queue_s=started_at_s - request.arrived_at_s,
        prefill_s=now_s - started_at_s,
        decode_s=0.0,
    )
