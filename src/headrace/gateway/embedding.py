"""One request for vectors, from its texts to what the worker made of them.

    model look-up → readiness → tokenise → admission → encode → vectors

Nothing of an answer is seen before it is whole, so a request whose worker died is simply run once more.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor

from headrace.base.errors import (
    ContextLengthError,
    DeadlineError,
    RequestError,
    WorkerLostError,
)
from headrace.gateway.ledger import Record
from headrace.gateway.pipeline import BACKSTOP_S, MAX_ATTEMPTS, Pipeline
from headrace.protocol.embeddings import EmbeddingRequest
from headrace.protocol.frames import Encode, Encoded, Failed, Started, Welcome
from headrace.replica.events import EventStream


async def embed(pipeline: Pipeline, request: EmbeddingRequest, record: Record, executor: Executor) -> list[bytes]:
    """Gives a vector for each input, f32 little-endian.

    Args:
        record: gets the tokens and moments.
        executor: where texts become tokens.

    Raises:
        HeadraceError: the request is refused, or failed.
    """
    pipeline.check_model(request.model)
    identity = pipeline.check_ready()
    _check_width(request, identity)
    pipeline.admission.check_room()
    loop = asyncio.get_running_loop()
    limit = pipeline.context_tokens(identity)
    async with _time_limit(pipeline.limits.request_timeout_s):
        inputs = await loop.run_in_executor(executor, _tokenise, pipeline, request, limit, identity.vocab_size)
        record.prompt_tokens = sum(map(len, inputs))
        weight = await pipeline.admission.enter(1, lambda _: None)
        try:
            while True:
                pipeline.check_ready()
                record.num_attempts += 1
                try:
                    return await _run(pipeline, inputs, request, record)
                except WorkerLostError:
                    if record.num_attempts >= MAX_ATTEMPTS or pipeline.is_draining:
                        raise
                    await pipeline.replica.wait_ready()
        finally:
            pipeline.admission.leave(weight)


class _time_limit:  # noqa: N801  # reads as a statement
    """Turns asyncio's time-out into the request's own error."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._inner = asyncio.timeout(timeout_s)

    async def __aenter__(self) -> None:
        await self._inner.__aenter__()

    async def __aexit__(self, *exc: object) -> None:
        try:
            await self._inner.__aexit__(*exc)  # type: ignore[arg-type]  # what we were given
        except TimeoutError as error:
            raise DeadlineError(f"the request ran out of its {self._timeout_s:g} s") from error


def _check_width(request: EmbeddingRequest, identity: Welcome) -> None:
    width = identity.vector_width
    if not width:
        raise RequestError(
            f"the model {request.model!r} generates text and makes no vectors: use /v1/chat/completions",
            param="model",
            code="model_not_supported",
        )
    if request.dimensions is not None and request.dimensions > width:
        raise RequestError(
            f"dimensions is {request.dimensions}, the vectors of this model have {width}", param="dimensions"
        )


def _tokenise(pipeline: Pipeline, request: EmbeddingRequest, limit: int, vocab_size: int) -> list[list[int]]:
    """Gives the token ids of each input, cut or refused where they are too many. Runs in a thread."""
    tokenizer = pipeline.kit.tokenizer
    kept = None if request.truncate_tokens is None else min(request.truncate_tokens, limit)
    many: list[list[int]] = []
    for index, given in enumerate(request.inputs):
        param = f"input[{index}]" if len(request.inputs) > 1 else "input"
        if isinstance(given, str):
            if kept is None:
                ids = tokenizer.encode_within(given, add_special=True, limit_tokens=limit, param=param)
            else:
                ids = tokenizer.encode_start(given, kept)
            if not ids:
                raise RequestError(f"{param} has no tokens: there is nothing to embed", param=param, code="empty_input")
        else:
            ids = given if kept is None else given[:kept]
            bad = next((token for token in ids if token >= vocab_size), None)
            if bad is not None:
                raise RequestError(f"{param} holds token {bad}, the vocabulary is 0 to {vocab_size - 1}", param=param)
            if len(ids) > limit:
                raise ContextLengthError(
                    f"This model's maximum context length is {limit} tokens. However, {param} has {len(ids)} tokens: "
                    "shorten it, or send truncate_prompt_tokens.",
                    param=param,
                )
        many.append(ids)
    return many


async def _run(pipeline: Pipeline, inputs: list[list[int]], request: EmbeddingRequest, record: Record) -> list[bytes]:
    encode = Encode(
        pipeline.next_id(),
        inputs,
        dimensions=request.dimensions,
        timeout_s=pipeline.limits.request_timeout_s + BACKSTOP_S,
    )
    events = pipeline.replica.encode(encode)
    vectors: list[bytes] = [b""] * len(inputs)
    try:
        return await _collect(events, vectors, pipeline, record)
    finally:
        events.close()


async def _collect(events: EventStream, vectors: list[bytes], pipeline: Pipeline, record: Record) -> list[bytes]:
    while arrived := await events.take():
        for event in arrived:
            match event:
                case Encoded():
                    vectors[event.index] = event.vector
                case Started():
                    record.started_at_s = pipeline.clock.now_s()
                case Failed():
                    raise pipeline.error_of(event)
    return vectors
