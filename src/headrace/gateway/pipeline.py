"""The gateway's pipeline: one request from its validated form to the pieces of its answer.

    model look-up → readiness → render and tokenise → grammar → context check → quarantine → admission → submit
    → events → text, stop strings, log-probabilities → thoughts and calls → pieces

A ``Run`` is one request on that way. It holds its places, deadlines and worker requests, and gives them back in
``close``, however it ends. What HTTP makes of pieces and errors is the server's business.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from headrace.base.clock import Clock
from headrace.base.errors import (
    DeadlineError,
    EngineError,
    HeadraceError,
    NotFoundError,
    NumericalError,
    OverloadedError,
    RequestError,
    WorkerLostError,
)
from headrace.gateway.admission import Admission
from headrace.gateway.deadlines import Deadline, Deadlines
from headrace.gateway.generation import Echo, Generation
from headrace.gateway.grammars import GrammarGate
from headrace.gateway.ledger import Ledger, Record
from headrace.gateway.quarantine import Quarantine, fingerprint
from headrace.gateway.render import Prompt, Renderer, TextKit, context_error
from headrace.gateway.scores import prompt_logprobs
from headrace.protocol.answers import Choice, Piece, Usage
from headrace.protocol.frames import (
    EchoLogprobs,
    Event,
    Failed,
    Finished,
    Grammar,
    Sampling,
    Started,
    Submit,
    Tokens,
    Welcome,
)
from headrace.protocol.openai import ChatRequest, CompletionRequest, GenerateRequest, Options
from headrace.replica.events import EventStream
from headrace.replica.port import Readiness, Replica
from headrace.text.message import MessageReader

_MASK64: Final = 2**64 - 1
# Odd, so that seed + index · step never repeats within n ≤ 8 (the golden ratio in 64 bits, as in splitmix64).
_SEED_STEP: Final = 0x9E3779B97F4A7C15
# The worker's own time-out is a backstop for a front that died; the front's comes first.
BACKSTOP_S: Final = 5.0
# A prompt's first token may wait this long per token when the worker has not yet measured its prefill rate.
_SLOWEST_PREFILL_TOKENS_PER_S: Final = 50.0
MAX_ATTEMPTS: Final = 2


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits and time-outs of a front; see ``protocol.launch.FrontLaunch``."""

    max_concurrent_requests: int = 512
    max_queued_requests: int = 512
    default_completion_tokens: int = 16
    default_chat_tokens: int = 4096
    queue_timeout_s: float = 30.0
    first_token_timeout_s: float = 30.0
    request_timeout_s: float = 600.0
    max_context_tokens: int | None = None


