"""The mock worker speaks the worker link and does what its script says."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from headrace.protocol.frames import (
    LINK_VERSION,
    Abort,
    Event,
    Failed,
    Finished,
    FinishReason,
    FrameReader,
    FromWorker,
    Hello,
    Sampling,
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
from headrace.protocol.launch import WorkerLaunch
from headrace.testing.mock_worker import DEFAULT_TEXT, Fault, MockWorker, Reply, Script


class Link:
    """A small front: one connection, events in order of arrival."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._frames = FrameReader(FromWorker)
        self._waiting: list[object] = []

    def send(self, frame: ToWorker) -> None:
        self._writer.write(encode_frame(frame))

    async def frame(self) -> object:
        while not self._waiting:
            data = await self._reader.read(65536)
            if not data:
                raise EOFError
            self._waiting += self._frames.feed(data)
        return self._waiting.pop(0)

    async def first(self, kind: type) -> object:
        while not isinstance(frame := await self.frame(), kind):
            pass
        return frame

    async def events_until_end(self) -> list[Event]:
        events: list[Event] = []
        while not events or not isinstance(events[-1], Finished | Failed):
            step = await self.first(Step)
            assert isinstance(step, Step)
            events += step.events
        return events


def play(folder: Path, script: Script, act: Callable[[MockWorker, Link], Awaitable[None]]) -> None:
    async def run() -> None:
        async with asyncio.timeout(10), MockWorker(script) as worker:
            await worker.start(folder / "w.sock")
            reader, writer = await asyncio.open_unix_connection(str(folder / "w.sock"))
            link = Link(reader, writer)
            link.send(Hello(LINK_VERSION, "front"))
            await act(worker, link)
            writer.close()

    asyncio.run(run())


def submit(request_id: str = "r1", **changes: object) -> Submit:
    return msgspec.structs.replace(Submit(request_id, [1, 2, 3], max_tokens=100), **changes)


def test_unscripted_worker_answers_the_fixed_text_between_started_and_finished(tmp_path: Path) -> None:
    async def act(worker: MockWorker, link: Link) -> None:
        link.send(submit())

        welcome = await link.frame()
        events = await link.events_until_end()

        assert isinstance(welcome, Welcome)
        assert events[0] == Started("r1", 0)
        said = b"".join(bytes(event.ids) for event in events if isinstance(event, Tokens))
        assert said.decode() == DEFAULT_TEXT
        end = events[-1]
        assert isinstance(end, Finished)
        assert (end.reason, end.output_tokens, end.stop_token_id) == (FinishReason.STOP, len(DEFAULT_TEXT), 2)
        assert worker.num_running == worker.num_waiting == 0

    play(tmp_path, Script(), act)


def test_reply_ends_by_length_and_carries_logprobs_when_asked(tmp_path: Path) -> None:
    async def act(_: MockWorker, link: Link) -> None:
        link.send(submit(max_tokens=2, sampling=Sampling(num_logprobs=3)))

        events = await link.events_until_end()

        tokens = [event for event in events if isinstance(event, Tokens)]
        assert [event.ids for event in tokens] == [[7], [8]]
        assert [len(event.logprobs[0].top_ids) for event in tokens] == [3, 3]
        assert isinstance(events[-1], Finished)
        assert events[-1].reason is FinishReason.LENGTH

    play(tmp_path, Script(default=Reply(ids=[7, 8, 9])), act)


def test_abort_of_a_held_and_of_a_queued_request_is_answered_with_aborted(tmp_path: Path) -> None:
    async def act(worker: MockWorker, link: Link) -> None:
        link.send(submit("held"))
        link.send(submit("queued"))
        while not any(isinstance(e, Tokens) for e in (await link.first(Step)).events):  # type: ignore[attr-defined]
            pass
        assert (worker.num_running, worker.num_waiting) == (1, 1)

        link.send(Abort("queued"))
        queued = (await link.events_until_end())[-1]
        link.send(Abort("held"))
        held = (await link.events_until_end())[-1]

        assert isinstance(queued, Finished)
        assert isinstance(held, Finished)
        assert (queued.request_id, queued.reason, queued.output_tokens) == ("queued", FinishReason.ABORTED, 0)
        assert (held.request_id, held.reason, held.output_tokens) == ("held", FinishReason.ABORTED, 1)
        assert worker.num_running == worker.num_waiting == 0

    play(tmp_path, Script(default=Reply(ids=[5, 6], hold_at_token=1), max_running=1), act)


