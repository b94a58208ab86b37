"""The edge: what every request passes before an endpoint sees it, and where every fault becomes an answer.

Order, cheapest first: request id → repeated headers → Host and Origin → route and method. The generating endpoints are
called directly; everything else is a Starlette application. Pages of this machine and of the server's own host may
call it: their browser's questions (CORS preflight) are answered here, and its answers name their origin.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from starlette.types import ASGIApp

from headrace.base.errors import HeadraceError, MethodNotAllowed, PermissionDenied, RequestError
from headrace.base.ids import is_sane_id, new_request_id
from headrace.base.log import get_log
from headrace.base.recorder import Recorder
from headrace.server.exchange import CLIENT_CLOSED, ClientGoneError, Exchange, check_repeated

Handler = Callable[[Exchange], Awaitable[None]]

_LOOPBACK: Final = ("localhost", "127.0.0.1", "[::1]")
_HOST: Final = re.compile(r"^(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(?::(\d{1,5}))?$")
_ORIGIN: Final = re.compile(r"^https?://([^/?#]+)$")
_OTHER_ROUTE: Final = "other"
_PREFLIGHT: Final = (
    (b"access-control-allow-methods", b"GET, HEAD, POST, OPTIONS"),
    (b"access-control-allow-headers", b"*, authorization"),
    (b"access-control-max-age", b"600"),
)

_log = get_log(__name__)


class Edge:
    """The ASGI application of a listener.

    Args:
        handlers: POST endpoints by exact path.
        app: everything else; its routes' paths are the labels of the response counter.
        dialect: called with each exchange first, to set the shape of its errors.
        is_loopback: only names of this machine are accepted in Host, against DNS rebinding.
    """

    def __init__(
        self,
        handlers: Mapping[str, Handler],
        app: ASGIApp,
        recorder: Recorder,
        *,
        is_loopback: bool,
        known_paths: frozenset[str] = frozenset(),
        dialect: Callable[[Exchange], None] = lambda _: None,
    ) -> None:
        self._dialect = dialect
        self._handlers = dict(handlers)
        self._app = app
        self._recorder = recorder
        self._is_loopback = is_loopback
        self._known_paths = known_paths | frozenset(handlers)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answers one request."""
        assert scope["type"] == "http", "the listener speaks HTTP only"
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        text = given.decode("latin-1")
        exchange = Exchange(scope, receive, send, text if is_sane_id(text) else new_request_id())
        self._dialect(exchange)
        try:
            check_repeated(exchange)
            name = self._check_host(exchange)
            is_page_welcome = _welcome_page(exchange, name)
            if exchange.method == "OPTIONS" and exchange.header(b"access-control-request-method") is not None:
                # A browser that is told nothing asks no further: the answer to a question is no error.
                await exchange.answer(200, b"", _PREFLIGHT if is_page_welcome else ())
                return
            if not is_page_welcome:
                raise PermissionDenied("pages of this origin may not call this server", code="origin_not_allowed")
            scope["headrace.request_id"] = exchange.request_id
            handler = self._handlers.get(exchange.path)
            if handler is None:
                await self._app(scope, receive, _with_request_id(exchange, send))
            elif exchange.method != "POST":
                error = MethodNotAllowed(f"{exchange.method} is not allowed here: use POST")
                await exchange.answer_error(error, [(b"allow", b"POST")])
            else:
                await handler(exchange)
        except HeadraceError as error:
            if not exchange.has_begun:
                await exchange.answer_error(error)
        except ClientGoneError:
            pass
        except asyncio.CancelledError:
            raise
        except Exception as bug:  # noqa: BLE001  # the request handler's edge: a bug costs one request
            _log.error("endpoint_error", request_id=exchange.request_id, exc_info=bug)
            if not exchange.has_begun:
                await exchange.answer_error(HeadraceError("the server failed this request; see its request id"))
        finally:
            route = exchange.path if exchange.path in self._known_paths else _OTHER_ROUTE
            status = CLIENT_CLOSED if exchange.is_gone else exchange.status or CLIENT_CLOSED
            self._recorder.count("headrace_http_responses_total", route=route, status=str(status))

    def _check_host(self, exchange: Exchange) -> str:
        """Gives the server's name as the client wrote it, empty where it may leave it out.

        Raises:
            RequestError: the Host header is missing or malformed.
            PermissionDenied: another host.
        """
        raw = exchange.header(b"host")
        if raw is None:
            if exchange.scope.get("http_version") == "1.0":
                return ""
            raise RequestError("the Host header is missing", code="bad_request")
        host = _HOST.match(raw.decode("latin-1"))
        if host is None:
            raise RequestError("the Host header is malformed", code="bad_request")
        name = host.group(1).lower()
        if self._is_loopback and name not in _LOOPBACK:
            raise PermissionDenied(
                "this server listens on loopback and answers to localhost, 127.0.0.1 and [::1] only",
                code="host_not_allowed",
            )
        return name


def _welcome_page(exchange: Exchange, name: str) -> bool:
    """Tells whether a browser's page may call this server, and notes so for the browser; no page is welcome too.

    Args:
        name: the server's name in the request.
    """
    origin = exchange.header(b"origin")
    if origin is None:
        return True
    exchange.standing.append((b"vary", b"origin"))
    match = _ORIGIN.match(origin.decode("latin-1"))
    authority = _HOST.match(match.group(1)) if match else None
    if authority is None or authority.group(1).lower() not in (*_LOOPBACK, name):
        return False
    exchange.standing.append((b"access-control-allow-origin", origin))
    exchange.standing.append((b"access-control-expose-headers", b"*"))
    return True


def _with_request_id(exchange: Exchange, send: Any) -> Any:
    """Gives a ``send`` for other applications that notes the status and adds the headers of every answer."""

    async def sending(message: Any) -> None:
        if message["type"] == "http.response.start":
            exchange.status = message["status"]
            names = {name for name, _ in message["headers"]}
            message["headers"] = [
                *message["headers"],
                (b"x-request-id", exchange.request_id.encode()),
                *([] if b"cache-control" in names else [(b"cache-control", b"no-store")]),
                *exchange.standing,
            ]
        await send(message)

    return sending
