"""One client connection: uvicorn's HTTP/1.1 protocol with our limits around it.

Added here: a time limit for headers, limits on their size and number, JSON bodies for what the parser refuses, a cut
for readers that stall, a cap on open connections, and a call-back the moment that a client is gone. Flow control: the
transport holds at most 64 KiB unsent; a writer beyond that waits.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from headrace.base.clock import Clock
from headrace.base.errors import HeadraceError, OverloadedError, RequestError, RequestTimeout
from headrace.base.ids import new_request_id
from headrace.protocol.answers import error_body

MAX_HEADER_BYTES: Final = 16 * 2**10
MAX_HEADER_FIELDS: Final = 64
UNSENT_BYTES: Final = 64 * 2**10
SLOW_CLIENT: Final = "slow_client"
SCOPE_KEY: Final = "headrace.connection"
_CONTINUE: Final = b"HTTP/1.1 100 "
_NAME_START: Final = re.compile(rb"(?<=\n)[a-z0-9-]+(?=:)")
_CHUNKED: Final = b"transfer-encoding: chunked\r\n"
_ABSOLUTE: Final = re.compile(rb"https?://(?P<host>[^/?#@]+)(?P<path>(?:[/?].*)?)", re.IGNORECASE)


@dataclass(slots=True)
class ConnectionLimits:
    """What all connections of a listener share."""

    clock: Clock
    stalled_reader_timeout_s: float = 60.0
    max_connections: int = 2048
    header_timeout_s: float = 10.0
    is_draining: bool = False
    open_connections: set[Connection] = field(default_factory=set)


class Connection(HttpToolsProtocol):
    """A client connection; ``bind`` makes the class that a listener's connections are of."""

    limits: ConnectionLimits

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.cut_reason: str | None = None
        self.paused_at_s: float | None = None
        self._on_gone: Callable[[], None] | None = None
        self._is_reading_headers = True
        self._header_bytes = 0
        self._header_timer: asyncio.TimerHandle | None = None
        self._fault: HeadraceError | None = None

    def watch(self, on_gone: Callable[[], None] | None) -> None:
        """Sets what is called when the client goes away before its answer is whole; None takes it back."""
        self._on_gone = on_gone

    def cut(self, reason: str) -> None:
        """Drops the connection at once, unsent bytes too."""
        self.cut_reason = reason
        self.transport.abort()

    def close_after_answer(self) -> None:
        """Closes the connection when the present answer is complete."""
        if self.cycle is not None:
            self.cycle.keep_alive = False

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Takes a new connection, or refuses it when too many are open."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=UNSENT_BYTES)
        self.limits.open_connections.add(self)
        if len(self.limits.open_connections) > self.limits.max_connections:
            limit = self.limits.max_connections
            self._refuse(OverloadedError(f"{limit} connections are open, the limit", code="too_many_connections"))
            return
        self._start_header_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tells whoever watches that the client is gone."""
        self.limits.open_connections.discard(self)
        self._stop_header_timer()
        super().connection_lost(exc)
        on_gone = self._on_gone
        self._on_gone = None
        if on_gone is not None:
            on_gone()

    def data_received(self, data: bytes) -> None:
        """Feeds the parser, and bounds what it holds back."""
        if self.transport.is_closing():
            return
        if self._is_reading_headers:
            self._header_bytes += len(data)
        super().data_received(data)
        # The parser hands over whole fields only, so an endless one is seen here.
        if self._is_reading_headers and self._header_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
            self._refuse(_headers_too_large())

    def pause_writing(self) -> None:
        """Notes since when the client does not read."""
        self.paused_at_s = self.limits.clock.now_s()
        super().pause_writing()

    def resume_writing(self) -> None:
        """Forgets that the client did not read."""
        self.paused_at_s = None
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        """Ends an idle connection."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()  # it did not even read its last answer
        else:
            super().timeout_keep_alive_handler()

    def cut_if_stalled(self, now_s: float) -> bool:
        """Cuts the connection when it has not been writable for too long."""
        if self.paused_at_s is None or now_s - self.paused_at_s < self.limits.stalled_reader_timeout_s:
            return False
        self.cut(SLOW_CLIENT)
        return True

    # httptools call-backs

    def on_message_begin(self) -> None:
        """Starts a request."""
        super().on_message_begin()
        self.scope[SCOPE_KEY] = self  # type: ignore[typeddict-unknown-key]  # our own ASGI extension
        if not self._is_reading_headers:
            self._is_reading_headers = True
            self._header_bytes = 0
            self._start_header_timer()

    def on_url(self, url: bytes) -> None:
        """Bounds the request line."""
        super().on_url(url)
        if len(self.url) > MAX_HEADER_BYTES:
            self._raise(_headers_too_large())

    def on_header(self, name: bytes, value: bytes) -> None:
        """Bounds the number of fields."""
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADER_FIELDS:
            self._raise(
                RequestError(f"the request has more than {MAX_HEADER_FIELDS} headers, the limit", code="bad_request")
            )

    def on_headers_complete(self) -> None:
        """Bounds the head as a whole, then starts the application."""
        self._is_reading_headers = False
        self._stop_header_timer()
        if sum(len(name) + len(value) for name, value in self.headers) > MAX_HEADER_BYTES:
            self._raise(_headers_too_large())
        self._take_target()
        super().on_headers_complete()
        if self.cycle is not None:
            self.cycle.transport = _HeadCase(self.cycle)  # type: ignore[assignment]  # it has what a cycle uses
        if self.limits.is_draining:
            self.close_after_answer()

    # uvicorn's answers for what never reaches the application

    def send_400_response(self, msg: str) -> None:
        """Answers what the parser refuses (uvicorn calls this)."""
        self._refuse(self._fault or RequestError("this is no valid HTTP/1.1 request", code="bad_request"))

    def _unsupported_upgrade_warning(self) -> None:
        """Answers an upgrade as the plain request that it also is, without a word in the log."""

    def _take_target(self) -> None:
        """Makes a path of the request's target; of ``http://host/path`` the host counts, not the header (RFC 9112)."""
        whole = _ABSOLUTE.fullmatch(self.url)
        if whole is not None:
            self.headers[:] = [(name, whole["host"] if name == b"host" else value) for name, value in self.headers]
            self.url = whole["path"] if whole["path"].startswith(b"/") else b"/" + whole["path"]
        elif not self.url.startswith(b"/") and self.url != b"*":
            self._raise(RequestError("the request target must be a path", code="bad_request"))

    def _raise(self, fault: HeadraceError) -> None:
        self._fault = fault
        raise fault

    def _refuse(self, error: HeadraceError) -> None:
        """Writes an error answer and closes; a request that has its answer, or a part of it, gets no second one."""
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.close()
            return
        request_id = new_request_id()
        body = error_body(error, request_id)
        head = (
            b"Content-Type: application/json\r\nCache-Control: no-store\r\nConnection: close\r\n"
            b"X-Request-Id: %b\r\nContent-Length: %d\r\n\r\n" % (request_id.encode(), len(body))
        )
        self.transport.write(STATUS_LINE[error.http_status] + head + body)
        self.transport.close()

    def _start_header_timer(self) -> None:
        self._stop_header_timer()
        self._header_timer = self.loop.call_later(self.limits.header_timeout_s, self._on_header_timeout)

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _on_header_timeout(self) -> None:
        if self._is_reading_headers and not self.transport.is_closing():
            if self._header_bytes:
                self._refuse(RequestTimeout(f"the headers did not arrive within {self.limits.header_timeout_s:g} s"))
            else:
                self.transport.close()  # it never said anything


