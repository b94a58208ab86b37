"""The real worker process over a tiny random model: started as a supervisor starts it, spoken to over its socket."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from headrace.protocol.frames import (
    LINK_VERSION,
    EchoLogprobs,
    Event,
    Failed,
    Finished,
    FrameReader,
    FromWorker,
    Hello,
    Sampling,
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
from headrace.testing.tiny import write_tiny_llama

PROMPT = [72, 101, 108, 108, 111, 44, 32, 119, 97, 116, 101, 114] * 6


@dataclass
class Process:
    """A worker process and one connection to it."""

    child: subprocess.Popen[bytes]
    client: socket.socket
    frames: FrameReader = field(default_factory=lambda: FrameReader(FromWorker))
    waiting: list[object] = field(default_factory=list)

    def send(self, *frames: ToWorker) -> None:
        self.client.sendall(b"".join(map(encode_frame, frames)))

    def frame(self) -> object:
        while not self.waiting:
            data = self.client.recv(65536)
            if not data:
                raise EOFError
            self.waiting += self.frames.feed(data)
        return self.waiting.pop(0)

    def wait_ready(self) -> None:
        while not (isinstance(frame := self.frame(), Status) and frame.state is WorkerState.READY):
            pass

    def run(self, submit: Submit) -> list[Event]:
        self.send(submit)
        events: list[Event] = []
        while not events or not isinstance(events[-1], Finished | Failed):
            frame = self.frame()
            events += frame.events if isinstance(frame, Step) else []
        return events


def start(folder: Path, launch: WorkerLaunch) -> Process:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "w.sock"))
    listener.listen()
    read_fd, write_fd = os.pipe()
    os.write(write_fd, msgspec.json.encode(msgspec.structs.replace(launch, socket_fd=listener.fileno())))
    os.close(write_fd)
    command = [sys.executable, "-P", "-m", "headrace.engine.worker", "--launch-fd", str(read_fd)]
    child = subprocess.Popen(command, pass_fds=[read_fd, listener.fileno()], stderr=subprocess.PIPE)
    os.close(read_fd)
    client = socket.socket(socket.AF_UNIX)
    client.settimeout(60)
    client.connect(str(folder / "w.sock"))
    listener.close()
    client.sendall(encode_frame(Hello(LINK_VERSION, "front")))
    return Process(child, client)


def end(process: Process) -> None:
    process.child.kill()
    process.child.wait()
    assert process.child.stderr is not None
    process.child.stderr.close()
    process.client.close()


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Process]:
    model = write_tiny_llama(tmp_path / "tiny", is_tied=False)
    process = start(tmp_path, WorkerLaunch(str(model), "tiny", -1, kv_cache_tokens=4096, kv_cache_ratio=0.5))
    yield process
    end(process)


def tokens_of(events: list[Event]) -> list[int]:
    return [token for event in events if isinstance(event, Tokens) for token in event.ids]


def test_worker_greets_loads_and_generates_the_same_tokens_twice(worker: Process) -> None:
    welcome = worker.frame()
    worker.wait_ready()

    first = worker.run(Submit("a", PROMPT, 12, Sampling(seed=7, num_logprobs=4), ignore_eos=True))
    second = worker.run(Submit("b", PROMPT, 12, Sampling(seed=7, num_logprobs=4), ignore_eos=True))

    assert isinstance(welcome, Welcome)
    assert (welcome.pid, welcome.context_tokens) == (worker.child.pid, 512)
    assert len(tokens_of(first)) == 12
    assert tokens_of(first) == tokens_of(second)
    ending = second[-1]
    assert isinstance(ending, Finished)
    assert ending.cached_tokens == 64


def test_echo_scores_agree_with_the_logprobs_of_generation(worker: Process) -> None:
    worker.wait_ready()
    said = worker.run(Submit("say", PROMPT, 8, Sampling(temperature=0.0, num_logprobs=1), ignore_eos=True))

    scored = worker.run(Submit("score", PROMPT + tokens_of(said), 1, echo_logprobs=1, ignore_eos=True))

    generated = [entry for event in said if isinstance(event, Tokens) for entry in event.logprobs]
    echoed = [entry for event in scored if isinstance(event, EchoLogprobs) for entry in event.logprobs]
    assert len(echoed) == len(PROMPT) + 7
    assert echoed[-8:] == generated


def test_sigterm_ends_an_idle_worker_with_exit_code_0(worker: Process) -> None:
    worker.wait_ready()

    worker.child.send_signal(signal.SIGTERM)

    assert worker.child.wait(30) == 0


def test_wrong_model_ends_the_process_with_one_line_and_its_exit_code(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "tiny")
    (model / "model.safetensors").write_bytes(b"\0" * 100)
    process = start(tmp_path, WorkerLaunch(str(model), "tiny", -1))

    _, stderr = process.child.communicate(timeout=30)

    assert process.child.returncode == 11
    assert stderr.count(b"\n") == 1
    assert b"model.safetensors" in stderr
    end(process)
