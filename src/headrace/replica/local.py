"""Our own worker as a replica: many requests over one Unix socket, reconnected for ever.

Data flow: ``generate`` writes Submit frames; the link's read callback sorts Step events into the ``EventStream`` of
their request. When the link breaks, every running request fails at once with WorkerLostError and the link is tried
again (the supervisor keeps the listening socket open, so a connection may wait in the backlog until the next worker
accepts it).
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, cast

from headrace.base.clock import Clock
from headrace.base.errors import HeadraceError, ProtocolError, WorkerLostError
from headrace.base.log import get_log
from headrace.protocol.frames import (
    LINK_VERSION,
    Abort,
    Encode,
    FrameReader,
    FromWorker,
    Hello,
    Status,
    Step,
    Submit,
    Welcome,
    WorkerState,
    encode_frame,
)
from headrace.replica.events import EventStream
from headrace.replica.port import Readiness

# Not ready after this long without a word, or without a step while work waits; longer only when the worker itself
# predicts steps that long. Half a second less than the five of DESIGN §3: the last word may be that young at a stop.
SILENCE_LIMIT_S: Final = 4.5
STEPS_IN_SILENCE: Final = 5.0
RECONNECT_FIRST_S: Final = 0.02
RECONNECT_MAX_S: Final = 1.0

_CREDENTIALS: Final = struct.Struct("3i")  # struct ucred: pid, uid, gid

_log = get_log(__name__)


class LocalReplica:
    """A worker on this machine.

    Args:
        socket_path: Unix socket of the worker link.
        clock: tells silence from work.
        on_lost: called once for every link that broke after it stood, before its requests fail.
    """

    def __init__(self, socket_path: Path | str, *, clock: Clock, on_lost: Callable[[], None] = lambda: None) -> None:
        self._socket_path = str(socket_path)
        self._clock = clock
        self._on_lost = on_lost
        self._link: _Link | None = None
        self._identity: Welcome | None = None
        self._status: Status | None = None
        self._heard_at_s = 0.0
        self._stepped_at_s = 0.0
        self._streams: dict[str, EventStream] = {}
        self._waiters: list[asyncio.Future[None]] = []
        self._has_heard = asyncio.Event()
        self._is_closed = False
        self._was_ready = False

    @property
    def identity(self) -> Welcome | None:
        """What the worker serves; kept over a reconnect."""
        return self._identity

    @property
    def status(self) -> Status | None:
        """The last heartbeat of the present link."""
        return self._status

    @property
    def num_running(self) -> int:
        """Requests of this front that have not ended."""
        return len(self._streams)

    @property
    def readiness(self) -> Readiness:
        """Whether the worker is connected, loaded, and has spoken and stepped lately."""
        status = self._status
        if self._link is None:
            return Readiness.DISCONNECTED
        if status is None:
            return Readiness.LOADING if self._identity is None else Readiness.DISCONNECTED
        now_s = self._clock.now_s()
        limit_s = max(SILENCE_LIMIT_S, STEPS_IN_SILENCE * status.predicted_step_s)
        if now_s - self._heard_at_s > limit_s:
            return Readiness.STALLED
        if status.state is WorkerState.LOADING:
            return Readiness.LOADING
        if now_s - self._stepped_at_s > limit_s:
            return Readiness.STALLED
        return Readiness.DRAINING if status.state is WorkerState.DRAINING else Readiness.READY

    @property
    def was_ready(self) -> bool:
        """Whether it could take requests at some time."""
        return self._was_ready

    async def run(self) -> None:
        """Keeps the link up until cancelled."""
        pause_s = RECONNECT_FIRST_S
        loop = asyncio.get_running_loop()
        try:
            while True:
                try:
                    _, link = await loop.create_unix_connection(lambda: _Link(self), self._socket_path)
                except OSError:
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, RECONNECT_MAX_S)
                    continue
                await link.closed.wait()
                pause_s = RECONNECT_FIRST_S if link.has_spoken else min(2 * pause_s, RECONNECT_MAX_S)
                await asyncio.sleep(pause_s)
        finally:
            self._is_closed = True
            if self._link is not None:
                self._link.transport.abort()

    def generate(self, *submits: Submit) -> EventStream:
        """Starts requests whose events come in one stream.

        Raises:
            WorkerLostError: there is no link; nothing was started.
        """
        return self._start(submits)

    def _start(self, requests: Sequence[Submit | Encode]) -> EventStream:
        if self._link is None or self._status is None:
            raise WorkerLostError("the model's worker is not connected: try again in a moment")
        stream = EventStream([request.request_id for request in requests], self.abort)
        for request in requests:
            assert request.request_id not in self._streams, "request ids are ours and never repeat"
            self._streams[request.request_id] = stream
        self._link.transport.write(b"".join(map(encode_frame, requests)))
        return stream

    def encode(self, request: Encode) -> EventStream:
        """Starts a request for vectors.

        Raises:
            WorkerLostError: there is no link; nothing was started.
        """
        return self._start([request])

    def abort(self, request_ids: Sequence[str]) -> None:
        """Ends requests now; their further events are dropped."""
        running = [request_id for request_id in request_ids if self._streams.pop(request_id, None) is not None]
        frames = [encode_frame(Abort(request_id)) for request_id in running]
        if frames and self._link is not None:
            self._link.transport.write(b"".join(frames))

    async def wait_ready(self) -> None:
        """Returns when the worker has become ready."""
        while self.readiness is not Readiness.READY:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter

    async def wait_linked(self) -> None:
        """Returns when a worker has said how it is, ready or not."""
        await self._has_heard.wait()

    def attach(self, link: _Link) -> None:
        """Takes a link that has just been made."""
        self._link = link
        self._status = None
        link.transport.write(encode_frame(Hello(LINK_VERSION, "front")))

    def detach(self, link: _Link, error: Exception | None) -> None:
        """Gives up a link that broke, and with it every running request."""
        if self._link is not link:
            return
        self._link = None
        self._status = None
        streams = {id(stream): stream for stream in self._streams.values()}
        self._streams.clear()
        if link.has_spoken and not self._is_closed:
            _log.warning("worker_lost", running_requests=len(streams), error=str(error) if error else "closed")
            self._on_lost()
        for stream in streams.values():
            stream.open_ids.clear()
            stream.fail(WorkerLostError("the model's worker ended while it ran this request"))

    def receive(self, frame: FromWorker) -> None:
        """Handles one frame."""
        now_s = self._clock.now_s()
        self._heard_at_s = now_s
        match frame:
            case Step():
                self._stepped_at_s = now_s
                streams = self._streams
                for event in frame.events:
                    stream = streams.get(event.request_id)
                    if stream is not None:
                        stream.push(event)
                        if event.request_id not in stream.open_ids:
                            del streams[event.request_id]
            case Status():
                last = self._status
                is_idle = frame.num_running + frame.num_waiting == 0
                if last is None or is_idle or frame.num_steps != last.num_steps or last.state is not frame.state:
                    self._stepped_at_s = now_s
                self._status = frame
                self._has_heard.set()
                if frame.state is WorkerState.READY:
                    self._was_ready = True
                    for waiter in self._waiters:
                        if not waiter.done():
                            waiter.set_result(None)
                    self._waiters.clear()
            case Welcome():
                if frame.version != LINK_VERSION:
                    raise ProtocolError(f"the worker speaks link version {frame.version}, this front {LINK_VERSION}")
                self._identity = frame
                _log.info("worker_connected", worker_pid=frame.pid, model_digest=frame.model_digest)


class _Link(asyncio.Protocol):
    """One connection to the worker."""

    transport: asyncio.WriteTransport

    def __init__(self, replica: LocalReplica) -> None:
        self.closed = asyncio.Event()
        self.has_spoken = False
        self._replica = replica
        self._reader = FrameReader(FromWorker)
        self._error: Exception | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.WriteTransport", transport)  # uvloop's transports are of no such class
        peer = transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        owner = _CREDENTIALS.unpack(peer)[1]
        if owner != os.getuid():
            self._error = ProtocolError(f"the worker's socket belongs to uid {owner}, this front runs as {os.getuid()}")
            self.transport.abort()
            return
        self._replica.attach(self)

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._reader.feed(data):
                self.has_spoken = True
                self._replica.receive(frame)  # type: ignore[arg-type]  # the reader decodes FromWorker only
        except HeadraceError as error:
            self._error = error
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()
        self._replica.detach(self, self._error or exc)