class Pipeline:
    """Runs requests of one model on one replica.

    Args:
        served_names: names that a request may use; the first is the canonical one.
        chance: seeds unseeded requests and spreads retries; injected so that tests repeat.
    """

    def __init__(
        self,
        *,
        replica: Replica,
        kit: TextKit,
        renderer: Renderer,
        grammars: GrammarGate,
        deadlines: Deadlines,
        ledger: Ledger,
        clock: Clock,
        limits: Limits,
        served_names: Sequence[str],
        chance: random.Random | None = None,
    ) -> None:
        self.replica = replica
        self.kit = kit
        self.renderer = renderer
        self.grammars = grammars
        self.deadlines = deadlines
        self.ledger = ledger
        self.clock = clock
        self.limits = limits
        self.served_names = tuple(served_names)
        self.chance = chance or random.Random(secrets.randbits(128))  # noqa: S311  # sampling, not secrets
        self._link_ids = itertools.count()
        self.admission = Admission(limits.max_concurrent_requests, limits.max_queued_requests, self.retry_after_s)
        self.quarantine = Quarantine(clock)
        self.is_draining = False
        self._runs: set[Run] = set()

    @property
    def num_open(self) -> int:
        """Requests inside this front."""
        return len(self._runs)

    @property
    def open_runs(self) -> tuple[Run, ...]:
        """The requests inside this front."""
        return tuple(self._runs)

    def run(self, request: GenerateRequest, record: Record) -> Run:
        """Takes a request on; nothing happens before ``Run.open``."""
        run = Run(self, request, record)
        self._runs.add(run)
        return run

    def next_id(self) -> str:
        """Gives an id that no other request on this front's link has."""
        return f"gen-{next(self._link_ids)}"

    def forget(self, run: Run) -> None:
        """Drops a run that has closed."""
        self._runs.discard(run)

    def drain(self) -> None:
        """Refuses what is new, and what waits for a place; what runs goes on."""
        self.is_draining = True
        for run in list(self._runs):
            if not run.is_submitted:
                run.fail(self.overloaded("the server is shutting down: send this to another", "draining"))

    def end_all(self, *, is_stream: bool) -> int:
        """Ends the streaming or the other runs, because the drain's time is over. Returns how many."""
        ended = [run for run in self._runs if run.request.options.is_stream is is_stream]
        for run in ended:
            run.fail(self.overloaded("the server has shut down before this was finished", "server_shutdown"))
        return len(ended)

    def overloaded(self, message: str, code: str) -> OverloadedError:
        """Makes a 503 with a spread-out moment to come back."""
        return OverloadedError(message, code=code, retry_after_s=self.retry_after_s())

    def error_of(self, event: Failed) -> HeadraceError:
        """Gives the error that a worker's failure code stands for; its own words stay in the log of the worker."""
        match event.code:
            case "queue_full" | "model_loading" | "draining" | "queue_timeout" | "engine_out_of_memory":
                return self.overloaded(event.message, event.code)
            case "generation_timeout":
                return DeadlineError(event.message)
            case "numerical_error":
                return NumericalError(event.message)
            case "context_length_exceeded" | "invalid_value" | "invalid_grammar" | "grammar_failed":
                return RequestError(event.message, code=event.code)
            case _:
                return EngineError("the engine failed this request", code="engine_error")

    def retry_after_s(self) -> float:
        """Gives 1 to 5 s, so that clients refused together do not come back together."""
        return self.chance.uniform(1.0, 5.0)

    def check_model(self, name: str) -> None:
        """Refuses a model that is not served here.

        Raises:
            NotFoundError: ``model_not_found``.
        """
        if name not in self.served_names:
            raise NotFoundError(
                f"the model {ascii(name)[:100]} does not exist here: GET /v1/models lists what is served",
                param="model",
                code="model_not_found",
            )

    def check_ready(self) -> Welcome:
        """Gives the replica's identity when it can take requests.

        Raises:
            OverloadedError: loading, draining, or no healthy replica.
        """
        if self.is_draining:
            raise self.overloaded("the server is shutting down: send this to another", "draining")
        readiness = self.replica.readiness
        identity = self.replica.identity
        match readiness:
            case Readiness.READY:
                assert identity is not None
                return identity
            case Readiness.LOADING:
                raise self.overloaded("the model is loading: try again later", "model_loading")
            case Readiness.DRAINING:
                raise self.overloaded("the model's worker is shutting down: try again later", "draining")
            case Readiness.DISCONNECTED | Readiness.STALLED:
                raise self.overloaded("the model's worker does not answer: try again later", "no_healthy_upstream")

    def context_tokens(self, identity: Welcome) -> int:
        """Gives the context of a request: the worker's, or less where it is configured."""
        limit = self.limits.max_context_tokens
        return identity.context_tokens if limit is None else min(limit, identity.context_tokens)