class _HeadCase:
    """The transport of a cycle until its head is out, which uvicorn writes whole and in lower case.

    Names leave as ``Content-Type``: there are clients that look them up in a plain dictionary.
    """

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._transport = cycle.transport

    def write(self, data: bytes) -> None:
        """Sends the head; what follows goes to the transport itself."""
        if not data.startswith(_CONTINUE):
            self._cycle.transport = self._transport
            if _CHUNKED in data and self._cycle.scope["http_version"] == "1.0":
                data = data.replace(_CHUNKED, b"")
                self._cycle.transport = _Unchunked(self._transport)  # type: ignore[assignment]  # as above
        self._transport.write(_NAME_START.sub(lambda name: name[0].title(), data))

    def is_closing(self) -> bool:
        """Whether the connection is closed or about to be."""
        return self._transport.is_closing()

    def close(self) -> None:
        """Closes the connection."""
        self._transport.close()


class _Unchunked:
    """The transport of a body that goes to an HTTP/1.0 client, as many proxies are: it ends with the connection.

    Such a client knows no chunks, and uvicorn writes them to all. One write of a cycle is at most one chunk, and the
    empty one that ends the body after it.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def write(self, data: bytes) -> None:
        """Sends a chunk's own bytes."""
        size, _, rest = data.partition(b"\r\n")
        if size:
            self._transport.write(rest[: int(size, 16)])

    def is_closing(self) -> bool:
        """Whether the connection is closed or about to be."""
        return self._transport.is_closing()

    def close(self) -> None:
        """Closes the connection."""
        self._transport.close()


def bind(limits: ConnectionLimits) -> type[Connection]:
    """Makes the connection class of one listener (uvicorn wants a class, not a factory)."""
    return type("BoundConnection", (Connection,), {"limits": limits})


def _headers_too_large() -> RequestError:
    return RequestError(f"the headers are over {MAX_HEADER_BYTES} bytes, the limit", code="bad_request")
