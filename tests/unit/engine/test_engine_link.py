"""The order in which a worker's peers hear what is for all of them."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from headrace.engine.link import Link
from headrace.protocol.frames import LINK_VERSION, Hello, Status, WorkerState, encode_frame


def test_the_supervisor_hears_last_because_it_tells_people(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "s"))
    listener.listen()
    link = Link(listener)
    peers = []
    for name in ("supervisor", "front", "front"):
        peer = socket.socket(socket.AF_UNIX)
        peer.connect(str(tmp_path / "s"))
        peer.sendall(encode_frame(Hello(LINK_VERSION, name)))
        peers.append(peer)
    while len(link.peer_ids) < 3:
        link.poll(1.0)
    order: list[int] = []
    monkeypatch.setattr(link, "send", lambda peer_id, frame: order.append(peer_id))

    link.send_all([Status(WorkerState.READY, 0, 0, 0, 0, 0, 0, 0.0)])

    supervisor, *fronts = link.peer_ids
    assert order == [*fronts, supervisor]
    for peer in peers:
        peer.close()
    link.close()
