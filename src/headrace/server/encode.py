"""The endpoints that do not generate: embeddings, rerank and score, classify."""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import ClassVar, Generic, Protocol, TypeVar, TypeVarTuple

from headrace.base.errors import RequestError
from headrace.base.ids import new_id
from headrace.base.recorder import Recorder
from headrace.gateway.encoding import Encoding, Reader, Tokens
from headrace.gateway.ledger import Ledger, Record
from headrace.gateway.models import Models
from headrace.protocol.binary import Packed
from headrace.protocol.embeddings import EmbeddingRequest, embeddings_body, values_of
from headrace.protocol.frames import EncodeForm, Welcome
from headrace.protocol.inputs import Input
from headrace.protocol.launch import Kind
from headrace.protocol.rerank import (
    ClassifyRequest,
    ScoreRequest,
    classes_body,
    scores_body,
    sigmoid,
)
from headrace.protocol.tei import embed_body, predict_body
from headrace.server.endpoint import Endpoint
from headrace.server.exchange import Exchange


class _Request(Protocol):
    @property
    def model(self) -> str | None: ...

    @property
    def unknown(self) -> tuple[str, ...]: ...


_R = TypeVar("_R", bound=_Request)
_Ts = TypeVarTuple("_Ts")
_Body = TypeVar("_Body", bound=bytes | Packed)


class EncodeEndpoint(Endpoint, Generic[_R]):
    """One such endpoint.

    Args:
        parse: reads its body.
        max_body_bytes: the largest body; batches are larger than conversations.
    """

    _kinds: ClassVar[tuple[Kind, ...]]
    """What it can use, the best first."""

    def __init__(
        self,
        name: str,
        parse: Callable[[bytes], _R],
        *,
        models: Models,
        ledger: Ledger,
        recorder: Recorder,
        executor: Executor,
        max_body_bytes: int,
    ) -> None:
        super().__init__(name, models=models, ledger=ledger, recorder=recorder, executor=executor)
        self._parse = parse
        self._max_body_bytes = max_body_bytes

    @abstractmethod
    async def _answer(self, request: _R, encoding: Encoding) -> bytes | Packed:
        """Gives the body of the answer, JSON or not."""

    async def _aside(self, write: Callable[[*_Ts], _Body], *args: *_Ts) -> _Body:
        """Writes a body that may be large off the event loop, which others wait for."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, write, *args)

    async def _serve(self, exchange: Exchange, record: Record) -> None:
        request = await self._read(exchange, self._parse, self._max_body_bytes)
        pipeline = self._find(record, request.model, *self._kinds)
        headers = self._ignored.note(request.unknown)
        encoding = Encoding(pipeline, record.model, record, self._executor)
        try:
            answer = await self._answer(request, encoding)
            if isinstance(answer, Packed):
                if answer.metadata is not None:
                    headers = [*headers, (b"metadata", answer.metadata)]
                await exchange.answer(200, answer.body, headers, media=b"application/octet-stream")
            else:
                await exchange.answer(200, answer, headers)
        finally:
            encoding.close()


class Embeddings(EncodeEndpoint[EmbeddingRequest]):
    """``POST /v1/embeddings``, and TEI's ``/embed``, ``/embed_all`` and ``/similarity``."""

    _kinds = (Kind.EMBED,)

    async def _answer(self, request: EmbeddingRequest, encoding: Encoding) -> bytes | Packed:
        identity, record = encoding.identity, encoding.record
        if identity.labels:
            raise refused(record, "classifies and makes no vectors: use /v1/classify or /v1/rerank")
        check_dimensions(request.dimensions, identity)

        form = EncodeForm.ROWS if request.is_by_token else EncodeForm.POOLED
        tokenise = partial(input_tokens, request.inputs, request.truncate_tokens)
        vectors = await encoding.run(tokenise, dimensions=request.dimensions, form=form)
        if request.is_tei:
            return await self._aside(embed_body, request, vectors, identity.vector_width)

        def write() -> bytes | Packed:
            return embeddings_body(
                request,
                vectors,
                answer_id=new_id("embd"),
                created=int(time.time()),
                model=record.model,
                prompt_tokens=record.prompt_tokens,
            )

        return await self._aside(write)


