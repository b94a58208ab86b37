"""The worker's loop and link over a real Unix socket, with a fake VM in place of the model."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

import headrace.engine.link as link_module
from headrace.base.clock import SystemClock
from headrace.base.errors import ModelFormatError
from headrace.base.exits import Exit
from headrace.engine.link import Link
from headrace.engine.loader import Inspection, Loaded, inspect, make_executor
from headrace.engine.pace import Pace
from headrace.engine.worker import Worker
from headrace.policy.threads import ThreadPolicy
from headrace.protocol.frames import (
    LINK_VERSION,
    Abort,
    Drain,
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
from headrace.testing.fake_vm import FakeVm, next_token
from headrace.testing.tiny import write_tiny_llama


@pytest.fixture(scope="module")
def inspection(tmp_path_factory: pytest.TempPathFactory) -> Inspection:
    folder = write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")
    launch = WorkerLaunch(
        model_path=str(folder), served_name="tiny", socket_fd=-1, max_sequences=4, kv_cache_tokens=2048
    )
    return inspect(launch, available_bytes=2**30)


class Front:
    """A small, blocking front."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(30)
        self.socket.connect(str(path))
        self._frames = FrameReader(FromWorker)
        self._waiting: list[object] = []

    def hello(self) -> Front:
        self.send(Hello(LINK_VERSION, "front"))
        return self

    def send(self, *frames: ToWorker) -> None:
        self.socket.sendall(b"".join(map(encode_frame, frames)))

    def frame(self) -> object:
        while not self._waiting:
            data = self.socket.recv(65536)
            if not data:
                raise EOFError
            self._waiting += self._frames.feed(data)
        return self._waiting.pop(0)

    def status(self, fits: Callable[[Status], bool]) -> Status:
        while not (isinstance(frame := self.frame(), Status) and fits(frame)):
            pass
        return frame

    def wait_step(self) -> None:
        while not isinstance(self.frame(), Step):
            pass

    def events_until_end(self, request_id: str) -> list[Event]:
        events: list[Event] = []
        while True:
            frame = self.frame()
            for event in frame.events if isinstance(frame, Step) else []:
                if event.request_id == request_id:
                    events.append(event)
                    if isinstance(event, Finished | Failed):
                        return events

    def is_cut(self) -> bool:
        try:
            while True:
                self.frame()
        except (EOFError, ConnectionError):
            return True


class Running:
    """A worker in a thread, and how to reach it."""

    def __init__(self, folder: Path, inspection: Inspection, vm: object, gate: threading.Event) -> None:
        self.path = folder / "w.sock"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(self.path))
        listener.listen()
        self.link = Link(listener)
        config = inspection.scheduler_config

        def loading(progress: Callable[[str, float], None]) -> Loaded:
            progress("loading weights", 0.5)
            gate.wait(30)
            if isinstance(vm, Exception):
                raise vm
            return Loaded(make_executor(vm, config), vm, Pace(config.max_step_tokens), ThreadPolicy(1), "fake")  # type: ignore[arg-type]

        self.worker = Worker(inspection, self.link, SystemClock(), loading)
        self.outcome: list[object] = []
        self._fronts: list[Front] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.outcome.append(self.worker.run())
        except ModelFormatError as error:
            self.outcome.append(error)
        finally:
            self.link.close()

    def front(self) -> Front:
        front = Front(self.path)
        self._fronts.append(front)
        return front

    def wait_end(self) -> object:
        self._thread.join(30)
        assert not self._thread.is_alive()
        return self.outcome[0]

    def stop(self) -> None:
        if self._thread.is_alive():
            self.worker.request_stop()
            self.worker.request_stop()
        self._thread.join(30)
        for front in self._fronts:
            front.socket.close()


Start = Callable[..., Running]


@pytest.fixture
def start(tmp_path: Path, inspection: Inspection) -> Iterator[Start]:
    started: list[Running] = []
    gates: list[threading.Event] = []

    def begin(vm: object = None, *, gate: threading.Event | None = None, inspected: Inspection = inspection) -> Running:
        if gate is None:
            gate = threading.Event()
            gate.set()
        gates.append(gate)
        config = inspected.scheduler_config
        vm = vm or FakeVm(config.num_blocks, config.vocab_size)
        started.append(Running(tmp_path, inspected, vm, gate))
        return started[-1]

    yield begin
    for gate in gates:
        gate.set()
    for running in started:
        running.stop()


def submit(request_id: str = "r", max_tokens: int = 6, **changes: object) -> Submit:
    return msgspec.structs.replace(Submit(request_id, [1, 2, 3], max_tokens, ignore_eos=True), **changes)


