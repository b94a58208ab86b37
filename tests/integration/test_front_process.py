"""A front as a process of its own: started as a supervisor starts it, over a mock worker process."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.protocol.launch import FrontLaunch, ModelLaunch, WorkerLaunch
from headrace.testing.tiny import write_tiny_llama

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Say hi"}]}


class Processes:
    """A front, a mock worker, and the sockets that a supervisor would hold."""

    def __init__(self, folder: Path, script: dict[str, Any], **limits: Any) -> None:
        self.model = folder / "model"
        write_tiny_llama(self.model)
        self.script = folder / "script.json"
        self.script.write_text(json.dumps(script))
        link = folder / "w.sock"
        self.worker_socket = socket.socket(socket.AF_UNIX)
        self.worker_socket.bind(str(link))
        self.worker_socket.listen(16)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.admin = socket.create_server(("127.0.0.1", 0))
        self.launch = FrontLaunch(
            [ModelLaunch(str(self.model), ["tiny"], str(link))],
            listen_fds=[self.listener.fileno()],
            admin_fd=self.admin.fileno(),
            **limits,
        )
        self.children: list[subprocess.Popen[bytes]] = []
        self.front = self.start_front()
        self.worker = self.start_worker()

    def start_front(self) -> subprocess.Popen[bytes]:
        fds = [self.listener.fileno(), self.admin.fileno()]
        return self._start("headrace.server.front", self.launch, fds)

    def start_worker(self) -> subprocess.Popen[bytes]:
        launch = WorkerLaunch(str(self.model), "tiny", self.worker_socket.fileno())
        return self._start("headrace.testing.mock_worker", launch, [launch.socket_fd], "--script", str(self.script))

    def _start(self, module: str, launch: Any, fds: list[int], *extra: str) -> subprocess.Popen[bytes]:
        read_end, write_end = os.pipe()
        os.write(write_end, msgspec.json.encode(launch))
        os.close(write_end)
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", module, "--launch-fd", str(read_end), *extra],
            pass_fds=[read_end, *fds],
            stderr=subprocess.PIPE,
        )
        os.close(read_end)
        self.children.append(child)
        return child

    def url(self, path: str, *, is_admin: bool = False) -> str:
        port = (self.admin if is_admin else self.listener).getsockname()[1]
        return f"http://127.0.0.1:{port}{path}"

    def get(self, path: str, *, is_admin: bool = False) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(self.url(path, is_admin=is_admin), timeout=20) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as refused:
            with refused:
                return refused.code, refused.read().decode()

    def open(self, body: dict[str, Any]) -> Any:
        headers = {"content-type": "application/json"}
        data = json.dumps(body).encode()
        request = urllib.request.Request(self.url("/v1/chat/completions"), data, headers)
        return urllib.request.urlopen(request, timeout=20)

    def wait(self, condition: Callable[[], bool]) -> None:
        until_s = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < until_s, "it did not come about within 30 s"
            time.sleep(0.02)

    def wait_ready(self) -> None:
        self.wait(lambda: self.get("/readyz")[0] == 200)

    def close(self) -> None:
        for child in self.children:
            child.kill()
            child.wait()
            assert child.stderr is not None
            child.stderr.close()
        for sock in (self.worker_socket, self.listener, self.admin):
            sock.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Processes]]:
    started: list[Processes] = []

    def make(script: dict[str, Any] | None = None, **limits: Any) -> Processes:
        started.append(Processes(tmp_path, script or {}, **limits))
        return started[-1]

    yield make
    for processes in started:
        processes.close()


def test_a_front_process_serves_its_model_and_its_admin_listener(start: Callable[..., Processes]) -> None:
    processes = start({"default": {"text": "Hello there"}})
    processes.wait_ready()

    with processes.open({**CHAT, "max_tokens": 50}) as response:
        answer = json.load(response)
    status, metrics = processes.get("/metrics", is_admin=True)

    assert answer["choices"][0]["message"]["content"] == "Hello there"
    assert status == 200
    assert 'headrace_requests_total{model="tiny",endpoint="chat",outcome="ok"} 1' in metrics
    assert processes.get("/v1/models", is_admin=True)[0] == 404


def test_sigterm_lets_a_stream_finish_and_ends_with_zero(start: Callable[..., Processes]) -> None:
    processes = start({"default": {"text": "x" * 40, "inter_token_s": 0.01}})
    processes.wait_ready()

    with processes.open({**CHAT, "stream": True, "max_tokens": 40}) as response:
        response.readline()
        processes.front.send_signal(signal.SIGTERM)
        rest = response.read()

    assert rest.endswith(b"data: [DONE]\n\n")
    assert processes.front.wait(10) == 0


def test_an_idle_front_ends_within_a_second_of_sigterm(start: Callable[..., Processes]) -> None:
    processes = start()
    processes.wait_ready()

    processes.front.send_signal(signal.SIGTERM)

    assert processes.front.wait(5) == 0


def test_work_that_had_to_be_cut_shows_in_the_exit_code(start: Callable[..., Processes]) -> None:
    processes = start({"default": {"text": "x", "hold_at_token": 1}}, drain_s=0.1, stream_drain_s=0.2)
    processes.wait_ready()

    with processes.open({**CHAT, "stream": True}) as response:
        response.readline()
        processes.front.send_signal(signal.SIGTERM)
        rest = response.read()

    assert b'"code":"server_shutdown"' in rest
    assert b"[DONE]" not in rest
    assert processes.front.wait(10) == 75


def test_killing_the_worker_fails_its_stream_within_a_second(start: Callable[..., Processes]) -> None:
    processes = start({"default": {"text": "x" * 40, "hold_at_token": 3}})
    processes.wait_ready()

    with processes.open({**CHAT, "stream": True}) as response:
        response.readline()
        killed_at_s = time.monotonic()
        processes.worker.kill()
        rest = response.read()
        lasted_s = time.monotonic() - killed_at_s
    processes.worker = processes.start_worker()
    processes.wait_ready()

    assert b'"code":"worker_lost"' in rest
    assert b"[DONE]" not in rest
    assert lasted_s < 1.0


def test_a_killed_front_is_replaced_without_losing_the_listening_socket(start: Callable[..., Processes]) -> None:
    processes = start({"default": {"text": "Hi"}})
    processes.wait_ready()

    processes.front.kill()
    processes.front.wait()
    waiting = socket.create_connection(processes.listener.getsockname())
    waiting.sendall(b"GET /livez HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    processes.front = processes.start_front()
    waiting.settimeout(20)
    answer = waiting.recv(65536)
    waiting.close()

    assert answer.startswith(b"HTTP/1.1 200 OK")


def test_a_model_that_cannot_be_read_ends_the_start_with_one_line(
    start: Callable[..., Processes], tmp_path: Path
) -> None:
    processes = start()
    (processes.model / "tokenizer.json").write_text("{}")

    front = processes.start_front()
    _, errors = front.communicate(timeout=30)

    assert front.returncode == 11
    assert errors.count(b"\n") == 1
    assert errors.startswith(b"headrace front: ")
