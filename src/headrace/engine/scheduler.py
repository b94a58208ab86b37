"""The scheduler: all requests of a worker, from submit to their one ending.

    submit ─► waiting ─► running ─► ended          preempted: running ─► waiting, tokens kept, KV dropped

Each step: ``plan`` (asks ``policy.batch``, moves requests and blocks, returns a frozen plan) → the executor runs it →
``complete`` (appends tokens, ends what is done). Events for the peers collect in an outbox, by owner, in order.
Plain bookkeeping: no kernels, no weights, no clock; the simulator runs this very class with a cost model as executor.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from headrace.base.errors import DeadlineError, NumericalError, OverloadedError, RequestError
from headrace.engine.blocks import BlockPool
from headrace.engine.prefix import find_prefix
from headrace.engine.request import Request, TokenRule
from headrace.engine.step import Chunk, StepPlan, StepResult
from headrace.engine.validate import check_submit
from headrace.policy import chunk as chunk_policy
from headrace.policy.batch import BatchConfig, BatchDecision, BatchState, BatchView, decide
from headrace.program.opcodes import BLOCK_TOKENS
from headrace.protocol.frames import (
    EchoLogprobs,
    Event,
    Failed,
    FinishReason,
    Started,
    Submit,
    TokenLogprobs,
    Tokens,
)

# Waiting requests that the policy sees at once. Looking a prompt up costs ~1 µs per block, and letting many in takes
# many steps anyway.
_HEAD_OF_QUEUE = 8


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one worker.

    Args:
        context_tokens: prompt and output of one request together; the pool holds at least that many.
        num_blocks: blocks of the pool.
        queue_limit: requests that may wait.
        has_prefix_cache: whether computed blocks are published for others.
        window_tokens: last positions that the widest layer sees; a running sequence gives back the blocks that lie
            wholly before them. 0: some layer sees everything, and nothing is given back.
    """

    vocab_size: int
    context_tokens: int
    eos_token_ids: frozenset[int]
    num_blocks: int
    max_sequences: int = 32
    max_step_tokens: int = 512
    queue_limit: int = 4096
    has_prefix_cache: bool = True
    window_tokens: int = 0


@dataclass(slots=True)
class Totals:
    """What has happened so far; only grows."""

    steps: int = 0
    preemptions: int = 0
    prefix_queries_tokens: int = 0
    prefix_hits_tokens: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    received: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0
    refused: int = 0


