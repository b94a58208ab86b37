"""Real processes of the real engine are killed, stopped and left, under clients that stream.

Every test proves that its fault took, and ends with the three questions: right answer, right processes, next request.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from headrace.base.exits import Exit
from headrace.fleet.status import ChildStatus, read_status

pytestmark = pytest.mark.timeout(180)

CHAT = "/v1/chat/completions"
PATIENCE_S = 60.0


@dataclass
class Stream:
    """A chat that a client streams over a plain socket, and what it has heard."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    heard: bytes = b""
    ended_at_s: float = 0.0

    async def hear_first(self) -> None:
        while b"data: " not in self.heard:
            data = await self.reader.read(65536)
            assert data, self.heard
            self.heard += data

    async def hear_all(self) -> None:
        while data := await self.reader.read(65536):
            self.heard += data
        self.ended_at_s = time.monotonic()
        self.writer.close()

    def frames(self) -> list[str]:
        return [line[6:] for line in self.heard.decode().splitlines() if line.startswith("data: ")]


async def open_stream(server: Any, max_tokens: int) -> Stream:
    host, port = server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps(
        {
            "model": server.model,
            "messages": [{"role": "user", "content": "Say hi"}],
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": True,
        }
    ).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\nConnection: close\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return Stream(reader, writer)


def children(server: Any) -> dict[str, ChildStatus]:
    port = server.url.rpartition(":")[2]
    status = read_status(Path(server.env["XDG_RUNTIME_DIR"], "headrace", port, "control.sock"))
    return {child.name: child for child in status.children}


def pid_of(server: Any, name: str) -> int:
    pid = children(server)[name].pid
    assert pid is not None
    return pid


def until(is_so: Callable[[], bool], limit_s: float = PATIENCE_S) -> float:
    """Waits until ``is_so`` and gives the seconds that it took; fails at the limit."""
    started_at_s = time.monotonic()
    while not is_so():
        assert time.monotonic() - started_at_s < limit_s, f"not so after {limit_s} s"
        time.sleep(0.05)
    return time.monotonic() - started_at_s


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def works(server: Any) -> bool:
    answer = server.post(
        CHAT, {"model": server.model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    )
    return answer.status == 200 and answer.json()["usage"]["completion_tokens"] >= 1


async def test_killed_worker_ends_every_stream_with_an_error_and_comes_back(own_server: Any) -> None:
    worker, front = pid_of(own_server, "worker-0"), pid_of(own_server, "front-0")
    streams = [await open_stream(own_server, 440) for _ in range(16)]
    await asyncio.gather(*(stream.hear_first() for stream in streams))

    killed_at_s = time.monotonic()
    os.kill(worker, signal.SIGKILL)
    await asyncio.gather(*(stream.hear_all() for stream in streams))

    cut = [stream for stream in streams if "[DONE]" not in stream.frames()]
    assert cut, "all streams had ended before the fault"
    for stream in cut:
        assert json.loads(stream.frames()[-1])["error"]["code"] == "worker_lost"
        assert 'finish_reason":"' not in stream.heard.decode()
        assert stream.ended_at_s - killed_at_s < 1.0
    await asyncio.to_thread(until, lambda: is_gone(worker))
    await asyncio.to_thread(until, lambda: works(own_server))
    assert pid_of(own_server, "front-0") == front
    assert children(own_server)["worker-0"].restarts == 1


def test_stopped_worker_is_not_ready_then_replaced(own_server: Any) -> None:
    worker = pid_of(own_server, "worker-0")

    os.kill(worker, signal.SIGSTOP)
    until(lambda: Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[0] == "T")
    not_ready_s = until(lambda: own_server.get("/readyz").status == 503)
    replaced_s = not_ready_s + until(lambda: children(own_server)["worker-0"].pid not in (worker, None))

    assert own_server.get("/livez").status == 200
    assert not_ready_s < 5.0
    assert replaced_s < 15.0
    until(lambda: is_gone(worker))
    until(lambda: works(own_server))


def test_killed_front_reloads_no_model(own_server: Any) -> None:
    worker, front = pid_of(own_server, "worker-0"), pid_of(own_server, "front-0")

    os.kill(front, signal.SIGKILL)
    until(lambda: is_gone(front))
    assert works(own_server)  # waits in the backlog until the next front accepts

    after = children(own_server)
    assert after["front-0"].restarts == 1
    assert (after["worker-0"].pid, after["worker-0"].restarts) == (worker, 0)


async def test_streams_cut_at_random_leave_nothing_behind(own_server: Any) -> None:
    choose = random.Random(7)
    pids = {name: child.pid for name, child in children(own_server).items()}

    async def cut() -> None:
        stream = await open_stream(own_server, 440)
        if choose.random() < 0.8:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(choose.uniform(0, 0.5)):
                    await stream.hear_first()
        if choose.random() < 0.5:  # a reset instead of a polite end
            link = stream.writer.get_extra_info("socket")
            link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        stream.writer.transport.abort() if choose.random() < 0.5 else stream.writer.close()

    for _ in range(10):
        await asyncio.gather(*(cut() for _ in range(50)))

    def is_idle() -> bool:
        beat = children(own_server)["worker-0"].worker
        assert beat is not None
        is_empty = beat.num_running == beat.num_waiting == 0
        return is_empty and beat.free_blocks + beat.evictable_blocks == beat.total_blocks

    settled_s = await asyncio.to_thread(until, is_idle)
    assert settled_s < 2.0
    assert {name: child.pid for name, child in children(own_server).items()} == pids
    assert await asyncio.to_thread(works, own_server)


async def test_sigterm_lets_a_stream_finish(own_server: Any) -> None:
    pids = [pid_of(own_server, name) for name in ("front-0", "worker-0")]
    stream = await open_stream(own_server, 200)
    await stream.hear_first()

    supervisor = int(Path(f"/proc/{pids[0]}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(supervisor, signal.SIGTERM)
    await stream.hear_all()

    assert stream.frames()[-1] == "[DONE]"
    await asyncio.to_thread(until, lambda: all(map(is_gone, pids)))


def test_second_start_and_taken_port_have_their_own_exit_codes(own_server: Any, tmp_path: Path) -> None:
    port = own_server.url.rpartition(":")[2]
    command = [sys.executable, "-m", "headrace", "serve", str(tmp_path / "tiny"), "--port", port, "--admin-port", "0"]

    again = subprocess.run(command, env=own_server.env, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    other = {**own_server.env, "XDG_STATE_HOME": str(tmp_path / "other")}
    taken = subprocess.run(command, env=other, capture_output=True, text=True, timeout=PATIENCE_S, check=False)

    assert (again.returncode, taken.returncode) == (Exit.ALREADY_RUNNING, Exit.ADDRESS_IN_USE)
    assert "runs already (pid " in again.stderr
    assert f"port {port} on 127.0.0.1 is in use" in taken.stderr
    assert works(own_server)