def expected(request: Submit, vocab_size: int) -> list[int]:
    tokens = list(request.prompt_ids)
    for _ in range(request.max_tokens):
        tokens.append(next_token(np.array(tokens, np.int32), request.sampling.seed, vocab_size, frozenset()))
    return tokens[len(request.prompt_ids) :]


def ids(events: list[Event]) -> list[int]:
    return [token for event in events if isinstance(event, Tokens) for token in event.ids]


def is_ready(status: Status) -> bool:
    return status.state is WorkerState.READY


def is_idle(status: Status) -> bool:
    return status.num_running == status.num_waiting == 0


def test_peer_is_welcomed_with_the_model_and_gets_its_tokens(start: Start, inspection: Inspection) -> None:
    front = start().front().hello()
    welcome = front.frame()
    front.status(is_ready)

    front.send(submit())
    events = front.events_until_end("r")

    assert isinstance(welcome, Welcome)
    assert (welcome.pid, welcome.context_tokens) == (os.getpid(), 512)
    assert welcome.vocab_size == inspection.spec.vocab_size
    assert events[0] == Started("r", 0)
    assert ids(events) == expected(submit(), inspection.spec.vocab_size)


def test_loading_worker_greets_beats_and_refuses(start: Start) -> None:
    gate = threading.Event()
    front = start(gate=gate).front().hello()
    loading = front.status(lambda status: status.stage == "loading weights")

    front.send(submit())
    refused = front.events_until_end("r")[-1]
    gate.set()
    ready = front.status(is_ready)

    assert (loading.state, loading.progress_ratio) == (WorkerState.LOADING, 0.5)
    assert isinstance(refused, Failed)
    assert (refused.code, refused.has_started) == ("model_loading", False)
    assert (ready.progress_ratio, ready.free_blocks) == (1.0, ready.total_blocks)


def test_model_that_does_not_load_ends_the_worker_with_its_error(start: Start) -> None:
    running = start(ModelFormatError("layers.0.q is not finite"))

    assert isinstance(running.wait_end(), ModelFormatError)


def test_gone_peer_frees_everything_for_the_others(start: Start) -> None:
    running = start()
    leaving, staying = running.front().hello(), running.front().hello()
    leaving.status(is_ready)
    leaving.send(*(submit(f"r{index}", 400) for index in range(8)))
    leaving.wait_step()

    leaving.socket.close()
    status = staying.status(is_idle)
    staying.send(submit())

    assert status.free_blocks + status.evictable_blocks == status.total_blocks
    assert isinstance(staying.events_until_end("r")[-1], Finished)


def test_abort_is_answered_and_request_ids_of_two_peers_do_not_clash(start: Start, inspection: Inspection) -> None:
    running = start()
    first, second = running.front().hello(), running.front().hello()
    first.status(is_ready)
    first.send(submit("same", 500))

    second.send(submit("same"))
    kept = second.events_until_end("same")
    first.send(Abort("same"), Abort("never heard of"))
    ended = first.events_until_end("same")[-1]

    assert ids(kept) == expected(submit("same"), inspection.spec.vocab_size)
    assert isinstance(ended, Finished)
    assert ended.reason is FinishReason.ABORTED


@pytest.mark.parametrize(
    "data",
    [
        encode_frame(submit()),
        encode_frame(Hello(LINK_VERSION + 1, "front")),
        encode_frame(Hello(LINK_VERSION, "front")) * 2,
        b"\x7f\xff\xff\xff",
        b"\0\0\0\3abc",
        b"\0\0\0\1\x80",
    ],
    ids=["submit before hello", "other version", "two hellos", "oversized", "not msgpack", "not a frame"],
)
def test_peer_that_breaks_the_protocol_is_cut_and_nobody_else(start: Start, data: bytes) -> None:
    running = start()
    good, bad = running.front().hello(), running.front()
    good.status(is_ready)

    bad.socket.sendall(data)

    assert bad.is_cut()
    good.send(submit())
    assert isinstance(good.events_until_end("r")[-1], Finished)


def test_request_id_that_is_in_use_cuts_its_peer(start: Start) -> None:
    front = start().front().hello()
    front.status(is_ready)

    front.send(submit("twice", 500), submit("twice", 500))

    assert front.is_cut()


