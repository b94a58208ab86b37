"""The worker's end of the worker link: accepts peers, cuts bytes into frames, sends frames, drops who misbehaves.

One thread, one selector, no waiting but in ``poll``. Promises of flow control, each kept by a test:

- a peer of another user is refused before a byte is read;
- a peer that does not read is cut when ``MAX_UNSENT_BYTES`` wait for it, so it cannot grow our memory;
- a malformed, oversized or untimely frame cuts its peer and nobody else;
- one ``poll`` reads at most ``_READ_BYTES`` of a peer, so no peer can starve the others or the engine's steps.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
from collections.abc import Iterable

from headrace.base.errors import ProtocolError
from headrace.base.log import get_log
from headrace.protocol.frames import (
    LINK_VERSION,
    Abort,
    Drain,
    Encode,
    FrameReader,
    FromWorker,
    Hello,
    Submit,
    encode_frame,
)
from headrace.protocol.frames import ToWorker as _ToWorker

MAX_UNSENT_BYTES = 32 * 2**20
"""A step of prompt scores with 256 alternatives per row is the largest frame, ~2 MiB: room for a slow moment."""
MAX_PEERS = 64
"""Fronts and supervisors of one machine; also bounds what is buffered for them all together."""
_READ_BYTES = 2**18
_PEER_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid

log = get_log(__name__)

Request = Submit | Encode | Abort | Drain


class Peer:
    """One connection. ``id`` is never used twice."""

    __slots__ = ("frames", "has_greeted", "id", "name", "socket", "unsent")

    def __init__(self, peer_id: int, connection: socket.socket) -> None:
        self.id = peer_id
        self.name = ""
        self.socket = connection
        self.frames = FrameReader(_ToWorker)
        self.has_greeted = False
        self.unsent = bytearray()


class Link:
    """All connections of a worker.

    Args:
        listener: bound and listening Unix socket.
        user_id: the only user whose processes may connect; None is our own.
    """

    def __init__(self, listener: socket.socket, *, user_id: int | None = None) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._user_id = os.getuid() if user_id is None else user_id
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._selector.register(self._wake_in, selectors.EVENT_READ)
        self._events: set[int] = set()
        self._peers: dict[int, Peer] = {}
        self._num_accepted = 0
        self._greeted: list[int] = []
        self._gone: list[int] = []

    @property
    def wake_fd(self) -> int:
        """Descriptor for ``signal.set_wakeup_fd``: a byte on it ends ``poll``."""
        return self._wake_out.fileno()

    @property
    def ready_fd(self) -> int:
        """A descriptor that can be read while ``poll`` would return something at once; −1 where there is none."""
        return self._selector.fileno() if isinstance(self._selector, selectors.EpollSelector) else -1

    @property
    def peer_ids(self) -> list[int]:
        """Peers that have said Hello."""
        return [peer.id for peer in self._peers.values() if peer.has_greeted]

    def wake(self) -> None:
        """Ends a ``poll`` that waits; may be called from any thread."""
        with contextlib.suppress(OSError):  # full of wake-ups already, or closed: nobody waits any more
            self._wake_out.send(b"\0")

    def watch(self, event_fd: int) -> None:
        """Lets an event descriptor end ``poll``, which resets it."""
        self._events.add(event_fd)
        self._selector.register(event_fd, selectors.EVENT_READ)

    def poll(self, timeout_s: float | None) -> list[tuple[int, Request]]:
        """Waits up to ``timeout_s`` for something to happen; returns what peers asked, in order of arrival."""
        requests: list[tuple[int, Request]] = []
        for key, events in self._selector.select(timeout_s):
            if key.data is not None:
                peer: Peer = key.data
                if events & selectors.EVENT_WRITE:
                    self._flush(peer)
                if events & selectors.EVENT_READ and peer.id in self._peers:
                    self._read(peer, requests)
            elif key.fileobj is self._listener:
                self._accept()
            elif key.fd in self._events:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(key.fd)
            else:
                self._drain_wake()
        return requests

    def take_greeted(self) -> list[int]:
        """Returns the peers that said Hello since the last call; they wait for a Welcome."""
        greeted, self._greeted = self._greeted, []
        return greeted

    def take_gone(self) -> list[int]:
        """Returns the peers that went away or were cut since the last call."""
        gone, self._gone = self._gone, []
        return gone

    def send(self, peer_id: int, frame: FromWorker) -> None:
        """Sends a frame, or keeps it until the peer reads; a peer that is gone is passed over."""
        peer = self._peers.get(peer_id)
        if peer is None:
            return
        data = encode_frame(frame)
        if not peer.unsent:
            try:
                sent = peer.socket.send(data)
            except BlockingIOError:
                sent = 0
            except OSError as error:
                self._drop(peer, error.strerror or "send failed")
                return
            if sent == len(data):
                return
            data = data[sent:]
            self._selector.modify(peer.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, peer)
        peer.unsent += data
        if len(peer.unsent) > MAX_UNSENT_BYTES:
            self._drop(peer, f"does not read: {len(peer.unsent)} bytes wait, the limit is {MAX_UNSENT_BYTES}")

    def send_all(self, frames: Iterable[FromWorker]) -> None:
        """Sends frames to every peer that has said Hello, to the supervisor last.

        It tells people that the model is ready: then the fronts must know.
        """
        peer_ids = sorted(self.peer_ids, key=lambda peer_id: self._peers[peer_id].name == "supervisor")
        for frame in frames:
            for peer_id in peer_ids:
                self.send(peer_id, frame)

    def close(self, linger_s: float = 1.0) -> None:
        """Closes everything, after giving each peer up to ``linger_s`` to take what waits for it."""
        for peer in list(self._peers.values()):
            if peer.unsent:
                peer.socket.settimeout(linger_s)
                with contextlib.suppress(OSError):
                    peer.socket.sendall(peer.unsent)
            peer.socket.close()
        self._peers.clear()
        self._selector.close()
        self._listener.close()
        self._wake_in.close()
        self._wake_out.close()

    def cut(self, peer_id: int, why: str) -> None:
        """Ends a connection whose peer broke the protocol."""
        peer = self._peers.get(peer_id)
        if peer is not None:
            self._drop(peer, why)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:  # the peer left the backlog again, or descriptors ran out: the next poll tries again
                return
            if _user_of(connection) != self._user_id or len(self._peers) >= MAX_PEERS:
                connection.close()
                continue
            connection.setblocking(False)
            self._num_accepted += 1
            peer = Peer(self._num_accepted, connection)
            self._peers[peer.id] = peer
            self._selector.register(connection, selectors.EVENT_READ, peer)

    def _read(self, peer: Peer, requests: list[tuple[int, Request]]) -> None:
        try:
            data = peer.socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._drop(peer, error.strerror or "receive failed")
            return
        if not data:
            self._drop(peer, "closed")
            return
        try:
            for frame in peer.frames.feed(data):
                match frame:
                    case Hello():
                        self._greet(peer, frame)
                    case Submit() | Encode() | Abort() | Drain():
                        if not peer.has_greeted:
                            raise ProtocolError("a frame came before Hello")
                        requests.append((peer.id, frame))
        except ProtocolError as error:
            self._drop(peer, error.message)

    def _greet(self, peer: Peer, hello: Hello) -> None:
        if peer.has_greeted:
            raise ProtocolError("a second Hello")
        if hello.version != LINK_VERSION:
            raise ProtocolError(f"link version {hello.version}, this worker speaks {LINK_VERSION}")
        peer.has_greeted = True
        peer.name = hello.peer[:32]
        self._greeted.append(peer.id)
        log.info("peer_connected", peer=peer.name, peer_id=peer.id)

    def _flush(self, peer: Peer) -> None:
        try:
            sent = peer.socket.send(peer.unsent)
        except BlockingIOError:
            return
        except OSError as error:
            self._drop(peer, error.strerror or "send failed")
            return
        del peer.unsent[:sent]
        if not peer.unsent:
            self._selector.modify(peer.socket, selectors.EVENT_READ, peer)

    def _drop(self, peer: Peer, why: str) -> None:
        if self._peers.pop(peer.id, None) is None:
            return
        self._selector.unregister(peer.socket)
        peer.socket.close()
        self._gone.append(peer.id)
        log.info("peer_lost", peer=peer.name, peer_id=peer.id, reason=why)

    def _drain_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_in.recv(4096):
                pass


def _user_of(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    _, user_id, _ = _PEER_CREDENTIALS.unpack(credentials)
    return int(user_id)
