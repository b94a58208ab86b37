"""``POST /v1/embeddings``: texts or token ids in, one vector for each out."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor

from headrace.base.recorder import Recorder
from headrace.gateway.embedding import embed
from headrace.gateway.ledger import Record
from headrace.gateway.pipeline import Pipeline
from headrace.protocol.embeddings import embeddings_body, parse_embeddings
from headrace.server.endpoint import Endpoint
from headrace.server.exchange import Exchange


class EmbedEndpoint(Endpoint):
    """The embeddings endpoint.

    Args:
        max_body_bytes: the largest body; batches are larger than conversations.
    """

    def __init__(self, *, pipeline: Pipeline, recorder: Recorder, executor: Executor, max_body_bytes: int) -> None:
        super().__init__("embeddings", pipeline=pipeline, recorder=recorder, executor=executor)
        self._max_body_bytes = max_body_bytes

    async def _serve(self, exchange: Exchange, record: Record) -> None:
        request = await self._read(exchange, parse_embeddings, self._max_body_bytes)
        record.model = request.model
        headers = self._note_ignored(request.unknown)
        vectors = await embed(self._pipeline, request, record, self._executor)
        loop = asyncio.get_running_loop()
        body = await loop.run_in_executor(self._executor, embeddings_body, request, vectors, record.prompt_tokens)
        await exchange.answer(200, body, headers)
