"""Inputs to what the worker makes of them, for every endpoint that does not generate: vectors, or scores of classes.

    model look-up → readiness → tokenise → admission → encode → results

Nothing of an answer is seen before it is whole, so a request whose worker died is simply run once more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headrace.base.errors import ContextLengthError, DeadlineError, RequestError, WorkerLostError
from headrace.gateway.pipeline import Pipeline
from headrace.gateway.ticket import BACKSTOP_S, MAX_ATTEMPTS
from headrace.protocol.frames import Encode, Encoded, Failed, Started, Welcome

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from headrace.gateway.ledger import Record
    from headrace.gateway.render import Tokenizer
    from headrace.replica.events import EventStream


@dataclass(frozen=True, slots=True)
class Tokens:
    """Inputs as token ids; ``second_starts`` as in ``frames.Encode``."""

    inputs: list[list[int]]
    second_starts: list[int] = field(default_factory=list)


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

    def ids(self, given: str | list[int], param: str, truncate_tokens: int | None) -> list[int]:
        """Gives the ids of one text, or checks those that were given.

        Args:
            param: its name in the request, for errors.
            truncate_tokens: keep the first so many; None refuses what is too long.
        """
        kept = None if truncate_tokens is None else min(truncate_tokens, self.limit)
        if isinstance(given, str):
            if kept is None:
                ids = self.tokenizer.encode_within(given, add_special=True, limit_tokens=self.limit, param=param)
            else:
                ids = self.tokenizer.encode_start(given, kept)
            if not ids:
                raise RequestError(f"{param} has no tokens: nothing can be made of it", param=param, code="empty_input")
            return ids
        ids = given if kept is None else given[:kept]
        bad = next((token for token in ids if token >= self.vocab_size), None)
        if bad is not None:
            raise RequestError(f"{param} holds token {bad}, the vocabulary is 0 to {self.vocab_size - 1}", param=param)
        if len(ids) > self.limit:
            raise self._too_long(len(ids), param)
        return ids

    def pairs(self, firsts: Sequence[str], seconds: Sequence[str], param: str, truncate_tokens: int | None) -> Tokens:
        """Gives the ids of pairs of texts; of one that is too long the second text is cut, or it is refused."""
        is_cut = truncate_tokens is not None
        limit = self.limit if truncate_tokens is None else min(truncate_tokens, self.limit)
        inputs, starts = [], []
        for index, (first, second) in enumerate(zip(firsts, seconds, strict=True)):
            ids, start = self.tokenizer.encode_pair(first, second, limit, is_cut=is_cut)
            if len(ids) > limit:
                raise self._too_long(len(ids), f"{param}[{index}]")
            inputs.append(ids)
            starts.append(start)
        return Tokens(inputs, starts)

    def _too_long(self, count: int, param: str) -> ContextLengthError:
        return ContextLengthError(
            f"This model's maximum context length is {self.limit} tokens. However, {param} has {count} tokens: shorten "
            "it, or send truncate_prompt_tokens.",
            param=param,
        )


def check_encoder(pipeline: Pipeline, model: str) -> Welcome:
    """Gives the identity of a model that is ready and does not generate.

    Raises:
        HeadraceError: unknown, not ready, or a model that generates.
    """
    pipeline.check_model(model)
    identity = pipeline.check_ready()
    if not identity.vector_width:
        raise RequestError(
            f"the model {model!r} generates text and makes no vectors: use /v1/chat/completions",
            param="model",
            code="model_not_supported",
        )
    return identity


async def encode(
    pipeline: Pipeline,
    identity: Welcome,
    tokenise: Tokenise,
    record: Record,
    executor: Executor,
    *,
    dimensions: int | None = None,
) -> list[bytes]:
    """Gives what the model makes of each input, f32 little-endian.

    Args:
        identity: what ``check_encoder`` gave.
        record: gets the tokens and moments.
        executor: where texts become tokens.

    Raises:
        HeadraceError: the request is refused, or failed.
    """
    pipeline.admission.check_room()
    reader = Reader(pipeline.kit.tokenizer, pipeline.context_tokens(identity), identity.vocab_size)
    async with _time_limit(pipeline.limits.request_timeout_s):
        tokens = await asyncio.get_running_loop().run_in_executor(executor, tokenise, reader)
        record.prompt_tokens = sum(map(len, tokens.inputs))
        weight = await pipeline.admission.enter(1, lambda _: None)
        try:
            while True:
                pipeline.check_ready()
                record.num_attempts += 1
                try:
                    return await _run(pipeline, tokens, dimensions, record)
                except WorkerLostError:
                    if record.num_attempts >= MAX_ATTEMPTS or pipeline.is_draining:
                        raise
                    await pipeline.replica.wait_ready()
        finally:
            pipeline.admission.leave(weight)


@asynccontextmanager
async def _time_limit(timeout_s: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError as error:
        raise DeadlineError(f"the request ran out of its {timeout_s:g} s") from error


async def _run(pipeline: Pipeline, tokens: Tokens, dimensions: int | None, record: Record) -> list[bytes]:
    events = pipeline.replica.encode(
        Encode(
            next(pipeline.ids),
            tokens.inputs,
            second_starts=tokens.second_starts,
            dimensions=dimensions,
            timeout_s=pipeline.limits.request_timeout_s + BACKSTOP_S,
        )
    )
    try:
        return await _collect(events, [b""] * len(tokens.inputs), pipeline, record)
    finally:
        events.close()


async def _collect(events: EventStream, results: list[bytes], pipeline: Pipeline, record: Record) -> list[bytes]:
    while arrived := await events.take():
        for event in arrived:
            match event:
                case Encoded():
                    results[event.index] = event.vector
                case Started():
                    record.started_at_s = pipeline.clock.now_s()
                case Failed():
                    raise pipeline.error_of(event)
    return results
