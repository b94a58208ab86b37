"""``POST /invocations``, which hosts of models call: the endpoint is the one whose fields the body has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from headrace.base.errors import RequestError
from headrace.gateway.models import Models
from headrace.protocol.invoked import BY_FIELD, INPUT
from headrace.protocol.launch import Kind
from headrace.protocol.strict_json import decode_object

if TYPE_CHECKING:
    from headrace.server.edge import Handler
    from headrace.server.exchange import Exchange


class Invocations:
    """Hands a request to the endpoint that it is for.

    Args:
        handlers: by path.
        max_body_bytes: the largest body of any of them; each has its own limit besides.
    """

    def __init__(self, models: Models, handlers: Mapping[str, Handler], max_body_bytes: int) -> None:
        self._models = models
        self._handlers = handlers
        self._max_body_bytes = max_body_bytes

    async def __call__(self, exchange: Exchange) -> None:
        """Answers one request."""
        values = decode_object(await exchange.read_body(self._max_body_bytes))
        await self._handlers[self._path_for(values)](exchange)

    def _path_for(self, values: Mapping[str, object]) -> str:
        for field, path in BY_FIELD.items():
            if values.get(field) is not None:
                return path
        if values.get(INPUT) is None:
            raise RequestError(
                f"the body must have one of {', '.join(BY_FIELD)} or {INPUT}: they say what is asked for",
                code="missing_required",
            )
        model = values.get("model")
        kind = self._models.find(model if isinstance(model, str) else None, Kind.EMBED, Kind.CLASSIFY).kind
        return "/v1/classify" if kind is Kind.CLASSIFY else "/v1/embeddings"