def test_bad_submit_fails_alone(start: Start) -> None:
    front = start().front().hello()
    front.status(is_ready)

    front.send(submit("bad", prompt_ids=[10**6]), submit("good", sampling=Sampling(temperature=0.0)))

    bad = front.events_until_end("bad")[-1]
    assert isinstance(bad, Failed)
    assert (bad.code, bad.has_started) == ("invalid_value", False)
    assert isinstance(front.events_until_end("good")[-1], Finished)


def test_draining_worker_finishes_what_runs_and_refuses_what_is_new(start: Start) -> None:
    front = start().front().hello()
    front.status(is_ready)

    front.send(submit("old", 300), Drain(), submit("new"))

    refused = front.events_until_end("new")[-1]
    assert isinstance(refused, Failed)
    assert refused.code == "draining"
    finished = front.events_until_end("old")[-1]
    assert isinstance(finished, Finished)
    assert finished.output_tokens == 300


def test_stop_lets_running_requests_end_and_then_ends_the_worker(start: Start) -> None:
    running = start()
    front = running.front().hello()
    front.status(is_ready)
    front.send(submit(max_tokens=200))
    front.wait_step()

    running.worker.request_stop()
    ending = front.events_until_end("r")[-1]

    assert isinstance(ending, Finished)
    assert ending.output_tokens == 200
    assert running.wait_end() is Exit.GOOD


class BrokenVm(FakeVm):
    """Fails its first ``count`` steps."""

    def __init__(self, inspection: Inspection, error: Exception, count: int) -> None:
        super().__init__(inspection.pool.num_blocks, inspection.spec.vocab_size)
        self._error, self._count = error, count

    def step(self, *arrays: object, **more: object) -> object:  # type: ignore[override]  # passes all through
        if self._count:
            self._count -= 1
            raise self._error
        return super().step(*arrays, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("error", "code"),
    [(MemoryError(), "engine_out_of_memory"), (ZeroDivisionError("a bug"), "engine_error")],
    ids=["out of memory", "bug"],
)
def test_failed_step_fails_its_requests_and_the_worker_lives(
    start: Start, inspection: Inspection, error: Exception, code: str
) -> None:
    front = start(BrokenVm(inspection, error, 1)).front().hello()
    front.status(is_ready)

    front.send(submit("first"))
    failed = front.events_until_end("first")[-1]
    front.send(submit("second"))

    assert isinstance(failed, Failed)
    assert failed.code == code
    assert isinstance(front.events_until_end("second")[-1], Finished)


def test_steps_that_keep_failing_end_the_worker_after_everybody_heard(start: Start, inspection: Inspection) -> None:
    running = start(BrokenVm(inspection, ZeroDivisionError("a bug"), 100))
    front = running.front().hello()
    front.status(is_ready)

    for index in range(3):
        front.send(submit(f"r{index}"))
        assert isinstance(front.events_until_end(f"r{index}")[-1], Failed)

    assert running.wait_end() is Exit.BAD


def test_peer_that_does_not_read_is_cut_before_it_costs_memory(
    start: Start, inspection: Inspection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "MAX_UNSENT_BYTES", 4096)
    running = start()
    deaf, good = running.front(), running.front().hello()
    deaf.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    deaf.hello()
    good.status(is_ready)

    many = Sampling(num_logprobs=8)
    deaf.send(*(submit(f"r{index}", 509, sampling=many) for index in range(60)))
    good.status(lambda status: status.prompt_tokens_total > 0 and is_idle(status))

    assert deaf.is_cut()
    good.send(submit())
    assert isinstance(good.events_until_end("r")[-1], Finished)


def test_peer_of_another_user_is_refused_unheard(tmp_path: Path) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "w.sock"))
    listener.listen()
    link = Link(listener, user_id=os.getuid() + 1)
    front = Front(tmp_path / "w.sock").hello()

    requests = link.poll(1.0)

    assert front.is_cut()
    assert requests == link.take_greeted() == []
    front.socket.close()
    link.close()


def test_inspection_names_the_truth_when_the_architecture_is_another(inspection: Inspection) -> None:
    launch = msgspec.structs.replace(inspection.launch, architecture="encoder-only")

    with pytest.raises(Exception, match="is 'decoder-only'"):
        inspect(launch, available_bytes=2**30)


def test_inspection_sizes_pool_and_context_by_the_launch(inspection: Inspection) -> None:
    launch = msgspec.structs.replace(inspection.launch, max_context_tokens=100, kv_cache_tokens=1000)

    found = inspect(launch, available_bytes=2**30)

    assert (found.pool.num_blocks, found.pool.context_tokens) == (16, 100)
    assert replace(found.scheduler_config, num_blocks=0).context_tokens == 100
