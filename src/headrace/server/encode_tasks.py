"""Endpoints for what stands on an encoder's tokens: pooling by token, classes of tokens, tokens behind masks."""

from __future__ import annotations

import time
from array import array
from collections.abc import Mapping, Sequence
from enum import StrEnum
from functools import partial
from typing import Any

from headrace.base.errors import HeadraceError
from headrace.base.ids import new_id
from headrace.gateway.encoding import Encoding, Reader, Tokens
from headrace.gateway.models import Models
from headrace.gateway.render import Tokenizer
from headrace.protocol.binary import Packed
from headrace.protocol.embeddings import values_of
from headrace.protocol.frames import EncodeForm, Welcome
from headrace.protocol.launch import Kind
from headrace.protocol.pooling import PoolingRequest, PoolingTask, pooling_body
from headrace.protocol.tasks import Filled, Span, TaskRequest, masks_body, tokens_body
from headrace.server.encode import EncodeEndpoint, check_dimensions, input_tokens, refused
from headrace.server.exchange import Exchange


class Pooling(EncodeEndpoint[PoolingRequest]):
    """``POST /v1/pooling``."""

    _kinds = (Kind.EMBED, Kind.CLASSIFY, Kind.SCORE)

    async def _answer(self, request: PoolingRequest, encoding: Encoding) -> bytes | Packed:
        identity, record = encoding.identity, encoding.record
        tasks = _tasks_of(identity)
        task = request.task or tasks[0]
        if task not in tasks:
            raise refused(record, f"has no task {task.value!r}; it has {', '.join(tasks)}")
        if task is PoolingTask.EMBED and request.is_plain:
            raise refused(record, "gives vectors of length 1 only: leave normalize out")
        check_dimensions(request.dimensions, identity)

        results = await encoding.run(
            partial(input_tokens, request.inputs, request.truncate_tokens),
            dimensions=request.dimensions,
            form=EncodeForm.ROWS if task.is_by_token else EncodeForm.POOLED,
            is_normalised=task is PoolingTask.TOKEN_EMBED and not request.is_plain,
        )

        def write() -> bytes | Packed:
            return pooling_body(
                request,
                task,
                results,
                request.dimensions or identity.vector_width,
                answer_id=new_id("pool"),
                created=int(time.time()),
                model=record.model,
                tokens=record.prompt_tokens,
            )

        return await self._aside(write)


def _tasks_of(identity: Welcome) -> list[PoolingTask]:
    """Gives what the model can be asked for, what it is asked for by default first."""
    if identity.labels:
        return [PoolingTask.TOKEN_CLASSIFY if EncodeForm.ROWS in identity.forms else PoolingTask.CLASSIFY]
    return [PoolingTask.TOKEN_EMBED, PoolingTask.EMBED]


class TokenClasses(EncodeEndpoint[TaskRequest]):
    """``POST /`` of a model that classifies tokens."""

    _kinds = (Kind.CLASSIFY, Kind.SCORE)

    async def _answer(self, request: TaskRequest, encoding: Encoding) -> bytes:
        places: list[list[Span]] = []

        def tokenise(reader: Reader) -> Tokens:
            found = [
                reader.spans(text, f"inputs[{at}]", request.truncate_tokens) for at, text in enumerate(request.inputs)
            ]
            places.extend([Span(start, stop) for start, stop in spans] for _, spans in found)
            return Tokens([ids for ids, _ in found])

        results = await encoding.run(tokenise, form=EncodeForm.ROWS)
        return await self._aside(tokens_body, request, results, places, encoding.identity.labels)


class Masks(EncodeEndpoint[TaskRequest]):
    """``POST /`` of a model that tells which tokens masks hide."""

    _kinds = (Kind.EMBED,)

    async def _answer(self, request: TaskRequest, encoding: Encoding) -> bytes:
        tokens = Tokens([])

        def tokenise(reader: Reader) -> Tokens:
            for at, text in enumerate(request.inputs):
                ids, marks = reader.masked(text, f"inputs[{at}]", request.truncate_tokens)
                tokens.inputs.append(ids)
                tokens.marks.append(marks)
            return tokens

        num_top = min(request.num_top, encoding.identity.vocab_size)
        results = await encoding.run(tokenise, form=EncodeForm.MASKED, num_top=num_top)

        def write() -> bytes:
            found = [
                _filled(encoding.tokenizer, ids, marks, values_of(result), num_top)
                for ids, marks, result in zip(tokens.inputs, tokens.marks, results, strict=True)
            ]
            return masks_body(request, found)

        return await self._aside(write)


def _filled(
    tokenizer: Tokenizer, packed: bytes, marks: Sequence[int], values: Sequence[float], num_top: int
) -> list[list[Filled]]:
    """Gives the suggestions for each mask of a text; other masks of it stay visible."""
    ids = array("i", packed).tolist()
    filled = []
    for number, mark in enumerate(marks):
        suggestions = []
        for at in range(num_top):
            token = int(values[2 * (number * num_top + at)])
            sequence = tokenizer.decode([*ids[:mark], token, *ids[mark + 1 :]], skip_special=len(marks) == 1)
            word = tokenizer.token_bytes(token).decode("utf-8", "replace")
            suggestions.append(Filled(token, values[2 * (number * num_top + at) + 1], word.strip(), sequence))
        filled.append(suggestions)
    return filled


class Tasks:
    """``POST /``: what the model is for, in the form of TEI and of Hugging Face's inference API.

    Args:
        handlers: by task.
    """

    def __init__(self, models: Models, handlers: Mapping[Task, EncodeEndpoint[Any]]) -> None:
        self._models = models
        self._handlers = handlers

    async def __call__(self, exchange: Exchange) -> None:
        """Answers one request."""
        await self._handlers[self._task()](exchange)

    def _task(self) -> Task:
        try:
            identity = self._models.find(None, Kind.EMBED, Kind.SCORE, Kind.CLASSIFY).replica.identity
        except HeadraceError:
            return Task.VECTORS  # whose endpoint says what is wrong
        if identity is None or not identity.forms:
            return Task.VECTORS  # likewise
        if identity.labels:
            if EncodeForm.ROWS in identity.forms:
                return Task.TOKEN_CLASSES
            return Task.CLASSES if len(identity.labels) > 1 else Task.RANKING
        return Task.MASKS if EncodeForm.MASKED in identity.forms else Task.VECTORS


class Task(StrEnum):
    """What a model that does not generate may be for."""

    VECTORS = "vectors"
    CLASSES = "classes"
    RANKING = "ranking"
    TOKEN_CLASSES = "token_classes"  # noqa: S105  # no password
    MASKS = "masks"
