"""Inputs to what the worker makes of them, for every endpoint that does not generate: vectors, or scores of classes.

    readiness → tokenise → quarantine → admission → encode → results

Nothing of an answer is seen before it is whole, so a request whose worker died is run once more whatever had come.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from headrace.base.errors import ContextLengthError, RequestError, WorkerLostError
from headrace.gateway.pipeline import Pipeline
from headrace.gateway.quarantine import fingerprint_inputs
from headrace.gateway.ticket import BACKSTOP_S, Ticket
from headrace.protocol.frames import ID_BYTES, Encode, Encoded, EncodeForm, Failed, Started, Welcome, pack_ids
from headrace.protocol.inputs import MODEL_LIMIT, Input, Row

if TYPE_CHECKING:
    from headrace.gateway.ledger import Record
    from headrace.gateway.render import Tokenizer
    from headrace.replica.events import EventStream


MAX_MARKS: Final = 64
# Characters of a text that are looked at for each token that is wanted; words with their spaces have 6.
_WORDY_CHARS: Final = 8
MAX_BATCH_TOKENS: Final = 2**23
"""Of one request: half of what a frame to the worker can hold."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Inputs as token ids; all as in ``frames.Encode``."""

    inputs: list[bytes]
    second_starts: list[int] = field(default_factory=list)
    marks: list[list[int]] = field(default_factory=list)


Tokenise = Callable[["Reader"], Tokens]
"""Makes the token ids of a request; runs in a thread."""


@dataclass(frozen=True, slots=True)
class Reader:
    """Texts to token ids, cut or refused where they are too many.

    Args:
        limit: tokens of one input.
    """

    tokenizer: Tokenizer
    limit: int
    vocab_size: int

    def ids(self, given: Input, param: str, truncate_tokens: int | None) -> bytes:
        """Gives the ids of one text, or checks those that were given; packed.

        Args:
            param: its name in the request, for errors.
            truncate_tokens: keep the first so many; None refuses what is too long.
        """
        kept = self._kept(truncate_tokens)
        if isinstance(given, str):
            if kept is None:
                ids = self.tokenizer.encode_within(given, add_special=True, limit_tokens=self.limit, param=param)
            else:
                ids = self.tokenizer.encode_start(given, kept)
            if not ids:
                raise RequestError(f"{param} has no tokens: nothing can be made of it", param=param, code="empty_input")
            return pack_ids(ids)
        row = self._row(given, param) if isinstance(given, Row) else given
        ids = row if kept is None else row[:kept]
        bad = next((token for token in ids if token >= self.vocab_size), None)
        if bad is not None:
            raise RequestError(
                f"{param} holds token {bad}, which is out of vocabulary: the ids are 0 to {self.vocab_size - 1}",
                param=param,
            )
        if len(ids) > self.limit:
            raise self._too_long(len(ids), param)
        return pack_ids(ids)

    def pairs(self, firsts: Sequence[str], seconds: Sequence[str], param: str, truncate_tokens: int | None) -> Tokens:
        """Gives the ids of pairs of texts; of one that is too long the second text is cut, or it is refused."""
        is_cut = truncate_tokens is not None
        limit = self._kept(truncate_tokens) or self.limit
        inputs, starts = [], []
        for index, (first, second) in enumerate(zip(firsts, seconds, strict=True)):
            ids, start = self.tokenizer.encode_pair(first, second, limit, is_cut=is_cut)
            if len(ids) > limit:
                raise self._too_long(len(ids), f"{param}[{index}]")
            inputs.append(pack_ids(ids))
            starts.append(start)
        return Tokens(inputs, starts)

    def spans(self, text: str, param: str, truncate_tokens: int | None) -> tuple[bytes, list[tuple[int, int]]]:
        """Gives the packed ids of a text, and where each token stands in it; both are empty for those that were added.

        One that is too long loses its end, but not a special token there, or is refused.
        """
        limit = self._kept(truncate_tokens) or self.limit
        if truncate_tokens is None:
            self.tokenizer.encode_within(text, add_special=True, limit_tokens=limit, param=param)
        ids, places = self.tokenizer.encode_spans(text[: _WORDY_CHARS * max(limit, 256)])
        if not ids:
            raise RequestError(f"{param} has no tokens: nothing can be made of it", param=param, code="empty_input")
        if len(ids) > limit:
            num_last = int(places[-1][0] == places[-1][1])
            ids = [*ids[: limit - num_last], *ids[len(ids) - num_last :]]
            places = [*places[: limit - num_last], *places[len(places) - num_last :]]
        return pack_ids(ids), places

    def masked(self, text: str, param: str, truncate_tokens: int | None) -> tuple[bytes, list[int]]:
        """Gives the packed ids of a text and the positions of its masks.

        Raises:
            RequestError: it has none, or too many.
        """
        mask = self.tokenizer.mask_token_id()
        if mask is None:
            raise RequestError("the model's tokenizer has no mask token", param="model", code="model_not_supported")
        ids = self.ids(text, param, truncate_tokens)
        marks = [at for at, token in enumerate(array("i", ids)) if token == mask]
        if not 1 <= len(marks) <= MAX_MARKS:
            written = self.tokenizer.token_bytes(mask).decode("utf-8", "replace").strip()
            raise RequestError(
                f"{param} has {len(marks)} masks, it must have 1 to {MAX_MARKS}: write {written} for a word",
                param=param,
            )
        return ids, marks

    def _kept(self, truncate_tokens: int | None) -> int | None:
        """Gives the tokens to keep of each input, None for all.

        Raises:
            RequestError: more are wanted than the model can take.
        """
        if truncate_tokens in (None, MODEL_LIMIT):
            return None if truncate_tokens is None else self.limit
        if truncate_tokens is not None and truncate_tokens > self.limit:
            raise RequestError(
                f"truncate_prompt_tokens is {truncate_tokens}, the model takes {self.limit} tokens. Please request a "
                "smaller truncation size.",
                param="truncate_prompt_tokens",
            )
        return truncate_tokens

    def _row(self, row: Row, param: str) -> list[int]:
        """Gives the ids of texts and ids in a row, no further than the first part that is too much."""
        ids: list[int] = []
        for part in row.parts:
            if len(ids) > self.limit:
                break
            if isinstance(part, int):
                ids.append(part)
            elif part:
                ids += self.tokenizer.encode_within(part, add_special=False, limit_tokens=self.limit, param=param)
        if not ids:
            raise RequestError(f"{param} has no tokens: nothing can be made of it", param=param, code="empty_input")
        return ids

    def _too_long(self, count: int, param: str) -> ContextLengthError:
        return ContextLengthError(
            f"This model's maximum context length is {self.limit} tokens. However, {param} is too large, at least "
            f"{count} tokens. Please reduce the length of the input prompt, or send truncate_prompt_tokens.",
            param=param,
        )


