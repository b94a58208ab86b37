"""A real `headrace serve` with its supervisor, front and worker, and the official client to talk to it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from headrace.testing.tiny import write_tiny_llama

# For a start or an end on a machine that is busy with other things; a run that works never waits so long.
PATIENCE_S = 60.0
TINY_CONTEXT = 2048


@dataclass(frozen=True)
class Answer:
    """A plain HTTP answer."""

    status: int
    content: bytes
    headers: Any

    def json(self) -> Any:
        return json.loads(self.content)


def ask(url: str, data: bytes | None = None) -> Answer:
    """Sends GET, or POST where there is a body, with nothing between us and the wire but the standard library."""
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
            return Answer(response.status, response.read(), response.headers)
    except urllib.error.HTTPError as fault:
        with fault:
            return Answer(fault.code, fault.read(), fault.headers)


@dataclass(frozen=True)
class Server:
    """A running server."""

    url: str
    admin_url: str
    model: str
    env: dict[str, str]

    @property
    def client(self) -> openai.OpenAI:
        """The official client, which here never tries again by itself."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)

    def get(self, path: str) -> Answer:
        return ask(self.url + path)

    def post(self, path: str, body: Any) -> Answer:
        return ask(self.url + path, body if isinstance(body, bytes) else json.dumps(body).encode())

    def frames(self, path: str, body: dict[str, Any]) -> list[str]:
        """Streams an answer and gives the payloads of its data frames."""
        response = self.post(path, {**body, "stream": True})
        assert response.status == 200, response.content
        text = response.content.decode("utf-8")  # strict: every line is valid UTF-8
        return [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]

    def chunks(self, path: str, body: dict[str, Any]) -> list[Any]:
        *frames, last = self.frames(path, body)
        assert last == "[DONE]"
        return [json.loads(frame) for frame in frames]

    def metric(self, name: str) -> float:
        """Gives the sum of a metric's samples."""
        lines = ask(f"{self.admin_url}/metrics").content.decode().splitlines()
        values = [line.rsplit(" ", 1)[1] for line in lines if line.split("{")[0].split(" ")[0] == name]
        assert values, f"{name} is not among the metrics"
        return sum(map(float, values))

    def wait_idle(self) -> None:
        """Waits until the worker says that it runs nothing; its gauges come at least every half a second."""
        deadline = time.monotonic() + 2.0 + PATIENCE_S * (os.getloadavg()[0] > 4)
        while self.metric("headrace_requests_running") + self.metric("headrace_requests_waiting") > 0:
            assert time.monotonic() < deadline, "requests still run though every client is gone"
            time.sleep(0.05)

    def worker_pid(self) -> int:
        command = [sys.executable, "-m", "headrace", "status", "--json"]
        output = subprocess.run(command, env=self.env, check=True, capture_output=True, timeout=PATIENCE_S).stdout
        servers = json.loads(output)
        (child,) = [child for child in _find_children(servers) if child["name"] == "worker-0"]
        return int(child["pid"])


def _find_children(value: Any) -> list[dict[str, Any]]:
    if isinstance(value, dict):
        found = [value] if {"name", "pid"} <= value.keys() else []
        return found + [child for item in value.values() for child in _find_children(item)]
    return [child for item in value for child in _find_children(item)] if isinstance(value, list) else []


@contextmanager
def serve(model: Path | None, folder: Path, *flags: str) -> Iterator[Server]:
    """Starts the server on free ports, waits until it is ready, and ends it with SIGTERM.

    Args:
        model: None where the flags name the models.
    """
    env = {
        **os.environ,
        "HOME": str(folder),
        "XDG_RUNTIME_DIR": str(folder / "run"),
        "XDG_STATE_HOME": str(folder / "state"),
        "XDG_CONFIG_HOME": str(folder / "config"),
    }
    (folder / "run").mkdir(mode=0o700)
    command = [
        sys.executable,
        "-m",
        "headrace",
        "serve",
        *([] if model is None else [str(model)]),
        "--port",
        "0",
        "--admin-port",
        "0",
        "--json",
        *flags,
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([*command, *flags], env=env, cwd=folder, stdout=subprocess.PIPE, stderr=log)
    try:
        assert process.stdout is not None
        text = ""
        while not text.rstrip().endswith("}"):
            line = process.stdout.readline().decode()
            assert line, f"the server ended: {(folder / 'log').read_text()[-2000:]}"
            text += line
        said = json.loads(text)
        server = Server(said["url"], said["admin_url"], said["model"], env)
        _wait_until_ready(server, process, folder)
        yield server
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            status = process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        finally:
            process.stdout.close()  # type: ignore[union-attr]
    assert status == 0, f"exit code {status}: {(folder / 'log').read_text()[-2000:]}"


def _wait_until_ready(server: Server, process: subprocess.Popen[bytes], folder: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        assert process.poll() is None, f"the server ended: {(folder / 'log').read_text()[-2000:]}"
        try:
            if server.get("/readyz").status == 200:
                return
        except OSError:  # not listening yet
            pass
        time.sleep(0.05)
    raise TimeoutError(f"not ready after {PATIENCE_S} s: {(folder / 'log').read_text()[-2000:]}")


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of the tiny model: random weights (not tied, or it repeats itself), real everything else."""
    model = write_tiny_llama(tmp_path_factory.mktemp("tiny"), is_tied=False, context_tokens=TINY_CONTEXT)
    with serve(model, tmp_path_factory.mktemp("tiny_server"), "--served-name", "tests/tiny") as running:
        yield running


@pytest.fixture(scope="session")
def demo_server(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of the demo model; only for tests marked ``model``."""
    with serve(demo_model, tmp_path_factory.mktemp("demo_server"), "--served-name", "demo") as running:
        yield running


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Server]:
    """A server for one test alone, which may hurt it."""
    model = write_tiny_llama(tmp_path / "tiny", is_tied=False, context_tokens=TINY_CONTEXT)
    (tmp_path / "server").mkdir()
    with serve(model, tmp_path / "server", "--served-name", "tests/tiny") as running:
        yield running


@pytest.fixture
def own_demo_server(demo_model: Path, tmp_path: Path) -> Iterator[Server]:
    """A server of the demo model for one test alone, which may hurt it."""
    with serve(demo_model, tmp_path, "--served-name", "demo") as running:
        yield running
