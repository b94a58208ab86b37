"""A run: one generating request from its validated form to the pieces of its answer.

    readiness → render and tokenise → grammar → context check → quarantine → admission → submit
    → events → text, stop strings, log-probabilities → thoughts and calls → pieces

Its places, deadlines and worker requests are its ticket's. What HTTP makes of pieces and errors is the server's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headrace.base.errors import RequestError, WorkerLostError
from headrace.gateway.generation import Echo, Generation
from headrace.gateway.ledger import Record
from headrace.gateway.pipeline import Pipeline
from headrace.gateway.quarantine import fingerprint
from headrace.gateway.render import Prompt
from headrace.gateway.scores import prompt_logprobs
from headrace.gateway.submits import Lengths, check_vocabulary, is_echo, make_parts
from headrace.gateway.ticket import Ticket
from headrace.protocol.answers import Choice, Piece, Usage
from headrace.protocol.frames import EchoLogprobs, Event, Failed, Finished, Grammar, Started, Submit, Tokens
from headrace.protocol.openai import ChatRequest, GenerateRequest
from headrace.replica.events import EventStream
from headrace.text.message import MessageReader


class Run:
    """One request on its way.

    Use: ``open`` once, then ``take`` until it gives an empty list or raises, then ``close`` in any case.
    """

    def __init__(self, pipeline: Pipeline, request: GenerateRequest, record: Record) -> None:
        self.request = request
        self.record = record
        self.on_overrun: Callable[[], None] | None = None
        self._pipeline = pipeline
        self._ticket = Ticket(pipeline, record, is_stream=request.options.is_stream)
        self._submits: tuple[Submit, ...] = ()
        self._prompts: list[Prompt] = []
        self._grammar: Grammar | None = None
        self._bad_words: list[list[int]] = []
        self._generations: dict[str, Generation] = {}
        self._cached: dict[str, int] = {}
        self._num_open = 0

    async def open(self) -> None:
        """Checks, renders, waits for a place and submits.

        Raises:
            HeadraceError: the request is refused; nothing was started.
        """
        pipeline, ticket = self._pipeline, self._ticket
        identity = pipeline.check_ready()
        if identity.vector_width:
            raise RequestError(
                f"the model {self.request.options.model or pipeline.name!r} makes vectors or scores and generates no "
                "text: use /v1/embeddings, /v1/rerank or /v1/classify",
                param="model",
                code="model_not_supported",
            )
        ticket.start_clocks()
        context_tokens = pipeline.context_tokens(identity)
        check_vocabulary(self.request, identity.vocab_size)
        self._prompts = await pipeline.renderer.render(self.request, context_tokens)
        ticket.check()
        self._bad_words = await pipeline.renderer.bad_words(self.request)
        self._grammar = await pipeline.grammars.grammar_of(self.request, pipeline.kit.dialect)
        ticket.check()
        self.record.prompt_tokens = sum(len(prompt.ids) for prompt in self._prompts)
        self._make_submits(context_tokens)
        ticket.check_suspect(self._fingerprint)
        await ticket.enter(len(self._submits))
        pipeline.check_ready()
        self._submit()

    async def take(self) -> list[Piece]:
        """Waits for what comes next; an empty list when every choice is finished.

        Raises:
            HeadraceError: the request failed.
        """
        while self._num_open:
            assert self._ticket.events is not None, "open() comes first"
            try:
                events = await self._ticket.events.take()
            except WorkerLostError:
                await self._ticket.outlive_worker(self._fingerprint)
                self._cached.clear()
                self._submit()
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
            completion_tokens=self._output_tokens,
            cached_tokens=self.record.cached_tokens,
            truncated_tokens=sum(prompt.truncated_tokens for prompt in self._prompts),
            reasoning_tokens=self._reasoning_tokens,
        )

    def chosen(self, choices: Sequence[Choice]) -> list[Choice]:
        """Gives the choices to answer with, of all that were made: the n likeliest of each prompt, likeliest first."""
        options = self.request.options
        generations = list(self._generations.values())
        for choice in choices:
            generation = generations[choice.index]
            prompt = self._prompts[choice.index // options.best_of]
            choice.logprob_sum = generation.logprob_sum
            choice.prompt_ids = prompt.ids
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

    def prompt_ids(self, index: int) -> list[int]:
        """Gives the prompt's tokens of the choice ``index``."""
        return self._prompts[index // self.request.options.best_of].ids

    @property
    def is_finished(self) -> bool:
        """Whether every choice has its last piece."""
        return self._ticket.is_submitted and not self._num_open

    @property
    def num_choices(self) -> int:
        """Choices that are made: prompts × ``best_of``."""
        return len(self._submits)

    def close(self) -> None:
        """Aborts what still runs and gives everything back; safe to call again."""
        self.record.output_tokens = self._output_tokens
        self._ticket.close()

    @property
    def _output_tokens(self) -> int:
        return sum(generation.output_tokens for generation in self._generations.values())

    @property
    def _reasoning_tokens(self) -> int | None:
        if self._pipeline.kit.dialect.marks is None or not isinstance(self.request, ChatRequest):
            return None
        return sum(generation.reasoning_tokens for generation in self._generations.values())

    def _fingerprint(self) -> bytes:
        return fingerprint(self._submits)

    def _make_submits(self, context_tokens: int) -> None:
        pipeline, options = self._pipeline, self.request.options
        limits = pipeline.limits
        parts = make_parts(
            self.request,
            self._prompts,
            Lengths(context_tokens, limits.default_completion_tokens, limits.default_chat_tokens),
            next_id=pipeline.ids,
            seed=pipeline.chance.getrandbits(64) if options.seed is None else options.seed,
            grammar=self._grammar,
            bad_words=self._bad_words,
            timeout_s=limits.request_timeout_s,
        )
        submits = []
        for index, part in enumerate(parts):
            generation = self._make_generation(index, part.prompt, is_alone=part.is_alone)
            self._generations[part.submit.request_id] = generation
            submits.append(part.submit)
        self._submits = tuple(submits)

    def _make_generation(self, index: int, prompt: Prompt, *, is_alone: bool) -> Generation:
        options = self.request.options
        kit = self._pipeline.kit
        has_logprobs = options.num_logprobs is not None
        echo = None
        if is_echo(self.request):
            echo = Echo(prompt.text, prompt.ids, list(prompt.offsets), has_logprobs=has_logprobs, is_alone=is_alone)
        elif prompt.text or is_alone:  # the final message that a chat goes on with; or nothing, of a scored prompt
            echo = Echo(prompt.text, [], [], has_logprobs=False, is_alone=is_alone)
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
            keeps_ids=options.has_token_ids,
            shows_ids=options.shows_ids,
            stop_ids=options.stop_token_ids,
        )

    def _make_reader(self, prompt: Prompt) -> MessageReader | None:
        """Makes what finds thoughts and calls; None where there can be neither."""
        if not isinstance(self.request, ChatRequest):
            return None
        dialect = self._pipeline.kit.dialect
        if self.request.tools is None and dialect.marks is None:
            return None
        return MessageReader(
            dialect,
            self.request.tools,
            is_forced=self._grammar is not None,
            is_thinking=prompt.is_thinking,
            has_thoughts=self.request.has_thoughts,
        )

    def _submit(self) -> None:
        events = self._ticket.submit(self._start)
        events.on_overrun = self.on_overrun
        self._num_open = len(self._submits)

    def _start(self) -> EventStream:
        return self._pipeline.replica.generate(*self._submits)

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
                self._ticket.note_output()
            self._pipeline.ledger.note_tokens(self.record, num_tokens)
        return pieces

    def _on_started(self, event: Started) -> None:
        if event.request_id not in self._cached:
            self._cached[event.request_id] = event.cached_tokens
            # Of n choices of one prompt the later ones find the first one's blocks; a prompt counts once.
            options = self.request.options
            firsts = [self._cached.get(submit.request_id, 0) for submit in self._submits[:: options.best_of]]
            self.record.cached_tokens = sum(firsts)
        self._ticket.note_started()