class Scores(EncodeEndpoint[ScoreRequest]):
    """Rerank and score: by a cross-encoder of one class, or by the angle between the vectors of an embedding model."""

    _kinds = (Kind.SCORE, Kind.EMBED)

    async def _answer(self, request: ScoreRequest, encoding: Encoding) -> bytes:
        identity, record = encoding.identity, encoding.record
        if len(identity.labels) > 1 or EncodeForm.POOLED not in identity.forms:
            raise refused(record, f"has {len(identity.labels)} classes; one is needed to score: use /v1/classify")
        scores = await (self._crossed if identity.labels else self._compared)(request, encoding)
        return scores_body(request, scores, new_id("rerank"), record.model, record.prompt_tokens)

    async def _crossed(self, request: ScoreRequest, encoding: Encoding) -> list[float]:
        def tokenise(reader: Reader) -> Tokens:
            queries = request.queries * (len(request.documents) if len(request.queries) == 1 else 1)
            return reader.pairs(queries, request.documents, "documents", request.truncate_tokens)

        results = await encoding.run(tokenise)
        raw = [values_of(result)[0] for result in results]
        return raw if request.is_raw else [sigmoid(value) for value in raw]

    async def _compared(self, request: ScoreRequest, encoding: Encoding) -> list[float]:
        texts = [*request.queries, *request.documents]

        def tokenise(reader: Reader) -> Tokens:
            count = len(request.queries)
            names = [f"query[{at}]" if at < count else f"documents[{at - count}]" for at in range(len(texts))]
            found = zip(texts, names, strict=True)
            return Tokens([reader.ids(text, name, request.truncate_tokens) for text, name in found])

        vectors = [values_of(result) for result in await encoding.run(tokenise)]
        queries, documents = vectors[: len(request.queries)], vectors[len(request.queries) :]
        return [
            sum(a * b for a, b in zip(queries[at % len(queries)], document, strict=True))
            for at, document in enumerate(documents)
        ]


class Classes(EncodeEndpoint[ClassifyRequest]):
    """``POST /v1/classify``, and TEI's ``/predict``."""

    _kinds = (Kind.CLASSIFY, Kind.SCORE)

    async def _answer(self, request: ClassifyRequest, encoding: Encoding) -> bytes:
        identity, record = encoding.identity, encoding.record
        if not identity.labels:
            raise refused(record, "makes vectors and classifies nothing: use /v1/embeddings")
        if EncodeForm.POOLED not in identity.forms:
            raise refused(record, "classifies tokens, not texts: use /v1/pooling")

        def tokenise(reader: Reader) -> Tokens:
            given = enumerate(request.inputs)
            return Tokens([reader.ids(text, f"input[{at}]", request.truncate_tokens) for at, text in given])

        results = await encoding.run(tokenise)
        if request.is_tei:
            return await self._aside(predict_body, request, results, identity.labels)
        return await self._aside(
            classes_body, request, results, identity.labels, new_id("classify"), record.model, record.prompt_tokens
        )


def input_tokens(inputs: Sequence[Input], truncate_tokens: int | None, reader: Reader) -> Tokens:
    """Reads the field ``input``: a text, token ids, or a list of either."""
    name = "input[{}]" if len(inputs) > 1 else "input"
    return Tokens([reader.ids(text, name.format(at), truncate_tokens) for at, text in enumerate(inputs)])


def check_dimensions(dimensions: int | None, identity: Welcome) -> None:
    """Refuses more elements than a vector has."""
    width = identity.vector_width
    if dimensions is not None and dimensions > width:
        raise RequestError(f"dimensions is {dimensions}, the vectors of this model have {width}", param="dimensions")


def refused(record: Record, why: str) -> RequestError:
    """Makes the error for what a model cannot do."""
    return RequestError(f"the model {record.model!r} {why}", param="model", code="model_not_supported")