def check_encoder(pipeline: Pipeline, model: str) -> Welcome:
    """Gives the identity of a model that is ready and does not generate.

    Raises:
        HeadraceError: not ready, or a model that generates.
    """
    identity = pipeline.check_ready()
    if not identity.vector_width:
        raise RequestError(
            f"the model {model!r} generates text and makes no vectors: use /v1/chat/completions",
            param="model",
            code="model_not_supported",
        )
    return identity


class Encoding:
    """One such request. ``run`` it, as often as needed, and ``close`` it in any case when its answer is out.

    Args:
        model: what the request calls the model.
        record: gets the tokens and moments.
        executor: where texts become tokens.

    Raises:
        HeadraceError: the model is not ready, or generates.
    """

    def __init__(self, pipeline: Pipeline, model: str, record: Record, executor: Executor) -> None:
        self.identity = check_encoder(pipeline, model)
        self.record = record
        self._pipeline = pipeline
        self._executor = executor
        self._ticket = Ticket(pipeline, record, is_stream=False)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._pipeline.kit.tokenizer

    async def run(
        self,
        tokenise: Tokenise,
        *,
        dimensions: int | None = None,
        form: EncodeForm = EncodeForm.POOLED,
        num_top: int = 0,
        is_normalised: bool = False,
    ) -> list[bytes]:
        """Gives what the model makes of each input, f32 little-endian. Call it once.

        Raises:
            HeadraceError: the request is refused, or failed.
        """
        pipeline, ticket, identity = self._pipeline, self._ticket, self.identity
        ticket.start_clocks()
        reader = Reader(pipeline.kit.tokenizer, pipeline.context_tokens(identity), identity.vocab_size)
        loop = asyncio.get_running_loop()
        tokens = await ticket.until_failed(loop.run_in_executor(self._executor, tokenise, reader))
        self.record.prompt_tokens = sum(map(len, tokens.inputs)) // ID_BYTES
        if self.record.prompt_tokens > MAX_BATCH_TOKENS:
            raise RequestError(
                f"the request has {self.record.prompt_tokens} tokens in all, the limit is {MAX_BATCH_TOKENS}: "
                "send it in several",
                code="batch_too_large",
            )
        request = Encode(
            next(pipeline.ids),
            tokens.inputs,
            second_starts=tokens.second_starts,
            form=form,
            marks=tokens.marks,
            num_top=num_top,
            is_normalised=is_normalised,
            dimensions=dimensions,
            timeout_s=pipeline.limits.request_timeout_s + BACKSTOP_S,
        )

        def identify() -> bytes:
            return fingerprint_inputs(request.inputs)

        ticket.check_suspect(identify)
        await ticket.enter(1)
        pipeline.check_ready()
        while True:
            events = ticket.submit(lambda: pipeline.replica.encode(request))
            try:
                return await self._collect(events, [b""] * len(request.inputs))
            except WorkerLostError:
                await ticket.outlive_worker(identify)

    def close(self) -> None:
        """Ends what still runs and gives everything back; safe to call again."""
        self._ticket.close()

    async def _collect(self, events: EventStream, results: list[bytes]) -> list[bytes]:
        has_output = False
        while arrived := await events.take():
            for event in arrived:
                match event:
                    case Encoded():
                        results[event.index] = event.vector
                        has_output = True
                    case Started():
                        self._ticket.note_started()
                    case Failed():
                        raise self._pipeline.error_of(event)
            if has_output:
                self._ticket.note_output()
        return results
