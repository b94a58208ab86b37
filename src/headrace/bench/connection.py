"""Connections to the server under test: HTTP/1.1 on httptools, kept alive, the time read first of all.

Reading a socket only notes bytes and time. They are parsed when every socket that was ready has been read, so a
chunk's time does not hold the parsing of those before it.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, cast
from urllib.parse import urlsplit

import httptools

from headrace.base.errors import ConfigError
from headrace.bench.flight import Flight

_TLS_PORT: Final = 443
_PLAIN_PORT: Final = 80
_BUFFER_BYTES: Final = 256 * 2**10


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go.

    Args:
        prefix: path before ``/v1``; usually empty.
    """

    host: str
    port: int
    is_tls: bool
    prefix: str

    @property
    def authority(self) -> str:
        """Host and port as the ``host`` header says them."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (_TLS_PORT if self.is_tls else _PLAIN_PORT) else f"{host}:{self.port}"


def parse_target(url: str) -> Target:
    """Reads a server's URL, with or without ``/v1`` at its end.

    Raises:
        ConfigError: it is none.
    """
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"--server-url is {url!r}: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query or parts.fragment:
        raise ConfigError(f"--server-url is {url!r}; write for example http://127.0.0.1:8000")
    is_tls = parts.scheme == "https"
    prefix = parts.path.rstrip("/").removesuffix("/v1")
    return Target(parts.hostname, port or (_TLS_PORT if is_tls else _PLAIN_PORT), is_tls, prefix)


class Pool:
    """The connections of one process.

    Args:
        landed: is told each flight that has ended, well or not.
        connect_timeout_s: until a connection must stand.
    """

    def __init__(self, target: Target, landed: Callable[[Flight], None], *, connect_timeout_s: float) -> None:
        self._target = target
        self._landed = landed
        self._connect_timeout_s = connect_timeout_s
        self._ssl = ssl.create_default_context() if target.is_tls else None
        self._idle: deque[_Connection] = deque()
        self._connecting: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._inbox: list[tuple[_Connection, bytes, float]] = []
        self._flights: dict[Flight, _Connection | None] = {}
        # The loop's own way would allocate 256 KiB for every chunk of a stream.
        self.buffer = memoryview(bytearray(_BUFFER_BYTES))

    @property
    def num_flights(self) -> int:
        """Requests that are not answered yet."""
        return len(self._flights)

    async def open(self, count: int) -> None:
        """Opens connections ahead, so that the first requests do not pay for them; failures are met later."""
        made = await asyncio.gather(*(self._connect() for _ in range(count)), return_exceptions=True)
        self._idle.extend(connection for connection in made if isinstance(connection, _Connection))

    def send(self, flight: Flight) -> None:
        """Sends a request on an idle connection, else on a new one."""
        while self._idle:
            connection = self._idle.pop()  # the one used last: the others may time out in peace
            if connection.is_open:
                self._flights[flight] = connection
                flight.is_fresh = not connection.has_served
                connection.send(flight)
                return
        self._flights[flight] = None
        self._connect_for(flight)

    def fail_older(self, sent_before_s: float, now_s: float) -> None:
        """Fails as ``timeout`` what was scheduled or sent before a moment. Cost: O(those)."""
        for flight in list(self._flights):
            if (flight.sent_s or flight.scheduled_s) >= sent_before_s:
                break  # they stand in the order of sending
            self.stop(flight, "timeout", now_s)

    def stop_all(self, now_s: float) -> None:
        """Fails all that is under way as ``cut``."""
        for flight in list(self._flights):
            self.stop(flight, "cut", now_s)

    def stop(self, flight: Flight, kind: str, now_s: float) -> None:
        """Fails one request that is under way and closes its connection."""
        connection = self._flights[flight]
        if connection is not None:
            connection.drop()
        flight.fail("cut" if kind == "cut" else "timeout", f"no whole answer after {now_s - flight.scheduled_s:.3f} s")
        self._land(flight, now_s)

    async def close(self) -> None:
        """Closes what is left."""
        for task in list(self._connecting):
            task.cancel()
        while self._idle:
            self._idle.pop().drop()
        await asyncio.sleep(0)

    def arrived(self, connection: _Connection, num_bytes: int) -> None:
        """Notes bytes and their time."""
        at_s = time.monotonic()
        if not self._inbox:
            self._loop.call_soon(self.parse)
        self._inbox.append((connection, bytes(self.buffer[:num_bytes]), at_s))

    def parse(self) -> None:
        """Goes through what has arrived."""
        inbox, self._inbox = self._inbox, []
        for connection, data, at_s in inbox:
            connection.parse(data, at_s)

    def finished(self, connection: _Connection, flight: Flight, at_s: float, *, is_kept: bool) -> None:
        """An answer is whole."""
        flight.finish(at_s)
        if is_kept:
            self._idle.append(connection)
        else:
            connection.drop()
        self._land(flight, at_s)

    def lost(self, connection: _Connection, flight: Flight | None, error: str, now_s: float) -> None:
        """A connection has ended, perhaps under a request."""
        if flight is None:
            if connection in self._idle:
                self._idle.remove(connection)
            return
        if not flight.is_fresh and flight.status is None and not flight.is_retried:
            flight.is_retried = True  # the server had closed it while it was idle: not this request's fault
            self._connect_for(flight)
            return
        flight.fail("reset", error)
        self._land(flight, now_s)

    def broken(self, flight: Flight, error: str, now_s: float) -> None:
        """What came is no HTTP."""
        flight.fail("malformed", error)
        self._land(flight, now_s)

    def _land(self, flight: Flight, at_s: float) -> None:
        if self._flights.pop(flight, flight) is flight:
            return  # it had landed
        flight.ended_s = at_s
        self._landed(flight)

    def _connect_for(self, flight: Flight) -> None:
        task = self._loop.create_task(self._connect_and_send(flight))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect_and_send(self, flight: Flight) -> None:
        try:
            connection = await self._connect()
        except (OSError, TimeoutError) as error:
            if flight in self._flights:
                said = str(error) or f"no connection within {self._connect_timeout_s:g} s"
                flight.fail("connect", said)
                self._land(flight, time.monotonic())
            return
        if flight not in self._flights:  # it timed out meanwhile
            self._idle.append(connection)
            return
        self._flights[flight] = connection
        flight.is_fresh = True
        connection.send(flight)

    async def _connect(self) -> _Connection:
        target = self._target
        async with asyncio.timeout(self._connect_timeout_s):
            _, protocol = await self._loop.create_connection(
                lambda: _Connection(self),
                target.host,
                target.port,
                ssl=self._ssl,
                server_hostname=target.host if target.is_tls else None,
            )
        return protocol


class _Connection(asyncio.BufferedProtocol):
    """One connection; one request at a time."""

    _transport: asyncio.Transport

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._parser = httptools.HttpResponseParser(self)
        self._flight: Flight | None = None
        self._at_s = 0.0
        self._is_event_stream = False
        self._has_length = False
        self.has_served = False
        self.is_open = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It stands."""
        self._transport = cast("asyncio.Transport", transport)
        self.is_open = True

    def connection_lost(self, exc: Exception | None) -> None:
        """It has ended."""
        self._pool.parse()
        self.is_open = False
        flight, self._flight = self._flight, None
        if flight is not None and flight.status is not None and exc is None and not self._has_length:
            # Without a length the body ends with the connection.
            self._pool.finished(self, flight, self._at_s, is_kept=False)
            return
        said = str(exc) if exc is not None else "the server closed the connection within the answer"
        self._pool.lost(self, flight, said, time.monotonic())

    def get_buffer(self, sizehint: int) -> memoryview:
        """Gives where to read to: one buffer for all, as each reading is copied out at once."""
        return self._pool.buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Bytes have come."""
        self._pool.arrived(self, nbytes)

    def send(self, flight: Flight) -> None:
        """Sends a request; the connection is idle."""
        self._flight = flight
        flight.sent_s = time.monotonic()
        self._transport.write(flight.wire)

    def drop(self) -> None:
        """Ends the connection; its request, if any, has been failed by the pool."""
        self._flight = None
        self.is_open = False
        self._transport.abort()

    def parse(self, data: bytes, at_s: float) -> None:
        """Goes through bytes that came at ``at_s``."""
        if self._flight is None:
            if self.is_open:
                self.drop()  # nothing was asked
            return
        self._at_s = at_s
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            flight = self._flight
            if flight is not None:
                self.drop()
                self._pool.broken(flight, str(error), at_s)

    def on_message_begin(self) -> None:
        """An answer begins."""
        self._is_event_stream = False
        self._has_length = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header has come."""
        lower = name.lower()
        if lower == b"content-type":
            self._is_event_stream = value.startswith(b"text/event-stream")
        elif lower in (b"content-length", b"transfer-encoding"):
            self._has_length = True

    def on_headers_complete(self) -> None:
        """The head is whole."""
        status = self._parser.get_status_code()
        if self._flight is not None and status >= 200:
            self._flight.begin(status, is_event_stream=self._is_event_stream)

    def on_body(self, body: bytes) -> None:
        """A part of the body has come."""
        if self._flight is not None:
            self._flight.take(body, self._at_s)

    def on_message_complete(self) -> None:
        """The answer is whole."""
        flight = self._flight
        if flight is None or flight.status is None:
            return  # 100 Continue
        self._flight = None
        self.has_served = True
        is_kept = self._parser.should_keep_alive()
        self._parser = httptools.HttpResponseParser(self)
        self._pool.finished(self, flight, self._at_s, is_kept=is_kept)