class Run:
    """One request on its way.

    Use: ``open`` once, then ``take`` until it gives an empty list or raises, then ``close`` in any case.
    """

    def __init__(self, pipeline: Pipeline, request: GenerateRequest, record: Record) -> None:
        self.request = request
        self.record = record
        self.is_submitted = False
        self.events: EventStream | None = None
        self.on_overrun: Callable[[], None] | None = None
        self._pipeline = pipeline
        self._weight = 0
        self._submits: tuple[Submit, ...] = ()
        self._prompts: list[Prompt] = []
        self._grammar: Grammar | None = None
        self._generations: dict[str, Generation] = {}
        self._cached: dict[str, int] = {}
        self._identity = b""
        self._deadlines: list[Deadline] = []
        self._queue_deadline: Deadline | None = None
        self._first_token_deadline: Deadline | None = None
        self._waiting_on: asyncio.Future[None] | None = None
        self._failure: HeadraceError | None = None
        self._is_alone = False
        self._is_closed = False
        self._num_open = 0

    async def open(self) -> None:
        """Checks, renders, waits for a place and submits.

        Raises:
            HeadraceError: the request is refused; nothing was started.
        """
        pipeline = self._pipeline
        limits = pipeline.limits
        options = self.request.options
        pipeline.check_model(options.model)
        identity = pipeline.check_ready()
        if identity.vector_width:
            raise RequestError(
                f"the model {options.model or pipeline.served_names[0]!r} makes vectors or scores and generates no "
                "text: use /v1/embeddings, /v1/rerank or /v1/classify",
                param="model",
                code="model_not_supported",
            )
        pipeline.admission.check_room()
        self._deadlines.append(pipeline.deadlines.after(limits.request_timeout_s, self._on_total_timeout))
        self._queue_deadline = pipeline.deadlines.after(limits.queue_timeout_s, self._on_queue_timeout)
        self._deadlines.append(self._queue_deadline)
        context_tokens = pipeline.context_tokens(identity)
        _check_vocabulary(self.request, identity.vocab_size)
        self._prompts = await pipeline.renderer.render(self.request, context_tokens)
        self._check_failure()
        self._grammar = await pipeline.grammars.grammar_of(self.request, pipeline.kit.dialect)
        self._check_failure()
        self.record.prompt_tokens = sum(len(prompt.ids) for prompt in self._prompts)
        self._submits = tuple(self._make_submits(context_tokens))
        if not pipeline.quarantine.is_empty:
            self._identity = fingerprint(self._submits)
            pipeline.quarantine.check(self._identity)
        weight = len(self._submits)
        self._weight = await pipeline.admission.enter(weight, self._set_waiting_on)
        self._waiting_on = None
        self._check_failure()
        pipeline.check_ready()
        self._submit()

    async def take(self) -> list[Piece]:
        """Waits for what comes next; an empty list when every choice is finished.

        Raises:
            HeadraceError: the request failed.
        """
        while self._num_open:
            assert self.events is not None, "open() comes first"
            try:
                events = await self.events.take()
            except WorkerLostError:
                await self._retry()
                continue
            pieces = self._digest(events)
            if pieces:
                return pieces
        return []

    @property
    def usage(self) -> Usage:
        """Tokens so far; exact once the run has ended."""
        return Usage(
            prompt_tokens=self.record.prompt_tokens,
            completion_tokens=sum(generation.output_tokens for generation in self._generations.values()),
            cached_tokens=self.record.cached_tokens,
            truncated_tokens=sum(prompt.truncated_tokens for prompt in self._prompts),
        )

    def chosen(self, choices: Sequence[Choice]) -> list[Choice]:
        """Gives the choices to answer with, of all that were made: the n likeliest of each prompt, likeliest first."""
        options = self.request.options
        generations = list(self._generations.values())
        for choice in choices:
            generation = generations[choice.index]
            prompt = self._prompts[choice.index // options.best_of]
            choice.logprob_sum = generation.logprob_sum
            if options.prompt_logprobs is not None and generation.prompt_scores is not None:
                tokenizer = self._pipeline.kit.tokenizer
                scores = generation.prompt_scores
                choice.prompt_logprobs = prompt_logprobs(prompt.ids, scores, tokenizer, options.prompt_logprobs)
        if options.best_of == options.n:
            return list(choices)
        best: list[Choice] = []
        for start in range(0, len(choices), options.best_of):
            ranked = sorted(choices[start : start + options.best_of], key=lambda choice: -choice.logprob_sum)
            best += ranked[: options.n]
        for index, choice in enumerate(best):
            choice.index = index
        return best

    @property
    def is_finished(self) -> bool:
        """Whether every choice has its last piece."""
        return self.is_submitted and not self._num_open

    @property
    def num_choices(self) -> int:
        """Choices of the answer: prompts × n."""
        return len(self._submits)

    def fail(self, error: HeadraceError) -> None:
        """Ends the run from outside: a deadline, a drain."""
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
        self.record.output_tokens = sum(generation.output_tokens for generation in self._generations.values())
        self._release_alone()
        if self._weight:
            self._pipeline.admission.leave(self._weight)
        self._pipeline.forget(self)

    def _set_waiting_on(self, future: asyncio.Future[None]) -> None:
        self._waiting_on = future

    def _check_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _make_submits(self, context_tokens: int) -> list[Submit]:
        options = self.request.options
        seed = self._pipeline.chance.getrandbits(64) if options.seed is None else options.seed
        submits: list[Submit] = []
        for prompt in self._prompts:
            max_tokens, is_alone = self._max_tokens(len(prompt.ids), context_tokens)
            for choice in range(options.best_of):
                index = len(submits)
                submit = Submit(
                    request_id=self._pipeline.next_id(),
                    prompt_ids=prompt.ids,
                    max_tokens=max_tokens,
                    sampling=_sampling(options, (seed + choice * _SEED_STEP) & _MASK64),
                    min_tokens=min(options.min_tokens, max_tokens),
                    stop_token_ids=list(options.stop_token_ids),
                    ignore_eos=options.ignore_eos,
                    timeout_s=self._pipeline.limits.request_timeout_s + BACKSTOP_S,
                    priority=options.priority,
                    cache_salt=options.cache_salt,
                    echo_logprobs=self._num_prompt_logprobs,
                    allowed_token_ids=list(options.allowed_token_ids) or None,
                    grammar=self._grammar,
                )
                self._generations[submit.request_id] = self._make_generation(index, prompt, is_alone=is_alone)
                submits.append(submit)
        return submits

    @property
    def _is_echo(self) -> bool:
        return isinstance(self.request, CompletionRequest) and self.request.echo

    @property
    def _num_prompt_logprobs(self) -> int | None:
        """How many alternatives to score for each prompt token; None for no scores."""
        options = self.request.options
        wanted = [options.num_logprobs if self._is_echo else None, options.prompt_logprobs]
        return max((number for number in wanted if number is not None), default=None)

    def _max_tokens(self, prompt_tokens: int, context_tokens: int) -> tuple[int, bool]:
        """Gives the output limit of a prompt, and whether only the prompt itself is wanted."""
        room = context_tokens - prompt_tokens
        is_chat = isinstance(self.request, ChatRequest)
        param = "messages" if is_chat else "prompt"
        asked = self.request.options.max_tokens
        if room < 1 or (asked is not None and asked > room):
            raise context_error(prompt_tokens, asked or 0, context_tokens, param)
        if asked is None:
            limits = self._pipeline.limits
            default = limits.default_chat_tokens if is_chat else limits.default_completion_tokens
            return min(default, room), False
        return max(asked, 1), asked == 0

    def _make_generation(self, index: int, prompt: Prompt, *, is_alone: bool) -> Generation:
        options = self.request.options
        kit = self._pipeline.kit
        has_logprobs = options.num_logprobs is not None
        echo = None
        if self._is_echo:
            echo = Echo(prompt.text, prompt.ids, list(prompt.offsets), has_logprobs=has_logprobs, is_alone=is_alone)
        elif prompt.text:  # the final message that a chat goes on with
            echo = Echo(prompt.text, [], [], has_logprobs=False, is_alone=False)
        reader = self._make_reader(prompt)
        is_chat = isinstance(self.request, ChatRequest)
        return Generation(
            index,
            kit.text_stream(
                is_text_start=is_chat, skip_special=options.skip_special_tokens, is_message=reader is not None
            ),
            kit.stops(options.stops) if options.stops else None,
            kit.tokenizer if has_logprobs else None,
            echo,
            reader,
            has_stop_in_output=options.has_stop_in_output,
            keeps_scores=options.prompt_logprobs is not None,
        )

    def _make_reader(self, prompt: Prompt) -> MessageReader | None:
        """Makes what finds thoughts and calls; None where there can be neither."""
        if not isinstance(self.request, ChatRequest):
            return None
        dialect = self._pipeline.kit.dialect
        if self.request.tools is None and dialect.marks is None:
            return None
        return MessageReader(
            dialect, self.request.tools, is_forced=self._grammar is not None, is_thinking=prompt.is_thinking
        )

    def _submit(self) -> None:
        self.record.num_attempts += 1
        self.is_submitted = True
        self.events = self._pipeline.replica.generate(*self._submits)
        self.events.on_overrun = self.on_overrun
        self._num_open = len(self._submits)

    async def _retry(self) -> None:
        """Runs the request once more after its worker died, when nothing of it has been seen.

        Raises:
            HeadraceError: it had started to answer, was retried before, or is quarantined.
        """
        pipeline = self._pipeline
        assert self.events is not None
        identity = self._identity or fingerprint(self._submits)
        self._identity = identity
        pipeline.quarantine.note_death(identity)
        self._release_alone()
        if self.events.has_tokens:
            raise WorkerLostError("the model's worker ended while it ran this request")
        pipeline.quarantine.check(identity)
        if self.record.num_attempts >= MAX_ATTEMPTS or pipeline.is_draining:
            raise WorkerLostError("the model's worker ended while it ran this request, twice")
        self.events = None
        self.is_submitted = False
        self.record.started_at_s = None
        self._cached.clear()
        self._reset_queue_deadline()
        if self._first_token_deadline is not None:
            self._first_token_deadline.cancel()
            self._first_token_deadline = None
        self._check_failure()
        failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting_on = failed
        turn = asyncio.ensure_future(self._wait_turn())
        try:
            await asyncio.wait({turn, failed}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            turn.cancel()
            self._waiting_on = None
        if failed.done():
            failed.result()  # raises what `fail` was given
        failed.cancel()
        self._submit()

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
        self._queue_deadline = self._pipeline.deadlines.after(
            self._pipeline.limits.queue_timeout_s, self._on_queue_timeout
        )
        self._deadlines.append(self._queue_deadline)

    def _digest(self, events: list[Event]) -> list[Piece]:
        pieces: list[Piece] = []
        num_tokens = 0
        for event in events:
            generation = self._generations.get(event.request_id)
            if generation is None or generation.finish_reason is not None:
                continue
            match event:
                case Tokens():
                    num_tokens += len(event.ids)
                    pieces += generation.on_tokens(event)
                case Started():
                    self._on_started(event)
                case EchoLogprobs():
                    generation.on_echo(event)
                case Finished():
                    self._on_started(Started(event.request_id, event.cached_tokens))
                    self.record.num_preemptions += event.num_preemptions
                    pieces += generation.on_finished(event)
                case Failed():
                    raise self._pipeline.error_of(event)
            if generation.is_done:
                self._num_open -= 1
        if num_tokens:
            if self.record.first_token_at_s is None:
                self._on_first_token()
            self._pipeline.ledger.note_tokens(self.record, num_tokens)
        return pieces

    def _on_started(self, event: Started) -> None:
        if event.request_id not in self._cached:
            self._cached[event.request_id] = event.cached_tokens
            # Of n choices of one prompt the later ones find the first one's blocks; a prompt counts once.
            options = self.request.options
            firsts = [self._cached.get(submit.request_id, 0) for submit in self._submits[:: options.best_of]]
            self.record.cached_tokens = sum(firsts)
        if self.record.started_at_s is not None:
            return
        self.record.started_at_s = self._pipeline.clock.now_s()
        if self._queue_deadline is not None:
            self._queue_deadline.cancel()
        status = self._pipeline.replica.status
        rate = status.prefill_tokens_per_s if status is not None else 0.0
        wait_s = self._pipeline.limits.first_token_timeout_s
        wait_s += self.record.prompt_tokens / (rate or _SLOWEST_PREFILL_TOKENS_PER_S)
        self._first_token_deadline = self._pipeline.deadlines.after(wait_s, self._on_first_token_timeout)
        self._deadlines.append(self._first_token_deadline)

    def _on_first_token(self) -> None:
        self._release_alone()
        if self._first_token_deadline is not None:
            self._first_token_deadline.cancel()
        if self._queue_deadline is not None:
            self._queue_deadline.cancel()

    def _on_queue_timeout(self) -> None:
        limit_s = self._pipeline.limits.queue_timeout_s
        message = f"the request has waited {limit_s:g} s without being started, the limit: try again later"
        self.fail(self._pipeline.overloaded(message, "queue_timeout"))

    def _on_first_token_timeout(self) -> None:
        self.fail(DeadlineError("the first token did not come in time: send a shorter prompt or try again later"))

    def _on_total_timeout(self) -> None:
        limit_s = self._pipeline.limits.request_timeout_s
        self.fail(DeadlineError(f"the request has run for {limit_s:g} s, the limit: ask for fewer tokens"))


def _sampling(options: Options, seed: int) -> Sampling:
    return Sampling(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        seed=seed,
        logit_bias=options.logit_bias,
        num_logprobs=0 if options.num_logprobs is None and options.best_of > options.n else options.num_logprobs,
    )


def _check_vocabulary(request: GenerateRequest, vocab_size: int) -> None:
    """Refuses token ids that the model does not have."""
    options = request.options
    named: list[tuple[str, Sequence[int]]] = [
        ("logit_bias", list(options.logit_bias)),
        ("stop_token_ids", options.stop_token_ids),
        ("allowed_token_ids", options.allowed_token_ids),
    ]
    if isinstance(request, CompletionRequest):
        named += [("prompt", prompt) for prompt in request.prompts if isinstance(prompt, list)]
    for name, ids in named:
        if ids and max(ids) >= vocab_size:
            raise RequestError(
                f"{name} has the token id {max(ids)}, this model's ids are 0 to {vocab_size - 1}", param=name
            )
