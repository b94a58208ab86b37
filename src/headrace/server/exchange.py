"""One HTTP exchange: a request's headers and body coming in, one answer going out.

Everything that answers goes through here, so ``x-request-id`` and ``cache-control`` are on every answer and the status
is known to whoever counts.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable
from typing import Any, Final

from headrace.base.errors import HeadraceError, PayloadTooLarge, RequestError, RequestTimeout, UnsupportedMedia
from headrace.protocol import sse
from headrace.protocol.answers import error_body
from headrace.server.connection import SCOPE_KEY, Connection

Headers = Iterable[tuple[bytes, bytes]]

BODY_IDLE_S: Final = 10.0
# A body that trickles in may take this many times the idle limit as a whole.
_BODY_TOTAL_RATIO: Final = 6.0
# After a refused body the rest is read and thrown away for a moment: closing with unread bytes would send a reset,
# and the client would lose the answer.
_LINGER_S: Final = 1.0
_LINGER_BYTES: Final = 16 * 2**20
CLIENT_CLOSED: Final = 499


class ClientGoneError(Exception):
    """The client closed the connection before its request was whole."""


class Exchange:
    """One request and its answer.

    Args:
        scope, receive, send: ASGI's.
        request_id: for ``x-request-id``.
    """

    def __init__(self, scope: Any, receive: Any, send: Any, request_id: str) -> None:
        self.scope = scope
        self.request_id = request_id
        self.path: str = scope["path"]
        self.method: str = scope["method"]
        self.status: int | None = None
        self.is_gone = False
        self.is_complete = False
        self.error_body: Callable[[HeadraceError, str], bytes] = error_body
        self.error_frame: Callable[[HeadraceError, str], bytes] = _error_frame
        self._receive = receive
        self._send = send
        self.standing: list[tuple[bytes, bytes]] = []  # headers of whatever is answered
        self._body: bytes | None = None
        self._headers: dict[bytes, bytes] = {}
        self.repeated: set[bytes] = set()
        for name, value in scope["headers"]:
            if name in self._headers:
                self.repeated.add(name)
            else:
                self._headers[name] = value

    @property
    def has_begun(self) -> bool:
        """Whether the status line is on its way."""
        return self.status is not None

    @property
    def connection(self) -> Connection | None:
        """The connection, where our own listener serves it."""
        connection: Connection | None = self.scope.get(SCOPE_KEY)
        return connection

    def header(self, name: bytes) -> bytes | None:
        """Gives the first header of that lower-case name."""
        return self._headers.get(name)

    def on_gone(self, call: Callable[[], None] | None) -> None:
        """Sets what is called when the client goes away from now on."""
        connection = self.connection
        if connection is None:
            return
        if call is None:
            connection.watch(None)
        else:

            def gone() -> None:
                self.is_gone = True
                call()

            connection.watch(gone)

    async def read_body(self, max_bytes: int, idle_s: float = BODY_IDLE_S) -> bytes:
        """Reads the whole body; again gives what was read.

        Raises:
            PayloadTooLarge: more than ``max_bytes``; told from the length header before anything is read.
            RequestTimeout: no byte for ``idle_s``, or not whole after six times that.
            UnsupportedMedia: not JSON, or coded: compressed, for example.
            ClientGoneError: the connection closed.
        """
        if self._body is not None:
            if len(self._body) > max_bytes:
                raise _too_large(max_bytes)
            return self._body
        self._check_media()
        length = self.header(b"content-length")
        if length is not None and int(length) > max_bytes:
            raise _too_large(max_bytes)
        loop = asyncio.get_running_loop()
        total_s = idle_s * _BODY_TOTAL_RATIO
        until_s = loop.time() + total_s
        parts: list[bytes] = []
        size = 0
        while True:
            wait_s = min(idle_s, until_s - loop.time())
            try:
                async with asyncio.timeout(wait_s):
                    message = await self._receive()
            except TimeoutError:
                raise RequestTimeout(
                    f"the body did not arrive: no byte for {idle_s:g} s, or not whole after {total_s:g} s"
                ) from None
            if message["type"] == "http.disconnect":
                self.is_gone = True
                raise ClientGoneError
            part = message.get("body", b"")
            size += len(part)
            if size > max_bytes:
                raise _too_large(max_bytes)
            parts.append(part)
            if not message.get("more_body", False):
                self._body = parts[0] if len(parts) == 1 else b"".join(parts)
                return self._body

    async def answer(
        self, status: int, body: bytes, headers: Headers = (), *, media: bytes = b"application/json"
    ) -> None:
        """Sends a whole answer."""
        await self._begin(
            status,
            [
                (b"content-type", media),
                (b"content-length", b"%d" % len(body)),
                (b"cache-control", b"no-store"),
                *headers,
            ],
        )
        self.is_complete = True
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def answer_error(self, error: HeadraceError, headers: Headers = ()) -> None:
        """Sends an error as the whole answer, and closes the connection where the request was not read to its end."""
        body = self.error_body(error, self.request_id)
        out = [*headers, *error_headers(error)]
        status = error.http_status
        must_close = status in (408, 413) or (self.method == "POST" and self._body is None)
        if not must_close:
            await self.answer(status, body, out)
            return
        out.append((b"connection", b"close"))
        await self._begin(
            status,
            [
                (b"content-type", b"application/json"),
                (b"content-length", b"%d" % len(body)),
                (b"cache-control", b"no-store"),
                *out,
            ],
        )
        await self._send({"type": "http.response.body", "body": body, "more_body": True})
        if status != 408:
            await self._linger()
        self.is_complete = True
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def begin_stream(self, headers: Headers = ()) -> None:
        """Sends the head of an event stream."""
        await self._begin(200, [*sse.HEADERS, *headers])

    async def write(self, data: bytes) -> None:
        """Sends a part of the stream; waits while the client has more than the transport's limit to read."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end_stream(self, data: bytes) -> None:
        """Sends the last part of the stream."""
        self.is_complete = True
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def fail_stream(self, error: HeadraceError) -> None:
        """Ends a begun stream with an error frame, and closes the connection."""
        if self.connection is not None:
            self.connection.close_after_answer()
        await self.end_stream(self.error_frame(error, self.request_id))

    async def _begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        assert self.status is None, "an answer begins once"
        self.status = status
        headers += ((b"x-request-id", self.request_id.encode()), *self.standing)
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    def _check_media(self) -> None:
        for name, harmless in ((b"content-encoding", b"identity"), (b"transfer-encoding", b"chunked")):
            for coding in self._listed(name) if name in self._headers else ():
                if coding != harmless:
                    raise UnsupportedMedia(
                        f"{name.decode()} {coding.decode('latin-1')[:64]!r} is not accepted: send the JSON as it is",
                        code="unsupported_encoding",
                    )
        media = (self.header(b"content-type") or b"").partition(b";")[0].strip().lower()
        if media != b"application/json":
            raise UnsupportedMedia("content-type must be application/json")

    def _listed(self, name: bytes) -> list[bytes]:
        """Gives the words of a header that is a list, in lower case; it may stand there several times."""
        values = b",".join(value for header, value in self.scope["headers"] if header == name)
        return [word for part in values.lower().split(b",") if (word := part.strip())]

    async def _linger(self) -> None:
        size = 0
        try:
            async with asyncio.timeout(_LINGER_S):
                while size < _LINGER_BYTES:
                    message = await self._receive()
                    if message["type"] == "http.disconnect" or not message.get("more_body", False):
                        return
                    size += len(message.get("body", b""))
        except TimeoutError:
            return


def error_headers(error: HeadraceError) -> list[tuple[bytes, bytes]]:
    """Gives the headers that tell a client whether and when to come back."""
    headers: list[tuple[bytes, bytes]] = []
    if error.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(error.retry_after_s))))
        headers.append((b"retry-after-ms", b"%d" % math.ceil(error.retry_after_s * 1000)))
    if error.is_retryable:
        headers.append((b"x-should-retry", b"true"))
    elif error.http_status >= 500 or error.http_status in (408, 422):
        headers.append((b"x-should-retry", b"false"))
    return headers


def _error_frame(error: HeadraceError, request_id: str) -> bytes:
    return sse.data(error_body(error, request_id))


def _too_large(max_bytes: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"the body is over {max_bytes} bytes, the limit: send less")


def check_repeated(exchange: Exchange) -> None:
    """Refuses headers that must not be there twice, because two readers may each take another one.

    Raises:
        RequestError: ``bad_request``.
    """
    for name in (b"host", b"content-length", b"authorization", b"content-type", b"transfer-encoding"):
        if name in exchange.repeated:
            raise RequestError(f"the header {name.decode()} stands twice", code="bad_request")