class Scheduler:
    """Requests, blocks and the plan of the next step."""

    def __init__(self, config: SchedulerConfig) -> None:
        assert config.max_step_tokens >= config.max_sequences > 0
        assert config.num_blocks * BLOCK_TOKENS >= config.context_tokens, "one sequence must fit alone"
        self.config = config
        self.pool = BlockPool(config.num_blocks)
        self.totals = Totals()
        self._batch_config = BatchConfig(config.max_sequences, config.max_step_tokens, BLOCK_TOKENS)
        self._batch_state = BatchState()
        self._requests: dict[tuple[int, str], Request] = {}
        self._running: list[Request] = []  # most important first
        self._waiting: list[Request] = []  # likewise
        self._deadlines: list[tuple[float, int, Request]] = []  # a heap; ended requests leave it when they surface
        self._slots = list(range(config.max_sequences - 1, -1, -1))
        self._num_seats = 0
        self._num_orders = 0
        self._outbox: dict[int, list[Event]] = {}
        self._chunk_config = chunk_policy.ChunkConfig()
        self._chunk_state = chunk_policy.ChunkState()
        self._planned_at_s = 0.0
        self._is_steady = False  # nobody came, went or got a block since the last plan began
        self._was_decode = False  # the last plan was one decode row for every running sequence

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, preempted ones included."""
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether a step would do something."""
        return bool(self._running or self._waiting)

    def take_events(self) -> dict[int, list[Event]]:
        """Hands over what the peers must hear, by owner, in order; the outbox is empty afterwards."""
        events, self._outbox = self._outbox, {}
        return events

    def has_request(self, owner: int, request_id: str) -> bool:
        """Whether this request is waiting or running."""
        return (owner, request_id) in self._requests

    def submit(self, owner: int, submit: Submit, now_s: float, rule: TokenRule | None = None) -> None:
        """Queues a request, or refuses it with a Failed event. The caller has checked that its id is not in use.

        Args:
            rule: the state of ``submit.grammar``, compiled.
        """
        assert not self.has_request(owner, submit.request_id)
        self.totals.received += 1
        try:
            check_submit(submit, vocab_size=self.config.vocab_size, context_tokens=self.config.context_tokens)
            if len(self._waiting) >= self.config.queue_limit:
                raise OverloadedError(f"{len(self._waiting)} requests wait, the limit is {self.config.queue_limit}")
        except (RequestError, OverloadedError) as error:
            self.totals.refused += 1
            self._tell(owner, Failed(submit.request_id, error.stable_code, error.message, has_started=False))
            return
        self._num_orders += 1
        request = Request(
            owner,
            submit,
            order=self._num_orders,
            now_s=now_s,
            eos_token_ids=self.config.eos_token_ids,
            context_tokens=self.config.context_tokens,
            rule=rule,
        )
        self._requests[owner, submit.request_id] = request
        insort(self._waiting, request, key=_importance)
        heapq.heappush(self._deadlines, (request.deadline_at_s, request.order, request))

    def abort(self, owner: int, request_id: str, now_s: float) -> None:
        """Ends a request with Finished(aborted); one that has ended already is left alone."""
        request = self._requests.get((owner, request_id))
        if request is not None:
            self._end(request)
            self.totals.aborted += 1
            self._tell(owner, request.finished(FinishReason.ABORTED, now_s))

    def abort_owner(self, owner: int) -> int:
        """Ends all requests of a peer that is gone, without a word; returns how many there were."""
        requests = [request for request in self._requests.values() if request.owner == owner]
        for request in requests:
            self._end(request)
        self.totals.aborted += len(requests)
        self._outbox.pop(owner, None)
        return len(requests)

    def next_deadline_s(self) -> float | None:
        """When ``plan`` must be called next even if nothing arrives."""
        return self._deadlines[0][0] if self._deadlines else None

    def plan(self, now_s: float, max_steps: int = 1) -> StepPlan | None:
        """Fails what ran out of time, decides the next step and moves requests and blocks accordingly.

        Args:
            max_steps: decode steps that may be run in a row where nobody can be let in meanwhile.

        Returns None when there is nothing to run. Cost: ~15 µs for one decoding sequence, ~100 µs for 32.
        """
        self._fail_late(now_s)
        self._planned_at_s = now_s
        if not (self._running or self._waiting):
            return None
        was_steady, self._is_steady = self._is_steady, True
        heads, prefixes = self._look_up_heads()
        view = self._view(heads, prefixes)
        self._batch_state, decision = decide(view, self._batch_state, self._batch_config, now_s)
        chunks = self._carry_out(decision, heads, prefixes, now_s)
        if not chunks:
            return None
        num_rows = sum([chunk.rows for chunk in chunks])
        num_sampled = sum([chunk.is_sampled for chunk in chunks])
        num_scored = sum([chunk.score_stop - chunk.score_start for chunk in chunks])
        is_decode = num_rows == num_sampled == len(self._running) and not num_scored
        was_decode, self._was_decode = self._was_decode, is_decode
        num_steps = self._num_steps(max_steps) if is_decode and max_steps > 1 else 1
        return StepPlan(
            chunks=tuple(chunks),
            num_rows=num_rows,
            num_sampled=num_sampled,
            num_scored=num_scored,
            is_repeat=is_decode and was_decode and was_steady and self._is_steady,
            reason=decision.reason,
            num_steps=num_steps,
        )

    def complete(self, plan: StepPlan, result: StepResult, now_s: float) -> None:
        """Takes a step's result: tokens are delivered, computed blocks published, what is done ends.

        A row that is not a number fails its own request only.
        """
        num_steps = len(result.results) // len(plan.chunks) if plan.num_steps > 1 else 1
        num_decoding = sum([chunk.rows == 1 for chunk in plan.chunks])
        self._chunk_state = chunk_policy.observe(
            num_decoding, plan.num_rows, (now_s - self._planned_at_s) / num_steps, self._chunk_state, self._chunk_config
        )
        if plan.num_steps > 1:
            self._complete_several(plan, result, now_s)
            return
        self.totals.steps += 1
        results = result.results
        tokens: list[int] = results["token"].tolist()
        statuses: list[int] = results["status"].tolist()
        output_index = 0
        score_index = plan.num_sampled
        for chunk in plan.chunks:
            request = chunk.request
            num_scores = chunk.score_stop - chunk.score_start
            first_score, score_index = score_index, score_index + num_scores
            row, output_index = output_index, output_index + chunk.is_sampled
            if any(statuses[first_score:score_index]) or (chunk.is_sampled and statuses[row]):
                self._fail_numerical(request)
                continue
            self._publish(request, chunk.start + chunk.rows)
            if self.config.window_tokens:
                self._pass(request)
            if num_scores:
                self._score(request, chunk, result, first_score)
            if chunk.is_sampled:
                self._take_token(request, [], tokens[row], result, range(row, row + 1), now_s)

    def _complete_several(self, plan: StepPlan, result: StepResult, now_s: float) -> None:
        """Takes the result of decode steps in a row; only the last one can have ended a request."""
        num_chunks = len(plan.chunks)
        num_steps = len(result.results) // num_chunks
        self.totals.steps += num_steps
        by_step = result.results["token"].reshape(num_steps, num_chunks)
        statuses: list[int] = result.results["status"][-num_chunks:].tolist()
        for index, chunk in enumerate(plan.chunks):
            request = chunk.request
            *earlier, last = by_step[:, index].tolist()
            rows = range(index, num_steps * num_chunks, num_chunks)
            for token in earlier:
                request.append(token)
            if statuses[index]:
                self._deliver(request, earlier, result, rows[:-1])
                self._fail_numerical(request)
                continue
            self._publish(request, chunk.start + num_steps)
            if self.config.window_tokens:
                self._pass(request)
            self._take_token(request, earlier, last, result, rows, now_s)

    def fail_step(self, plan: StepPlan, code: str, message: str) -> None:
        """Ends every request of a step that could not be run; their blocks are not trusted any more."""
        for chunk in plan.chunks:
            self.pool.withdraw(chunk.request.held_blocks)
            self._fail(chunk.request, code, message)

    def fail_all(self, code: str, message: str) -> None:
        """Ends every request."""
        for request in list(self._requests.values()):
            self._fail(request, code, message)

    # --- planning -------------------------------------------------------------------------------------------------

    def _fail_late(self, now_s: float) -> None:
        while self._deadlines and (self._deadlines[0][2].is_ended or self._deadlines[0][0] <= now_s):
            request = heapq.heappop(self._deadlines)[2]
            if not request.is_ended:
                message = f"the request ran out of its {request.submit.timeout_s} s"
                self._fail(request, DeadlineError.code, message)

    def _look_up_heads(self) -> tuple[list[Request], list[list[int]]]:
        """Returns the requests that could be let in now, and the published blocks each of them could share."""
        num_heads = min(_HEAD_OF_QUEUE, self.config.max_sequences - len(self._running))
        heads = self._waiting[:num_heads]
        prefixes: list[list[int]] = []
        for request in heads:
            # Scores need every prompt row computed here, so an echo takes nothing from the cache.
            if self.config.has_prefix_cache and request.submit.echo_logprobs is None:
                request.chain.extend(request.tokens, request.num_tokens)
                prefixes.append(find_prefix(self.pool, request.chain, request.num_tokens))
            else:
                prefixes.append([])
        return heads, prefixes

    def _view(self, heads: list[Request], prefixes: list[list[int]]) -> BatchView:
        running, pool = self._running, self.pool
        is_short = pool.num_available < len(running)
        run_rows = [request.num_tokens - request.num_computed for request in running]
        num_decoding = run_rows.count(1)
        num_prompts = len(running) - num_decoding + len(self._waiting)
        return BatchView(
            run_rows=run_rows,
            run_computed=[request.num_computed for request in running],
            run_blocks=[len(request.blocks) for request in running],
            run_releasable_blocks=[pool.num_releasable(request.held_blocks) for request in running] if is_short else (),
            wait_rows=[
                request.num_tokens - len(prefix) * BLOCK_TOKENS for request, prefix in zip(heads, prefixes, strict=True)
            ],
            wait_blocks=[
                _num_blocks(request.num_tokens) - len(prefix) + sum(map(pool.is_evictable, prefix))
                for request, prefix in zip(heads, prefixes, strict=True)
            ],
            available_blocks=pool.num_available,
            total_blocks=pool.total,
            prefill_rows=self._prefill_rows(num_decoding, num_prompts) if num_prompts else None,
        )

    def _prefill_rows(self, num_decoding: int, num_prompts: int) -> int | None:
        view = chunk_policy.ChunkView(num_decoding, num_prompts)
        state, config = self._chunk_state, self._chunk_config
        self._chunk_state, decision = chunk_policy.decide(view, state, config, self._planned_at_s)
        return decision.rows

    def _carry_out(
        self, decision: BatchDecision, heads: list[Request], prefixes: list[list[int]], now_s: float
    ) -> list[Chunk]:
        for request in self._running[decision.num_kept :]:
            self._preempt(request)
        del self._running[decision.num_kept :]
        # First all shares, then all allocations: an allocation may evict what was promised to somebody else.
        admitted = list(zip(heads, prefixes, decision.admit_rows, strict=False))
        for _, prefix, _ in admitted:
            self.pool.share(prefix)
        chunks = [
            self._chunk(request, rows)
            for request, rows in zip(self._running, islice(decision.run_rows, decision.num_kept), strict=True)
            if rows
        ]
        for request, prefix, rows in admitted:
            self._admit(request, prefix, now_s)
            chunks.append(self._chunk(request, rows))
        return chunks

    def _admit(self, request: Request, prefix: list[int], now_s: float) -> None:
        self._is_steady = False
        del self._waiting[0]
        insort(self._running, request, key=_importance)
        request.blocks = prefix + self.pool.allocate(_num_blocks(request.num_tokens) - len(prefix))
        request.num_computed = len(prefix) * BLOCK_TOKENS
        request.num_published = len(prefix)
        request.slot = self._slots.pop()
        self._num_seats += 1
        request.seat = self._num_seats
        if self.config.has_prefix_cache:
            self.totals.prefix_queries_tokens += request.num_tokens
            self.totals.prefix_hits_tokens += request.num_computed
        if request.admitted_at_s is None:
            request.admitted_at_s = now_s
            request.cached_tokens = request.num_computed
            request.grow()
            self.totals.prompt_tokens += request.num_prompt
            self._tell(request.owner, Started(request.submit.request_id, request.cached_tokens))

    def _chunk(self, request: Request, rows: int) -> Chunk:
        start = request.num_computed
        stop = start + rows
        missing = _num_blocks(stop) - len(request.blocks)
        if missing > 0:
            self._is_steady = False
            request.blocks += self.pool.allocate(missing)
        is_sampled = stop == request.num_tokens
        if request.submit.echo_logprobs is None or request.num_scored == request.num_prompt:
            return Chunk(request, start, rows, is_sampled)
        # Row p − 1 scores the token at p. What an interrupted prefill has scored already is not scored again.
        score_start = max(start + 1, request.num_scored)
        score_stop = max(score_start, min(stop + 1, request.num_prompt))
        return Chunk(request, start, rows, is_sampled, score_start, score_stop)

    def _num_steps(self, max_steps: int) -> int:
        """Returns how many decode steps all running sequences may make in a row, and takes the blocks for them.

        One where somebody waits who could be let in, where a choice depends on more than tokens, or blocks are short.
        """
        running = self._running
        if self._waiting and len(running) < self.config.max_sequences:
            return 1
        if not all(request.is_plain for request in running):
            return 1
        num_steps = min(max_steps, min([request.token_limit - request.num_tokens for request in running]))
        if num_steps <= 1:
            return 1
        missing = [_num_blocks(request.num_computed + num_steps) - len(request.blocks) for request in running]
        total = sum([count for count in missing if count > 0])
        if total:
            if total + len(running) > self.pool.num_available:
                return 1
            self._is_steady = False
            for request, count in zip(running, missing, strict=True):
                if count > 0:
                    request.blocks += self.pool.allocate(count)
        return num_steps

    def _preempt(self, request: Request) -> None:
        self._vacate(request)
        request.num_preemptions += 1
        self.totals.preemptions += 1
        insort(self._waiting, request, key=_importance)

    # --- completing -----------------------------------------------------------------------------------------------

    def _publish(self, request: Request, num_computed: int) -> None:
        request.num_computed = num_computed
        num_full = request.num_computed // BLOCK_TOKENS
        if num_full > request.num_published and self.config.has_prefix_cache:
            request.chain.extend(request.tokens, request.num_computed)
            for index in range(request.num_published, num_full):
                self.pool.publish(request.blocks[index], request.chain.hashes[index])
            request.num_published = num_full

    def _pass(self, request: Request) -> None:
        """Gives back the blocks that no layer sees any more; published ones can still be found by others."""
        first_seen = request.num_computed - self.config.window_tokens + 1
        num_passed = max(0, first_seen) // BLOCK_TOKENS
        if num_passed > request.num_passed:
            self.pool.release(request.blocks[request.num_passed : num_passed])
            request.num_passed = num_passed

    def _score(self, request: Request, chunk: Chunk, result: StepResult, first_row: int) -> None:
        scores = [_logprobs(result, first_row + offset) for offset in range(chunk.score_stop - chunk.score_start)]
        request.num_scored = chunk.score_stop
        self._tell(request.owner, EchoLogprobs(request.submit.request_id, chunk.score_start, scores))

    def _take_token(
        self, request: Request, earlier: list[int], token: int, result: StepResult, rows: range, now_s: float
    ) -> None:
        """Adds a token, and ends the request where it says so; delivers it together with earlier ones of the step.

        Args:
            earlier: tokens that were added before and have not been delivered.
            rows: of the result, one per token.
        """
        if request.first_token_at_s is None:
            request.first_token_at_s = now_s
        submit = request.submit
        if token in request.stop_ids and request.num_output >= submit.min_tokens:
            self._deliver(request, earlier, result, rows[:-1])
            self._stop(request, token, result, rows[-1], now_s)
            return
        is_complete = False
        if request.rule is not None:
            is_complete = request.rule.failure is None and request.rule.accept(token)
            if request.rule.failure is not None:
                self._fail(request, "grammar_failed", f"the grammar cannot be followed further: {request.rule.failure}")
                return
            if is_complete and request.rule.is_end(token):
                self._stop(request, token, result, rows[-1], now_s)
                return
        request.append(token)
        self._deliver(request, [*earlier, token], result, rows)
        if is_complete:
            self._finish(request, FinishReason.STOP, now_s)
        elif request.num_tokens == request.token_limit:
            self._finish(request, FinishReason.LENGTH, now_s)

    def _deliver(self, request: Request, tokens: list[int], result: StepResult, rows: range) -> None:
        if not tokens:
            return
        self.totals.generation_tokens += len(tokens)
        submit = request.submit
        scores = [] if submit.sampling.num_logprobs is None else [_logprobs(result, row) for row in rows]
        self._tell(request.owner, Tokens(submit.request_id, tokens, scores))

    # --- endings --------------------------------------------------------------------------------------------------

    def _finish(self, request: Request, reason: FinishReason, now_s: float) -> None:
        self._end(request)
        self.totals.finished += 1
        self._tell(request.owner, request.finished(reason, now_s))

    def _stop(self, request: Request, token: int, result: StepResult, row: int, now_s: float) -> None:
        """Ends a request with a token that is no part of its output; ``row`` of the result is the token's."""
        self._end(request)
        self.totals.finished += 1
        scores = None if request.submit.sampling.num_logprobs is None else _logprobs(result, row)
        self._tell(request.owner, request.finished(FinishReason.STOP, now_s, token, scores))

    def _fail(self, request: Request, code: str, message: str) -> None:
        self._end(request)
        self.totals.failed += 1
        has_started = request.admitted_at_s is not None
        self._tell(request.owner, Failed(request.submit.request_id, code, message, has_started))

    def _fail_numerical(self, request: Request) -> None:
        # Its pages may hold the bad values: nobody else may find them.
        self.pool.withdraw(request.held_blocks)
        message = f"the model produced a value that is not a number at output token {request.num_output}"
        self._fail(request, NumericalError.code, message)

    def _end(self, request: Request) -> None:
        request.is_ended = True
        del self._requests[request.owner, request.submit.request_id]
        if request.slot >= 0:
            _remove(self._running, request)
            self._vacate(request)
        else:
            _remove(self._waiting, request)

    def _vacate(self, request: Request) -> None:
        """Gives back what a running request holds; the caller takes it out of the running ones."""
        self._is_steady = False
        self.pool.release(request.held_blocks)
        request.blocks = []
        request.num_passed = 0
        request.num_computed = 0
        request.num_published = 0
        self._slots.append(request.slot)
        request.slot = -1

    def _tell(self, owner: int, event: Event) -> None:
        events = self._outbox.get(owner)
        if events is None:
            self._outbox[owner] = [event]
        else:
            events.append(event)

    def check(self) -> None:
        """Asserts the pool's and the queues' invariants; for tests and debugging. Cost: O(blocks)."""
        pool = self.pool
        held = [block for request in self._running for block in request.held_blocks]
        assert pool.num_free + pool.num_evictable + len(set(held)) == pool.total
        assert len(self._requests) == len(self._running) + len(self._waiting)
        assert len(self._slots) + len(self._running) == self.config.max_sequences
        assert _is_sorted(self._running)
        assert _is_sorted(self._waiting)
        totals = self.totals
        ended = totals.finished + totals.aborted + totals.failed + totals.refused
        assert ended + len(self._requests) == totals.received


def _importance(request: Request) -> tuple[int, int]:
    return request.importance


def _is_sorted(requests: Iterable[Request]) -> bool:
    keys = [request.importance for request in requests]
    return keys == sorted(keys)


def _remove(requests: list[Request], request: Request) -> None:
    index = bisect_left(requests, request.importance, key=_importance)
    assert requests[index] is request
    del requests[index]


def _num_blocks(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_TOKENS)


def _logprobs(result: StepResult, row: int) -> TokenLogprobs:
    entry = result.results[row]
    count = int(entry["num_top"])
    return TokenLogprobs(
        float(entry["logprob"]), result.top_ids[row, :count].tolist(), result.top_logprobs[row, :count].tolist()
    )
