"""The mock server: HTTP/1.1 on httptools, without tasks; a timer writes each chunk at its moment.

It is no ASGI application, because it must do what ASGI forbids: reset a connection inside a chunk, send a malformed
frame, stand still, and know when each byte was handed to the operating system. The schedule is absolute, from the
request's arrival, so lateness never adds up.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from typing import Final, cast

import httptools

from headrace.base.errors import AddressInUseError
from headrace.bench.mock.answer import MAX_BODY_BYTES, Answer
from headrace.bench.mock.answers import error_body
from headrace.bench.mock.script import Script
from headrace.bench.mock.truth import Truth, TruthLog
from headrace.bench.timer import Timer

_REASONS: Final = {200: b"OK", 400: b"Bad Request", 404: b"Not Found", 405: b"Method Not Allowed", 413: b"Too Large"}


class MockServer:
    """A server that does what its script says.

    Args:
        truth: gets one record per request; None keeps none.
        crash: ends the process; tests give another.
    """

    def __init__(
        self, script: Script, *, truth: TruthLog | None = None, crash: Callable[[int], None] = os._exit
    ) -> None:
        self.script = script
        self.truth = truth
        self.timer: Timer
        self.num_requests = 0
        self.created = int(time.time())
        self._crash = crash
        self._started_s = 0.0
        self._server: asyncio.Server | None = None
        self._connections: set[Connection] = set()
        self._num_working = 0
        self._line: deque[Answer] = deque()
        self._leaked: list[bytes] = []

    async def start(self, host: str, port: int) -> int:
        """Listens; gives the port.

        Raises:
            AddressInUseError: something else listens there.
        """
        loop = asyncio.get_running_loop()
        self.timer = Timer(loop)
        self._started_s = time.monotonic()
        try:
            self._server = await loop.create_server(lambda: Connection(self), host, port, backlog=4096)
        except OSError as error:
            self.timer.close()
            raise AddressInUseError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    async def stop(self) -> None:
        """Ends at once; running answers are cut."""
        assert self._server is not None, "it was started"
        self._server.close()
        for connection in list(self._connections):
            connection.transport.abort()
        self.timer.close()
        if self.truth is not None:
            self.truth.close()

    def wall_at(self, start_s: float, work_s: float) -> float:
        """Gives when work is done that starts at ``start_s``; the server's stalls lie between."""
        stall = self.script.stall
        if stall is None:
            return start_s + work_s
        return self._started_s + stall.wall_at(start_s - self._started_s, work_s)

    def add(self, connection: Connection) -> None:
        """Notes a connection."""
        self._connections.add(connection)

    def remove(self, connection: Connection) -> None:
        """Forgets a connection."""
        self._connections.discard(connection)

    def take(self, answer: Answer) -> None:
        """Begins an answer, or puts it in line where all slots are taken."""
        slots = self.script.slots
        if slots is not None and self._num_working >= slots:
            self._line.append(answer)
            return
        self._num_working += 1
        answer.begin(answer.truth.arrival_s)

    def finish(self, answer: Answer, has_begun: bool) -> None:
        """Notes an answer's end and lets the next in line begin."""
        if self.truth is not None:
            self.truth.add(answer.truth)
        if not has_begun:
            self._line.remove(answer)
            return
        self._num_working -= 1
        if self._line:
            self._num_working += 1
            self._line.popleft().begin(time.monotonic())

    def leak(self) -> None:
        """Keeps the memory that the script wants each request to leave behind."""
        if self.script.leak_kib:
            self._leaked.append(b"\x01" * int(1024 * self.script.leak_kib))

    def crash(self) -> None:
        """Ends the process without a word."""
        if self.truth is not None:
            self.truth.flush()
        self._crash(70)


class Connection(asyncio.Protocol):
    """One client's connection; its requests are answered one after another."""

    transport: asyncio.Transport

    def __init__(self, server: MockServer) -> None:
        self._server = server
        self._parser = httptools.HttpRequestParser(self)
        self._read_at_s = 0.0
        self._answer: Answer | None = None
        self._waiting: deque[Callable[[], None]] = deque()
        self._path = b""
        self._request_id = ""
        self._body: list[bytes] = []
        self._body_bytes = 0
        self.is_keep_alive = True
        self.is_paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has come."""
        self.transport = cast("asyncio.Transport", transport)  # the server listens on TCP
        self._server.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone, or we closed."""
        self._server.remove(self)
        if self._answer is not None:
            self._answer.end("left")

    def data_received(self, data: bytes) -> None:
        """Bytes have come."""
        self._read_at_s = time.monotonic()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.send(400, error_body(400, f"this is no HTTP: {error}"))
            self.transport.close()

    def pause_writing(self) -> None:
        """The client reads too slowly."""
        self.is_paused = True

    def resume_writing(self) -> None:
        """The client has caught up."""
        self.is_paused = False
        if self._answer is not None:
            self._answer.resume()

    def on_message_begin(self) -> None:
        """A request begins."""
        self._path, self._request_id, self._body, self._body_bytes = b"", "", [], 0

    def on_url(self, url: bytes) -> None:
        """A part of the path has come."""
        self._path += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header has come."""
        lower = name.lower()
        if lower == b"x-request-id":
            self._request_id = value.decode("latin-1")
        elif lower == b"expect":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        """A part of the body has come."""
        self._body_bytes += len(body)
        if self._body_bytes <= MAX_BODY_BYTES:
            self._body.append(body)

    def on_message_complete(self) -> None:
        """The request is whole: answer it, or put it behind the one that is being answered."""
        path = self._path.split(b"?")[0].decode("latin-1")
        truth = Truth(self._server.num_requests, self._request_id, path, self._read_at_s)
        self._server.num_requests += 1
        method, body = self._parser.get_method(), b"".join(self._body)
        is_keep_alive, num_bytes = self._parser.should_keep_alive(), self._body_bytes

        def begin() -> None:
            self.is_keep_alive = is_keep_alive
            self._answer = Answer(self._server, self, truth, method, body, num_bytes)
            self._answer.route()

        if self._answer is None:
            begin()
        else:
            self._waiting.append(begin)

    def answered(self) -> None:
        """The answer is whole: the next request, or the end."""
        self._answer = None
        if not self.is_keep_alive:
            self.transport.close()
        elif self._waiting:
            self._waiting.popleft()()

    def send(self, status: int, body: bytes, headers: bytes = b"") -> None:
        """Sends a whole answer in one write."""
        self.transport.write(
            b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n%s\r\n"
            % (status, _REASONS.get(status, b"Error"), len(body), headers)
            + body
        )

    def reset(self) -> None:
        """Ends the connection with RST, dropping what was not sent yet."""
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()
