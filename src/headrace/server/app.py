"""The HTTP applications of a front: the public API, and the admin listener. Here endpoints get their paths."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypedDict

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace.base.errors import HeadraceError, MethodNotAllowed
from headrace.base.recorder import Recorder
from headrace.gateway.ledger import Ledger
from headrace.gateway.models import Models
from headrace.protocol.answers import error_body
from headrace.protocol.anthropic import parse_message
from headrace.protocol.anthropic_answers import error_body as anthropic_error
from headrace.protocol.embeddings import parse_embeddings
from headrace.protocol.openai import parse_chat, parse_completion
from headrace.protocol.pooling import parse_pooling
from headrace.protocol.rerank import ScoreRequest, parse_classify, parse_rerank, parse_score
from headrace.protocol.tasks import parse_masks, parse_text_classes, parse_tokens
from headrace.protocol.tei import (
    parse_embed,
    parse_embed_all,
    parse_predict,
    parse_similarity,
    parse_task_vectors,
)
from headrace.server.edge import Edge, Handler
from headrace.server.encode import Classes, Embeddings, EncodeEndpoint, Scores
from headrace.server.encode_tasks import Masks, Pooling, Task, Tasks, TokenClasses
from headrace.server.exchange import Exchange, error_headers
from headrace.server.generate import GenerateEndpoint, StreamSettings, anthropic_writer, speak_anthropic
from headrace.server.invocations import Invocations
from headrace.server.pages import Pages, PageState
from headrace.server.routes import no_route
from headrace.server.tokens import JsonEndpoint, TokenPages

# A batch of texts may be this many times as large as a conversation.
BATCH_BODY_RATIO: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontState(PageState):
    """What the endpoints of a front share."""

    ledger: Ledger
    settings: StreamSettings
    executor: Executor


class _Encoding(TypedDict):
    models: Models
    ledger: Ledger
    recorder: Recorder
    executor: Executor
    max_body_bytes: int


def public_app(state: FrontState) -> Edge:
    """Makes the application of the public listeners."""
    pages = Pages(state)

    endpoint = partial(
        GenerateEndpoint,
        models=state.models,
        ledger=state.ledger,
        recorder=state.recorder,
        settings=state.settings,
        executor=state.executor,
    )
    tokens = TokenPages(state.models)
    max_bytes = state.settings.max_body_bytes
    counting = partial(JsonEndpoint, recorder=state.recorder, max_body_bytes=max_bytes)
    encoding = _Encoding(
        models=state.models,
        ledger=state.ledger,
        recorder=state.recorder,
        executor=state.executor,
        max_body_bytes=BATCH_BODY_RATIO * max_bytes,
    )

    def scores(name: str, parse: Callable[[bytes], ScoreRequest]) -> Scores:
        return Scores(name, parse, **encoding)

    handlers: dict[str, Handler] = {
        "/v1/chat/completions": endpoint("chat", parse_chat),
        "/v1/chat/completions/input_tokens": counting("count_tokens", tokens.count_chat),
        "/v1/completions": endpoint("completions", parse_completion),
        "/v1/embeddings": Embeddings("embeddings", parse_embeddings, **encoding),
        "/v1/pooling": Pooling("pooling", parse_pooling, **encoding),
        "/embed": Embeddings("embeddings", parse_embed, **encoding),
        "/embed_all": Embeddings("embeddings", parse_embed_all, **encoding),
        "/similarity": Embeddings("embeddings", parse_similarity, **encoding),
        "/predict": Classes("classify", parse_predict, **encoding),
        "/v1/classify": Classes("classify", parse_classify, **encoding),
        "/v1/score": scores("score", parse_score),
        "/rerank": scores("rerank", parse_rerank),
        "/v1/rerank": scores("rerank", parse_rerank),
        "/v2/rerank": scores("rerank", parse_rerank),
        "/v1/messages": endpoint("messages", parse_message, anthropic_writer),
        "/v1/messages/count_tokens": counting("count_tokens", tokens.count_message),
        "/tokenize": counting("tokenize", tokens.tokenize),
        "/detokenize": counting("detokenize", tokens.detokenize),
    }
    by_task: dict[Task, EncodeEndpoint[Any]] = {
        Task.VECTORS: Embeddings("embeddings", parse_task_vectors, **encoding),
        Task.CLASSES: Classes("classify", parse_text_classes, **encoding),
        Task.RANKING: scores("rerank", parse_rerank),
        Task.TOKEN_CLASSES: TokenClasses("token_classify", parse_tokens, **encoding),
        Task.MASKS: Masks("fill_mask", parse_masks, **encoding),
    }
    handlers["/"] = Tasks(state.models, by_task)
    handlers["/invocations"] = Invocations(state.models, dict(handlers), BATCH_BODY_RATIO * max_bytes)
    # Clients of llama.cpp's server leave the version out.
    handlers |= {path.removeprefix("/v1"): handler for path, handler in handlers.items() if path.startswith("/v1/")}
    routes = [
        Route("/tokenizer_info", pages.tokenizer_info),
        Route("/openapi.json", pages.openapi),
        Route("/info", pages.info),
        Route("/load", pages.load),
        Route("/v1/models", pages.models),
        Route("/v1/models/{model:path}", pages.model),
        Route("/models", pages.models),
        *_common_routes(pages),
    ]
    return _edge(state, handlers, routes)


def admin_app(state: FrontState) -> Edge:
    """Makes the application of the admin listener, which is on loopback."""
    return _edge(state, {}, _common_routes(Pages(state)))


def _common_routes(pages: Pages) -> list[Route]:
    return [
        Route("/health", pages.health),
        Route("/livez", pages.live),
        Route("/readyz", pages.health),
        Route("/startupz", pages.startup),
        Route("/metrics", pages.metrics),
        Route("/version", pages.version),
    ]


def _edge(state: FrontState, handlers: dict[str, Handler], routes: list[Route]) -> Edge:
    paths = frozenset(route.path for route in routes)
    known = paths | handlers.keys()

    async def refuse(request: Request, error: Exception) -> Response:
        """Answers what Starlette's router refuses."""
        assert isinstance(error, HTTPException)
        if error.status_code == 405:
            allow = ", ".join(sorted((error.headers or {}).get("Allow", "GET, HEAD").split(", ")))
            refused: HeadraceError = MethodNotAllowed(f"{request.method} is not allowed here: use {allow}")
            return await _answer_error(request, refused, {"allow": allow})
        return await _answer_error(request, no_route(request.method, request.url.path, known))

    app = Starlette(routes=routes, exception_handlers={HTTPException: refuse, HeadraceError: _answer_error})
    app.router.redirect_slashes = False
    return Edge(
        handlers, app, state.recorder, is_loopback=state.is_loopback, known_paths=paths, dialect=_speak_as_asked
    )


def _speak_as_asked(exchange: Exchange) -> None:
    """Makes an exchange's errors Anthropic's under its routes, whatever it is that refuses."""
    if _is_anthropic(exchange.path):
        speak_anthropic(exchange)


def _is_anthropic(path: str) -> bool:
    return f"{path.removeprefix('/v1')}/".startswith("/messages/")


async def _answer_error(request: Request, error: Exception, headers: dict[str, str] | None = None) -> Response:
    assert isinstance(error, HeadraceError)
    out = {name.decode(): value.decode() for name, value in error_headers(error)} | (headers or {})
    request_id = request.scope.get("headrace.request_id", "")
    body = anthropic_error if _is_anthropic(request.url.path) else error_body
    return Response(body(error, request_id), error.http_status, out, media_type="application/json")
