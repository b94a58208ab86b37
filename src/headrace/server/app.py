"""The HTTP applications of a front: the public API, and the admin listener.

Here endpoints get their paths. Health answers cost nothing and ask no engine: they read what the link last heard.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Final, TypedDict

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import headrace
from headrace.base.errors import AuthenticationError, HeadraceError, MethodNotAllowed, NotFoundError
from headrace.base.recorder import Recorder
from headrace.gateway.encoding import check_encoder
from headrace.gateway.pipeline import Pipeline
from headrace.observe.exposition import CONTENT_TYPE, expose
from headrace.observe.process import WorkerMeter, note_process
from headrace.protocol.answers import error_body
from headrace.protocol.anthropic import parse_message
from headrace.protocol.embeddings import parse_embeddings
from headrace.protocol.openai import parse_chat, parse_completion
from headrace.protocol.openapi import build_document
from headrace.protocol.rerank import ScoreRequest, parse_classify, parse_rerank, parse_score
from headrace.protocol.tei import info, parse_embed, parse_predict
from headrace.replica.port import Readiness
from headrace.server.edge import Edge, Handler
from headrace.server.encode import Classes, Embeddings, Scores
from headrace.server.exchange import error_headers
from headrace.server.generate import GenerateEndpoint, StreamSettings, anthropic_writer, speak_anthropic
from headrace.server.tokens import JsonEndpoint, TokenPages

OWNER: Final = "headrace"
# A batch of texts may be this many times as large as a conversation.
BATCH_BODY_RATIO: Final = 8


@dataclass(frozen=True, slots=True)
class FrontState:
    """What the endpoints of a front share."""

    pipeline: Pipeline
    recorder: Recorder
    meter: WorkerMeter
    settings: StreamSettings
    executor: Executor
    started_at_s: int
    num_connections: Callable[[], int]
    is_loopback: bool = True


class _Encoding(TypedDict):
    pipeline: Pipeline
    recorder: Recorder
    executor: Executor
    max_body_bytes: int


def public_app(state: FrontState) -> Edge:
    """Makes the application of the public listeners."""
    pages = _Pages(state)

    endpoint = partial(
        GenerateEndpoint,
        pipeline=state.pipeline,
        recorder=state.recorder,
        settings=state.settings,
        executor=state.executor,
    )
    tokens = TokenPages(state.pipeline)
    max_bytes = state.settings.max_body_bytes
    encoding = _Encoding(
        pipeline=state.pipeline,
        recorder=state.recorder,
        executor=state.executor,
        max_body_bytes=BATCH_BODY_RATIO * max_bytes,
    )

    def scores(name: str, parse: Callable[[bytes], ScoreRequest]) -> Scores:
        return Scores(name, parse, **encoding)

    handlers: dict[str, Handler] = {
        "/v1/chat/completions": endpoint("chat", parse_chat),
        "/v1/completions": endpoint("completions", parse_completion),
        "/v1/embeddings": Embeddings("embeddings", parse_embeddings, **encoding),
        "/embed": Embeddings("embeddings", parse_embed, **encoding),
        "/predict": Classes("classify", parse_predict, **encoding),
        "/v1/classify": Classes("classify", parse_classify, **encoding),
        "/v1/score": scores("score", parse_score),
        "/rerank": scores("rerank", parse_rerank),
        "/v1/rerank": scores("rerank", parse_rerank),
        "/v2/rerank": scores("rerank", parse_rerank),
        "/v1/messages": endpoint("messages", parse_message, anthropic_writer, prepare=speak_anthropic),
        "/v1/messages/count_tokens": JsonEndpoint(tokens.count_message, max_bytes, speak_anthropic),
        "/tokenize": JsonEndpoint(tokens.tokenize, max_bytes),
        "/detokenize": JsonEndpoint(tokens.detokenize, max_bytes),
    }
    # Clients of llama.cpp's server leave the version out.
    handlers |= {path.removeprefix("/v1"): handler for path, handler in handlers.items() if path.startswith("/v1/")}
    routes = [
        Route("/tokenizer_info", pages.tokenizer_info),
        Route("/openapi.json", pages.openapi),
        Route("/info", pages.info),
        Route("/v1/models", pages.models),
        Route("/v1/models/{model:path}", pages.model),
        Route("/models", pages.models),
        *_common_routes(pages),
    ]
    return _edge(state, handlers, routes)


def admin_app(state: FrontState) -> Edge:
    """Makes the application of the admin listener, which is on loopback."""
    return _edge(state, {}, _common_routes(_Pages(state)))


def _common_routes(pages: _Pages) -> list[Route]:
    return [
        Route("/health", pages.health),
        Route("/livez", pages.live),
        Route("/readyz", pages.ready),
        Route("/startupz", pages.startup),
        Route("/metrics", pages.metrics),
        Route("/version", pages.version),
    ]


def _edge(state: FrontState, handlers: dict[str, Handler], routes: list[Route]) -> Edge:
    app = Starlette(routes=routes, exception_handlers={HTTPException: _refuse, HeadraceError: _answer_error})
    app.router.redirect_slashes = False
    paths = frozenset(route.path for route in routes)
    return Edge(handlers, app, state.recorder, is_loopback=state.is_loopback, known_paths=paths)


class _Pages:
    """The small endpoints."""

    def __init__(self, state: FrontState) -> None:
        self._state = state

    async def models(self, _request: Request) -> Response:
        """``GET /v1/models``."""
        cards = [self._card(name) for name in self._state.pipeline.served_names]
        return _json({"object": "list", "data": cards})

    async def model(self, request: Request) -> Response:
        """``GET /v1/models/{id}``; ids may hold slashes."""
        name = request.path_params["model"]
        self._state.pipeline.check_model(name)
        return _json(self._card(name))

    def _card(self, name: str) -> dict[str, object]:
        pipeline = self._state.pipeline
        identity = pipeline.replica.identity
        canonical = pipeline.served_names[0]
        return {
            "id": name,
            "object": "model",
            "created": self._state.started_at_s,
            "owned_by": OWNER,
            "root": canonical,
            "parent": None,
            "max_model_len": None if identity is None else pipeline.context_tokens(identity),
        }

    async def info(self, _request: Request) -> Response:
        """``GET /info``: what a model that makes vectors or scores is, as TEI says it."""
        pipeline = self._state.pipeline
        identity = check_encoder(pipeline, pipeline.served_names[0])
        context_tokens = pipeline.context_tokens(identity)
        return _json(info(pipeline.served_names[0], context_tokens, identity.labels, headrace.__version__))

    async def openapi(self, _request: Request) -> Response:
        """``GET /openapi.json``."""
        return _json(build_document(headrace.__version__))

    async def tokenizer_info(self, _request: Request) -> Response:
        """``GET /tokenizer_info``."""
        return _json(TokenPages(self._state.pipeline).info())

    async def health(self, _request: Request) -> Response:
        """``GET /health``: 200 when a request would be taken."""
        return self._readiness()

    async def live(self, _request: Request) -> Response:
        """``GET /livez``: 200 while the event loop turns; nothing outside this process can fail it."""
        return _json({"status": "ok"})

    async def ready(self, _request: Request) -> Response:
        """``GET /readyz``: 200 when a request would be taken."""
        return self._readiness()

    async def startup(self, _request: Request) -> Response:
        """``GET /startupz``: 200 when the model was loaded once; progress until then."""
        replica = self._state.pipeline.replica
        status = replica.status
        is_loaded = replica.readiness not in (Readiness.LOADING, Readiness.DISCONNECTED)
        body = {
            "status": "started" if is_loaded else "starting",
            "stage": status.stage if status is not None else "waiting for the worker",
            "progress_ratio": 1.0 if is_loaded else (status.progress_ratio if status is not None else 0.0),
        }
        return _json(body, 200 if is_loaded else 503)

    def _readiness(self) -> Response:
        pipeline = self._state.pipeline
        readiness = Readiness.DRAINING if pipeline.is_draining else pipeline.replica.readiness
        status = pipeline.replica.status
        body: dict[str, object] = {"status": readiness.value, "model": pipeline.served_names[0]}
        if readiness is Readiness.READY:
            return _json(body)
        if readiness is Readiness.LOADING and status is not None:
            body |= {"stage": status.stage, "progress_ratio": status.progress_ratio}
        return _json(body, 503, {"retry-after": "1"})

    async def metrics(self, _request: Request) -> Response:
        """``GET /metrics``: Prometheus text; on loopback only, because nobody has a key yet."""
        state = self._state
        if not state.is_loopback:
            raise AuthenticationError(
                "metrics need a key here: read them on the admin listener", code="missing_api_key"
            )
        replica = state.pipeline.replica
        model = state.pipeline.served_names[0]
        state.meter.note(replica.status, is_ready=replica.readiness is Readiness.READY)
        recorder = state.recorder
        recorder.gauge("headrace_requests_admitted", state.pipeline.num_open)
        recorder.gauge("headrace_connections_open", state.num_connections())
        recorder.gauge("headrace_build_info", 1, version=headrace.__version__, model=model)
        note_process(recorder)
        return Response(expose(recorder.snapshot(), model=model), headers={"content-type": CONTENT_TYPE})

    async def version(self, _request: Request) -> Response:
        """``GET /version``."""
        return _json({"version": headrace.__version__})


def _json(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")


async def _refuse(request: Request, error: Exception) -> Response:
    """Answers what Starlette's router refuses."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        allow = (error.headers or {}).get("Allow", "GET, HEAD")
        refused: HeadraceError = MethodNotAllowed(f"{request.method} is not allowed here: use {allow}")
        return await _answer_error(request, refused, {"allow": allow})
    return await _answer_error(request, NotFoundError("there is no such route here", code="route_not_found"))


async def _answer_error(request: Request, error: Exception, headers: dict[str, str] | None = None) -> Response:
    assert isinstance(error, HeadraceError)
    out = {name.decode(): value.decode() for name, value in error_headers(error)} | (headers or {})
    request_id = request.scope.get("headrace.request_id", "")
    return Response(error_body(error, request_id), error.http_status, out, media_type="application/json")
