"""The worker link from the front's side, against a peer that says what the test tells it to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from headrace.base.clock import ManualClock
from headrace.base.errors import WorkerLostError
from headrace.protocol.frames import (
    LINK_VERSION,
    Abort,
    FrameReader,
    FromWorker,
    Hello,
    Started,
    Status,
    Step,
    Submit,
    Tokens,
    ToWorker,
    Welcome,
    WorkerState,
    encode_frame,
)
from headrace.replica.events import MAX_PENDING_BYTES, EventStream
from headrace.replica.local import LocalReplica
from headrace.replica.port import Readiness


class Peer:
    """A worker's end of the link."""

    def __init__(self) -> None:
        self.received: list[object] = []
        self.num_links = 0
        self.writer: asyncio.StreamWriter | None = None

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_links += 1
        self.writer = writer
        frames = FrameReader(ToWorker)
        while data := await reader.read(65536):
            self.received += frames.feed(data)
        writer.close()

    def send(self, *frames: FromWorker) -> None:
        assert self.writer is not None
        self.writer.write(b"".join(map(encode_frame, frames)))


WELCOME = Welcome(LINK_VERSION, 7, "digest", 128, 256, [2])


def status(state: WorkerState = WorkerState.READY, *, num_steps: int = 0, num_running: int = 0) -> Status:
    return Status(state, num_steps, num_running, 0, 8, 0, 8, 0.01)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


@asynccontextmanager
async def linked(path: Path, clock: ManualClock | None = None) -> AsyncIterator[tuple[LocalReplica, Peer]]:
    peer = Peer()
    server = await asyncio.start_unix_server(peer.serve, path)
    replica = LocalReplica(path, clock=clock or ManualClock())
    running = asyncio.create_task(replica.run())
    try:
        await until(lambda: peer.writer is not None and bool(peer.received))
        yield replica, peer
    finally:
        running.cancel()
        server.close()
        if peer.writer is not None:
            peer.writer.close()
        await server.wait_closed()


async def test_hello_comes_first_and_readiness_follows_the_status(tmp_path: Path) -> None:
    async with linked(tmp_path / "w") as (replica, peer):
        assert peer.received == [Hello(LINK_VERSION, "front")]
        assert replica.readiness is Readiness.LOADING
        peer.send(WELCOME, status(WorkerState.LOADING))
        await until(lambda: replica.status is not None)
        assert replica.readiness is Readiness.LOADING
        waiting = asyncio.create_task(replica.wait_ready())
        peer.send(status())
        await waiting
        assert replica.identity == WELCOME
        peer.send(status(WorkerState.DRAINING))
        await until(lambda: replica.readiness is Readiness.DRAINING)


async def test_events_reach_the_stream_of_their_request(tmp_path: Path) -> None:
    async with linked(tmp_path / "w") as (replica, peer):
        peer.send(WELCOME, status())
        await replica.wait_ready()
        first = replica.generate(Submit("a", [1], 5))
        second = replica.generate(Submit("b", [1], 5), Submit("c", [1], 5))
        events = [Tokens("a", [1]), Tokens("c", [3]), Tokens("nobody", [9]), Tokens("b", [2]), Tokens("a", [4])]

        peer.send(Step(list(events)))

        assert await first.take() == [events[0], events[4]]
        assert await second.take() == [events[1], events[3]]


async def test_closing_a_stream_aborts_what_still_runs(tmp_path: Path) -> None:
    async with linked(tmp_path / "w") as (replica, peer):
        peer.send(WELCOME, status())
        await replica.wait_ready()
        stream = replica.generate(Submit("a", [1], 5))

        stream.close()
        stream.close()

        await until(lambda: Abort("a") in peer.received)
        assert peer.received.count(Abort("a")) == 1
        assert replica.num_running == 0


async def test_a_broken_link_fails_every_request_at_once_and_is_made_again(tmp_path: Path) -> None:
    async with linked(tmp_path / "w") as (replica, peer):
        peer.send(WELCOME, status())
        await replica.wait_ready()
        stream = replica.generate(Submit("a", [1], 5))
        peer.send(Step([Started("a", 0)]))
        assert peer.writer is not None
        peer.writer.close()

        assert await stream.take() == [Started("a", 0)]
        with pytest.raises(WorkerLostError):
            await stream.take()
        assert replica.readiness is Readiness.DISCONNECTED
        with pytest.raises(WorkerLostError):
            replica.generate(Submit("b", [1], 5))
        await until(lambda: peer.num_links == 2)
        peer.send(WELCOME, status())
        await replica.wait_ready()


@pytest.mark.parametrize(
    "data",
    [b"\xff\xff\xff\xff", b"\x00\x00\x00\x02\xc1\xc1", encode_frame(Welcome(LINK_VERSION + 1, 7, "d", 1, 1, []))],
    ids=["oversized", "no msgpack", "other version"],
)
async def test_a_malformed_frame_resets_the_link(tmp_path: Path, data: bytes) -> None:
    async with linked(tmp_path / "w") as (_, peer):
        assert peer.writer is not None
        peer.writer.write(data)

        await until(lambda: peer.num_links == 2)


async def test_silence_is_not_ready_within_five_seconds(tmp_path: Path) -> None:
    clock = ManualClock()
    async with linked(tmp_path / "w", clock) as (replica, peer):
        peer.send(WELCOME, status())
        await replica.wait_ready()

        clock.advance(4.4)
        assert replica.readiness is Readiness.READY
        clock.advance(0.2)
        assert replica.readiness is Readiness.STALLED
        peer.send(status(num_steps=1))
        await until(lambda: replica.readiness is Readiness.READY)


@pytest.mark.parametrize(
    ("num_running", "expected"), [(1, Readiness.STALLED), (0, Readiness.READY)], ids=["work", "idle"]
)
async def test_standing_steps_matter_only_while_there_is_work(
    tmp_path: Path, num_running: int, expected: Readiness
) -> None:
    clock = ManualClock()
    async with linked(tmp_path / "w", clock) as (replica, peer):
        peer.send(WELCOME, status(num_steps=5, num_running=num_running))
        await replica.wait_ready()

        for _ in range(6):
            clock.advance(1.0)
            before = replica.status
            peer.send(status(num_steps=5, num_running=num_running))
            await until(lambda before=before: replica.status is not before)

        assert replica.readiness is expected


async def test_a_consumer_that_lets_events_pile_up_loses_its_stream() -> None:
    aborted: list[str] = []
    overruns: list[bool] = []
    stream = EventStream(["a"], aborted.extend)
    stream.on_overrun = lambda: overruns.append(True)

    for _ in range(MAX_PENDING_BYTES // 40 + 10):
        stream.push(Tokens("a", [1]))
    stream.close()

    assert overruns == [True]
    assert aborted == ["a"]