def test_nan_fails_one_request_and_refusal_another(tmp_path: Path) -> None:
    async def act(_: MockWorker, link: Link) -> None:
        link.send(submit("nan"))
        nan = (await link.events_until_end())[-1]
        link.send(submit("refused"))
        refused = (await link.events_until_end())[-1]

        assert isinstance(nan, Failed)
        assert isinstance(refused, Failed)
        assert (nan.code, nan.has_started) == ("numerical_error", True)
        assert (refused.code, refused.has_started) == ("queue_full", False)

    play(tmp_path, Script(replies=[Reply(fault=Fault.NAN, fault_at_token=2), Reply(fault=Fault.REFUSE)]), act)


def test_crash_cuts_the_link_after_the_scripted_token(tmp_path: Path) -> None:
    async def act(_: MockWorker, link: Link) -> None:
        link.send(submit())
        ids: list[int] = []
        try:
            while True:
                frame = await link.frame()
                if isinstance(frame, Step):
                    ids += [i for event in frame.events if isinstance(event, Tokens) for i in event.ids]
        except (EOFError, ConnectionError):
            pass

        assert len(ids) <= 3

    play(tmp_path, Script(default=Reply(fault=Fault.CRASH, fault_at_token=3)), act)


def test_hang_keeps_the_heartbeat_but_not_the_step_count(tmp_path: Path) -> None:
    async def act(worker: MockWorker, link: Link) -> None:
        await link.first(Status)  # the greeting's
        link.send(submit())
        while not worker.num_steps:
            await link.frame()
        statuses = [await link.first(Status) for _ in range(2)]

        counts = {status.num_steps for status in statuses if isinstance(status, Status)}
        assert counts == {1}

    play(tmp_path, Script(default=Reply(fault=Fault.HANG, fault_at_token=1)), act)


def test_loading_worker_says_so_and_refuses(tmp_path: Path) -> None:
    async def act(worker: MockWorker, link: Link) -> None:
        status = await link.first(Status)
        link.send(submit())
        refused = (await link.events_until_end())[-1]
        worker.finish_loading()
        ready = await link.first(Status)

        assert isinstance(status, Status)
        assert status.state is WorkerState.LOADING
        assert isinstance(refused, Failed)
        assert refused.code == "model_loading"
        assert isinstance(ready, Status)
        assert ready.state is WorkerState.READY

    play(tmp_path, Script(loading_s=None), act)


def test_process_form_reads_launch_and_script_and_serves(tmp_path: Path) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "w.sock"))
    listener.listen()
    script_file = tmp_path / "script.json"
    script_file.write_text(json.dumps({"default": {"ids": [9]}}))
    read_fd, write_fd = os.pipe()
    launch = WorkerLaunch(model_path=str(tmp_path), served_name="m", socket_fd=listener.fileno())
    os.write(write_fd, msgspec.json.encode(launch))
    os.close(write_fd)
    command = [sys.executable, "-m", "headrace.testing.mock_worker", "--launch-fd", str(read_fd)]
    process = subprocess.Popen([*command, "--script", str(script_file)], pass_fds=[read_fd, listener.fileno()])
    os.close(read_fd)
    try:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(20)
            client.connect(str(tmp_path / "w.sock"))
            client.sendall(encode_frame(Hello(LINK_VERSION, "front")) + encode_frame(submit()))
            frames = FrameReader(FromWorker)
            events: list[Event] = []
            while not any(isinstance(event, Finished | Failed) for event in events):
                for frame in frames.feed(client.recv(65536)):
                    events += frame.events if isinstance(frame, Step) else []
    finally:
        process.terminate()
        exit_code = process.wait(timeout=20)
        listener.close()

    assert [event.ids for event in events if isinstance(event, Tokens)] == [[9]]
    assert exit_code == 0
