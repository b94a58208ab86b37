"""The small pages of a front: health, metrics, and what is served. They cost nothing and ask no engine.

With several models a front is ready when each was loaded once and one at least can be used now: a model whose worker
died must not take the others out of a router's hands. ``?model=NAME`` asks about one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

import headrace
from headrace.base.errors import AuthenticationError
from headrace.base.recorder import Recorder
from headrace.gateway.encoding import check_encoder
from headrace.gateway.models import Models
from headrace.gateway.pipeline import Pipeline
from headrace.observe.exposition import CONTENT_TYPE, expose
from headrace.observe.process import WorkerMeter, note_process
from headrace.protocol.frames import EncodeForm
from headrace.protocol.launch import Kind
from headrace.protocol.tei import info
from headrace.replica.port import Readiness
from headrace.server.tokens import TokenPages

OWNER: Final = "headrace"


@dataclass(frozen=True, slots=True, kw_only=True)
class PageState:
    """What the pages show.

    Args:
        meters: of each model's worker, by the model's canonical name.
    """

    models: Models
    recorder: Recorder
    meters: Mapping[str, WorkerMeter]
    started_at_s: int
    num_connections: Callable[[], int]
    is_loopback: bool = True


class Pages:
    """The pages."""

    def __init__(self, state: PageState) -> None:
        self._state = state

    async def models(self, _request: Request) -> Response:
        """``GET /v1/models``."""
        cards = [self._card(pipeline, name) for pipeline in self._state.models for name in pipeline.served_names]
        return _json({"object": "list", "data": cards})

    async def model(self, request: Request) -> Response:
        """``GET /v1/models/{id}``; ids may hold slashes."""
        name = request.path_params["model"]
        return _json(self._card(self._state.models.named(name), name))

    def _card(self, pipeline: Pipeline, name: str) -> dict[str, object]:
        identity = pipeline.replica.identity
        return {
            "id": name,
            "object": "model",
            "created": self._state.started_at_s,
            "owned_by": OWNER,
            "root": pipeline.name,
            "parent": None,
            "max_model_len": None if identity is None else pipeline.context_tokens(identity),
            "kind": pipeline.kind,
            "state": _readiness(pipeline),
        }

    async def info(self, request: Request) -> Response:
        """``GET /info``: what a model that makes vectors or scores is, as TEI says it."""
        pipeline = self._state.models.find(_named(request), Kind.EMBED, Kind.SCORE, Kind.CLASSIFY)
        identity = check_encoder(pipeline, pipeline.name)
        context_tokens, is_by_token = pipeline.context_tokens(identity), EncodeForm.POOLED not in identity.forms
        version = headrace.__version__
        return _json(info(pipeline.name, context_tokens, identity.labels, version, is_by_token=is_by_token))

    async def openapi(self, _request: Request) -> Response:
        """``GET /openapi.json``."""
        from headrace.protocol.openapi import build_document  # late: no request of a model needs it

        return _json(build_document(headrace.__version__))

    async def tokenizer_info(self, request: Request) -> Response:
        """``GET /tokenizer_info``."""
        return _json(TokenPages(self._state.models).info(_named(request)))

    async def health(self, request: Request) -> Response:
        """``GET /health`` and ``/readyz``: 200 when a request would be taken."""
        asked = self._asked(request)
        states = {pipeline.name: _readiness(pipeline) for pipeline in asked}
        starting = [pipeline for pipeline in asked if not pipeline.replica.was_ready]
        first = asked[0]
        if starting:
            first = starting[0]
        elif Readiness.READY in states.values():
            first = next(pipeline for pipeline in asked if states[pipeline.name] is Readiness.READY)
        readiness = states[first.name]
        body: dict[str, object] = {"status": readiness.value, "model": first.name, "models": states}
        if readiness is Readiness.READY and not starting:
            return _json(body)
        status = first.replica.status
        if readiness is Readiness.LOADING and status is not None:
            body |= {"stage": status.stage, "progress_ratio": status.progress_ratio}
        return _json(body, 503, {"retry-after": "1"})

    async def live(self, _request: Request) -> Response:
        """``GET /livez``: 200 while the event loop turns; nothing outside this process can fail it."""
        return _json({"status": "ok"})

    async def startup(self, request: Request) -> Response:
        """``GET /startupz``: 200 when every model was loaded once; progress until then."""
        asked = self._asked(request)
        starting = [pipeline for pipeline in asked if not pipeline.replica.was_ready]
        if not starting:
            return _json({"status": "started", "stage": "", "progress_ratio": 1.0})
        status = starting[0].replica.status
        own_ratios = [pipeline.replica.status.progress_ratio for pipeline in starting if pipeline.replica.status]
        body = {
            "status": "starting",
            "model": starting[0].name,
            "stage": status.stage if status is not None else "waiting for the worker",
            "progress_ratio": (len(asked) - len(starting) + sum(own_ratios)) / len(asked),
        }
        return _json(body, 503)

    async def metrics(self, _request: Request) -> Response:
        """``GET /metrics``: Prometheus text; on loopback only, because nobody has a key yet."""
        state = self._state
        if not state.is_loopback:
            raise AuthenticationError(
                "metrics need a key here: read them on the admin listener", code="missing_api_key"
            )
        recorder = state.recorder
        for pipeline in state.models:
            replica, name = pipeline.replica, pipeline.name
            state.meters[name].note(replica.status, is_ready=replica.readiness is Readiness.READY)
            recorder.gauge("headrace_requests_admitted", pipeline.num_open, model=name)
            recorder.gauge("headrace_build_info", 1, version=headrace.__version__, model=name)
        recorder.gauge("headrace_connections_open", state.num_connections())
        note_process(recorder)
        text = expose(recorder.snapshot(), models=state.models.names)
        return Response(text, headers={"content-type": CONTENT_TYPE})

    async def load(self, _request: Request) -> Response:
        """``GET /load``: how many requests are inside this front (vLLM's)."""
        return _json({"server_load": self._state.models.num_open})

    async def version(self, _request: Request) -> Response:
        """``GET /version``."""
        return _json({"version": headrace.__version__})

    def _asked(self, request: Request) -> list[Pipeline]:
        name = _named(request)
        return list(self._state.models) if name is None else [self._state.models.named(name)]


def _named(request: Request) -> str | None:
    return request.query_params.get("model")


def _readiness(pipeline: Pipeline) -> Readiness:
    return Readiness.DRAINING if pipeline.is_draining else pipeline.replica.readiness


def _json(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")
