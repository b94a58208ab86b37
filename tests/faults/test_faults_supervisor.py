"""Kill, stop and wedge real child processes under a real supervisor, and prove each time that the fault took.

The worker is the mock worker in a process of its own, the front `fake_front.py`; time limits are short.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest

from headrace.base.clock import SystemClock
from headrace.base.config import load_config
from headrace.base.errors import AlreadyRunningError, ConfigError, MachineError
from headrace.base.exits import Exit
from headrace.fleet.launch import ModelFacts, resolve
from headrace.fleet.liveness import LivenessConfig
from headrace.fleet.restart import RestartConfig
from headrace.fleet.server import Model, Modules, run_server
from headrace.fleet.status import ChildState, ChildStatus, ServerState, ServerStatus, read_status
from headrace.fleet.supervisor import SupervisorConfig
from headrace.protocol.frames import LINK_VERSION, Hello, Submit, encode_frame
from headrace.testing.mock_worker import Fault, Reply, Script

QUICK = SupervisorConfig(
    liveness=LivenessConfig(tick_s=0.05, silent_s=1.5, loading_silent_s=20, start_s=60),
    restart=RestartConfig(first_pause_s=0.05, longest_pause_s=0.2),
    drain_s=20.0,
    fast_s=0.3,
    reconnect_s=0.05,
)
# Longest wait for something that a loaded machine takes a moment for; a run that works never waits so long.
PATIENCE_S = 60.0


class Server:
    """A running server and what the tests look at."""

    def __init__(self, folder: Path, task: asyncio.Task[Exit]) -> None:
        self.folder = folder
        self.task = task

    async def status(self) -> ServerStatus:
        (path,) = self.folder.glob("run/*/control.sock")
        return await asyncio.to_thread(read_status, path)

    async def child(self, name: str) -> ChildStatus:
        return next(child for child in (await self.status()).children if child.name == name)

    async def pid(self, name: str) -> int:
        pid = (await self.child(name)).pid
        assert pid is not None
        return pid

    async def until(self, name: str, is_so: Callable[[ChildStatus], bool]) -> ChildStatus:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                child = await self.child(name)
                if is_so(child):
                    return child
                await asyncio.sleep(0.02)

    async def stop(self) -> Exit:
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(PATIENCE_S):
            return await self.task


@contextlib.asynccontextmanager
async def serve(
    folder: Path,
    *,
    script: Script | None = None,
    manners: str = "end",
    worker: tuple[str, ...] | None = None,
    wait_ready: bool = True,
    is_early: bool = False,
) -> AsyncIterator[Server]:
    script_file = folder / "script.json"
    script_file.write_bytes(msgspec.json.encode(script or Script()))
    config = load_config(
        None,
        {},
        {
            "server.port": 0,
            "server.admin_port": 0,
            "paths.state": str(folder / "state"),
            "paths.runtime": str(folder / "run"),
        },
    )
    mock = (sys.executable, "-P", "-m", "headrace.testing.mock_worker", "--script", str(script_file))
    front = (sys.executable, "-S", str(Path(__file__).with_name("fake_front.py")), manners)
    ready = asyncio.Event()
    facts = ModelFacts("decoder-only", 512, None)
    model = Model(Path("/nowhere"), ("mock",), config, resolve(config, facts, num_cpus=1))
    task = asyncio.create_task(
        run_server(
            config,
            (lambda: model) if is_early else [model],
            clock=SystemClock(),
            env=os.environ,
            on_ready=lambda _plan: ready.set(),
            modules=Modules(worker=worker or mock, front=front),
            supervisor_config=QUICK,
        )
    )
    try:
        if wait_ready:
            waiting = asyncio.create_task(ready.wait())
            await asyncio.wait((waiting, task), timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            assert ready.is_set()
        yield Server(folder, task)
    finally:
        if not task.done():
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            await task


def process_state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def is_dead(pid: int) -> bool:
    """Whether no thread is left: the first may be a zombie while another still dies in `accept` with a client."""
    try:
        return process_state(pid) == "Z" and len(os.listdir(f"/proc/{pid}/task")) == 1
    except FileNotFoundError:
        return True


async def ask_front(url: str) -> int:
    host, port = url.removeprefix("http://").split(":")
    async with asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection(host, int(port))
        answer = await reader.read()
        writer.close()
    return int(answer)


async def submit(server: Server) -> asyncio.StreamWriter:
    (path,) = server.folder.glob("run/*/w0.sock")
    _, writer = await asyncio.open_unix_connection(path)
    writer.write(encode_frame(Hello(LINK_VERSION, "front")) + encode_frame(Submit("r", [1, 2], 8)))
    return writer


async def test_killed_worker_is_replaced_and_the_front_lives_on(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        worker, front = await server.pid("worker-0"), await server.pid("front-0")

        os.kill(worker, signal.SIGKILL)
        after = await server.until("worker-0", lambda child: child.pid not in (None, worker))

        assert is_gone(worker)
        assert (after.restarts, after.last_exit) == (1, "signal SIGKILL")
        assert await server.pid("front-0") == front
        await server.until("worker-0", lambda child: child.state is ChildState.RUNNING)


async def test_killed_front_is_replaced_without_a_lost_connection_or_a_reload(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        worker, front = await server.pid("worker-0"), await server.pid("front-0")
        url = (await server.status()).urls[0]
        assert await ask_front(url) == front

        os.kill(front, signal.SIGKILL)
        while not is_dead(front):  # a dying process may still accept, and take that client along
            await asyncio.sleep(0)
        answers = await asyncio.gather(*(ask_front(url) for _ in range(16)))

        assert is_gone(front)
        assert set(answers) == {await server.pid("front-0")}
        assert await server.pid("worker-0") == worker


async def test_stopped_worker_is_killed_and_replaced(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        worker = await server.pid("worker-0")

        os.kill(worker, signal.SIGSTOP)
        async with asyncio.timeout(PATIENCE_S):
            while process_state(worker) != "T":
                await asyncio.sleep(0.01)
        after = await server.until("worker-0", lambda child: child.pid not in (None, worker))

        assert is_gone(worker)
        assert after.last_exit == "signal SIGKILL"
        await server.until("worker-0", lambda child: child.state is ChildState.RUNNING)


async def test_wedged_worker_that_still_beats_is_killed_and_replaced(tmp_path: Path) -> None:
    script = Script(replies=[Reply(fault=Fault.HANG, fault_at_token=2)])
    async with serve(tmp_path, script=script) as server:
        worker = await server.pid("worker-0")

        writer = await submit(server)
        after = await server.until("worker-0", lambda child: child.pid not in (None, worker))
        writer.close()

        assert is_gone(worker)
        assert after.last_exit == "signal SIGKILL"


async def test_idle_worker_and_worker_that_steps_are_left_alone(tmp_path: Path) -> None:
    script = Script(default=Reply(ids=list(range(200)), inter_token_s=0.02))
    async with serve(tmp_path, script=script) as server:
        worker = await server.pid("worker-0")

        writer = await submit(server)
        await asyncio.sleep(2.5 * QUICK.liveness.silent_s)  # the negative control needs the time to pass
        writer.close()

        assert await server.pid("worker-0") == worker
        assert (await server.child("worker-0")).restarts == 0


async def test_worker_that_dies_at_once_ends_in_a_crash_loop(tmp_path: Path) -> None:
    async with serve(tmp_path, worker=(sys.executable, "-S", "-c", "raise SystemExit(1)"), wait_ready=False) as server:
        async with asyncio.timeout(PATIENCE_S):
            while not list(tmp_path.glob("run/*/control.sock")):
                await asyncio.sleep(0.01)
        after = await server.until("worker-0", lambda child: child.state is ChildState.CRASH_LOOP)

        assert after.restarts == 4
        assert after.last_exit == "exit 1"
        assert (await server.status()).state is ServerState.STARTING


@pytest.mark.parametrize("code", [Exit.USAGE, Exit.MODEL, Exit.MACHINE])
async def test_fault_that_no_restart_cures_ends_the_server_with_its_code(tmp_path: Path, code: Exit) -> None:
    worker = (sys.executable, "-S", "-c", f"raise SystemExit({int(code)})")
    async with serve(tmp_path, worker=worker, wait_ready=False) as server:
        async with asyncio.timeout(PATIENCE_S):
            result = await server.task

    assert result is code


async def test_drain_ends_fronts_then_workers_and_leaves_nothing(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        pids = [child.pid for child in (await server.status()).children]

        result = await server.stop()

        assert result is Exit.GOOD
        assert all(is_gone(pid) for pid in pids if pid)
        assert list(tmp_path.glob("run/*")) == []


async def test_second_signal_hurries_a_front_that_takes_its_time(tmp_path: Path) -> None:
    async with serve(tmp_path, manners="cut") as server:
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(PATIENCE_S):
            while (await server.status()).state is not ServerState.DRAINING:
                await asyncio.sleep(0.01)

        assert await server.stop() is Exit.WORK_CUT


async def test_front_that_ignores_both_signals_is_killed(tmp_path: Path) -> None:
    async with serve(tmp_path, manners="ignore") as server:
        front = await server.pid("front-0")
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(PATIENCE_S):
            while (await server.status()).state is not ServerState.DRAINING:
                await asyncio.sleep(0.01)

        assert await server.stop() is Exit.WORK_CUT
        assert is_gone(front)


async def test_children_end_with_their_supervisor(tmp_path: Path) -> None:
    code = (
        "import sys, subprocess\n"
        "from headrace.fleet.process import Child, ChildSpec\n"
        "import socket, os, json\n"
        f"s = socket.socket(socket.AF_UNIX); s.bind({str(tmp_path / 'w')!r}); s.listen()\n"
        "launch = json.dumps({'model_path': '', 'served_name': 'm', 'socket_fd': s.fileno()}).encode()\n"
        "command = (sys.executable, '-P', '-m', 'headrace.testing.mock_worker')\n"
        "child = Child(ChildSpec('w', 'worker', command, launch, (s.fileno(),)), os.environ)\n"
        "c = socket.socket(socket.AF_UNIX); c.connect(" + repr(str(tmp_path / "w")) + ")\n"
        "from headrace.protocol.frames import *\n"
        "c.sendall(encode_frame(Hello(LINK_VERSION, 'supervisor'))); c.recv(1)\n"
        "print(child.pid, flush=True); sys.stdin.read()\n"
    )
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    worker = int(await parent.stdout.readline())
    assert not is_gone(worker)

    parent.kill()
    await parent.wait()

    async with asyncio.timeout(2.0):
        while not is_gone(worker) and process_state(worker) != "Z":
            await asyncio.sleep(0.01)


async def test_children_that_start_before_their_model_is_known_are_the_ones_that_serve(tmp_path: Path) -> None:
    async with serve(tmp_path, is_early=True) as server:
        children = (await server.status()).children

        assert {child.name: (child.state, child.restarts) for child in children} == {
            "front-0": (ChildState.RUNNING, 0),
            "worker-0": (ChildState.RUNNING, 0),
        }
        os.kill(await server.pid("worker-0"), signal.SIGKILL)
        again = await server.until("worker-0", lambda child: child.restarts == 1 and child.pid is not None)
        assert again.last_exit == "signal SIGKILL"


async def test_children_that_started_early_end_when_the_model_is_refused(tmp_path: Path) -> None:
    folders = {"paths.state": str(tmp_path / "state"), "paths.runtime": str(tmp_path / "run")}
    config = load_config(None, {}, {"server.port": 0, "server.admin_port": 0, **folders})
    started = tmp_path / "started"
    code = f"import os; open({str(started)!r} + str(os.getpid()), 'w').close(); import signal; signal.pause()"
    command = (sys.executable, "-S", "-c", code)

    def refuse() -> Model:
        while len(list(tmp_path.glob("started*"))) < 2:
            time.sleep(0.01)
        raise ConfigError("no such model")

    with pytest.raises(ConfigError, match="no such model"):
        await run_server(config, refuse, clock=SystemClock(), env={}, modules=Modules(worker=command, front=command))

    pids = [int(path.name.removeprefix("started")) for path in tmp_path.glob("started*")]
    assert [is_gone(pid) for pid in pids] == [True, True]


async def test_second_server_on_the_same_port_is_told_who_runs(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        port = int((await server.status()).name)
        config = load_config(None, {}, {"server.port": port, "paths.state": str(tmp_path / "state")})
        facts = ModelFacts("decoder-only", 512, None)
        model = Model(Path("/nowhere"), ("mock",), config, resolve(config, facts, num_cpus=1))

        with pytest.raises(AlreadyRunningError, match=rf"port {port} runs already \(pid {os.getpid()},"):
            await run_server(config, [model], clock=SystemClock(), env={})


@pytest.mark.parametrize(
    "line", [b"", b"\n", b"{}\n", b'{"command": 1}\n', b"\xff" * 70_000 + b"\n", b'{"command":"x"}\n']
)
async def test_control_socket_survives_nonsense(tmp_path: Path, line: bytes) -> None:
    async with serve(tmp_path) as server:
        (path,) = tmp_path.glob("run/*/control.sock")
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(line)
        writer.write_eof()
        answer = await reader.read()
        writer.close()

        assert answer in (b"", b'{"error":"unknown command \'x\'"}\n')
        assert (await server.status()).state is ServerState.READY


def test_status_of_a_dead_server_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="no server answers"):
        read_status(tmp_path / "control.sock")


async def test_status_is_json_with_pids_states_and_ports(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        status = json.loads(msgspec.json.encode(await server.status()))

        assert status["models"] == ["mock"]
        assert status["urls"][0].startswith("http://127.0.0.1:")
        assert [(child["role"], child["state"], child["restarts"]) for child in status["children"]] == [
            ("front", "running", 0),
            ("worker", "running", 0),
        ]
        assert status["children"][1]["worker"]["state"] == "ready"
