"""A front: one process that serves HTTP for its models' workers. ``python -m headrace.server.front --launch-fd N``.

What lives here: putting the parts of a front together, its background tasks, and its end. A supervisor starts it with
open sockets; SIGTERM drains it; when the supervisor dies it dies too.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import gc
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import msgspec
import uvloop

from headrace.base.clock import Clock, SystemClock
from headrace.base.errors import HeadraceError
from headrace.base.exits import Exit, exit_code_of
from headrace.base.log import get_log, setup_log
from headrace.base.process import die_with_parent, read_inherited
from headrace.base.recorder import Recorder
from headrace.gateway.deadlines import Deadlines
from headrace.gateway.grammars import GrammarGate
from headrace.gateway.kit import ModelText, load_kit
from headrace.gateway.ledger import Ledger
from headrace.gateway.models import Models
from headrace.gateway.pipeline import Limits, Pipeline
from headrace.gateway.render import Renderer, TextKit
from headrace.observe.process import WorkerMeter
from headrace.protocol.launch import FrontLaunch, ModelLaunch
from headrace.replica.local import LocalReplica
from headrace.replica.port import Readiness
from headrace.server.app import FrontState, admin_app, public_app
from headrace.server.connection import ConnectionLimits
from headrace.server.exchange import BODY_IDLE_S
from headrace.server.generate import StreamSettings
from headrace.server.listener import Listener

_RENDER_THREADS: Final = 2
_FIRST_LINK_S: Final = 2.0
_SWEEP_S: Final = 1.0
_LAG_PROBE_S: Final = 0.1
# After the drain's end, answers that were just failed get this long to reach their clients.
_LAST_BYTES_S: Final = 2.0

_log = get_log("headrace.server.front")  # __name__ is __main__ in the process


class Front:
    """The parts of a front, and its life.

    Args:
        launch: limits, names and paths; its descriptors are not read here.
        kits: tokenizer and chat template of each model in ``launch.models``.
        sockets: public listening sockets.
        admin_socket: listener for metrics and health, or None.
        header_timeout_s, body_idle_s, max_connections: limits that nobody has had to configure yet.
    """

    def __init__(
        self,
        launch: FrontLaunch,
        kits: Sequence[TextKit],
        sockets: list[socket.socket],
        admin_socket: socket.socket | None = None,
        *,
        clock: Clock | None = None,
        header_timeout_s: float = 10.0,
        body_idle_s: float = BODY_IDLE_S,
        max_connections: int = 2048,
    ) -> None:
        self._launch = launch
        self.clock = clock or SystemClock()
        self.recorder = Recorder()
        self.deadlines = Deadlines(self.clock)
        self._executor = ThreadPoolExecutor(_RENDER_THREADS, thread_name_prefix="render")
        self._grammars = GrammarGate()
        ledger = Ledger(self.recorder, self.clock)
        self._replicas: list[LocalReplica] = []
        self.models = Models(
            [self._make_pipeline(model, kit, ledger) for model, kit in zip(launch.models, kits, strict=True)]
        )
        connections = ConnectionLimits(
            self.clock,
            stalled_reader_timeout_s=launch.stalled_reader_timeout_s,
            max_connections=max_connections,
            header_timeout_s=header_timeout_s,
        )
        state = FrontState(
            models=self.models,
            ledger=ledger,
            recorder=self.recorder,
            meters={pipeline.name: WorkerMeter(self.recorder, pipeline.name) for pipeline in self.models},
            settings=StreamSettings(
                max_body_bytes=launch.max_body_bytes,
                header_hold_s=launch.header_hold_s,
                ping_interval_s=launch.ping_interval_s,
                body_idle_s=body_idle_s,
            ),
            executor=self._executor,
            started_at_s=int(self.clock.wall_s()),
            num_connections=lambda: len(connections.open_connections),
            is_loopback=launch.is_loopback,
        )
        self.listener = Listener(public_app(state), sockets, connections)
        self.admin: Listener | None = None
        if admin_socket is not None:
            admin_state = dataclasses.replace(state, is_loopback=True)
            self.admin = Listener(admin_app(admin_state), [admin_socket], ConnectionLimits(self.clock))
        self._tasks: list[asyncio.Task[None]] = []

    def _make_pipeline(self, model: ModelLaunch, kit: TextKit, ledger: Ledger) -> Pipeline:
        name = model.served_names[0]
        replica = LocalReplica(
            model.worker_socket_path,
            clock=self.clock,
            on_lost=lambda: self.recorder.count("headrace_worker_lost_total", model=name),
        )
        self._replicas.append(replica)
        return Pipeline(
            replica=replica,
            kit=kit,
            renderer=Renderer(kit, self._executor),
            grammars=self._grammars,
            deadlines=self.deadlines,
            ledger=ledger,
            clock=self.clock,
            limits=Limits(
                max_concurrent_requests=model.max_concurrent_requests,
                max_queued_requests=model.max_queued_requests,
                default_completion_tokens=model.default_completion_tokens,
                default_chat_tokens=model.default_chat_tokens,
                queue_timeout_s=model.queue_timeout_s,
                first_token_timeout_s=model.first_token_timeout_s,
                request_timeout_s=model.request_timeout_s,
                max_context_tokens=model.max_context_tokens,
            ),
            served_names=model.served_names,
            kind=model.kind,
        )

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Serves while the context is open; leaving it drops what is left."""
        for replica in self._replicas:
            self._spawn(replica.run())
        self._spawn(self.deadlines.run())
        self._spawn(self._sweep())
        self._spawn(self._probe_lag())
        if self.admin is not None:
            await self.admin.start()
        # What waits in the backlog of a front that was replaced is served, not refused for a link that is being made.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FIRST_LINK_S):
                await asyncio.gather(*(replica.wait_linked() for replica in self._replicas))
        await self.listener.start()
        _log.info("front_started", index=self._launch.index, pid=os.getpid(), models=list(self.models.names))
        try:
            yield
        finally:
            for listener in self._listeners():
                listener.stop_accepting()
                listener.cut_all()
                await listener.wait_ended()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._executor.shutdown(wait=False, cancel_futures=True)
            self._grammars.close()
            _log.info("front_stopped", index=self._launch.index)

    async def drain(self, hurry: asyncio.Event) -> bool:
        """Finishes what runs within the drain's limits, and refuses what is new.

        Args:
            hurry: set when the rest shall be ended at once.
        Returns:
            Whether anything had to be cut.
        """
        _log.info("drain_started", open_requests=self.models.num_open)
        launch = self._launch
        # New connections are still answered, with 503, so that routers and probes see what is happening.
        self.models.drain()
        self.listener.drain()
        started_at_s = self.clock.now_s()
        num_cut = 0
        has_ended_whole = False
        while self.models.num_open:
            passed_s = self.clock.now_s() - started_at_s
            if not has_ended_whole and (passed_s >= launch.drain_s or hurry.is_set()):
                has_ended_whole = True
                num_cut += self.models.end_all(is_stream=False)
            if passed_s >= launch.stream_drain_s or hurry.is_set():
                num_cut += self.models.end_all(is_stream=True)
                break
            await asyncio.sleep(0.05)
        self.listener.stop_accepting()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_BYTES_S):
                await self.listener.wait_ended()
        _log.info("drain_ended", cut_requests=num_cut)
        return num_cut > 0

    def _listeners(self) -> list[Listener]:
        return [self.listener] if self.admin is None else [self.listener, self.admin]

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.get_running_loop().create_task(work))

    async def _sweep(self) -> None:
        """Cuts stalled readers, and says once when a worker stops answering."""
        stalled: set[str] = set()
        while True:
            await asyncio.sleep(_SWEEP_S)
            for listener in self._listeners():
                listener.cut_stalled()
            found = {pipeline.name for pipeline in self.models if pipeline.replica.readiness is Readiness.STALLED}
            for name in sorted(found - stalled):
                _log.warning("worker_not_ready", model=name, running_requests=self.models.named(name).num_open)
            stalled = found

    async def _probe_lag(self) -> None:
        """Measures how late this loop's timers are."""
        loop = asyncio.get_running_loop()
        while True:
            due_at_s = loop.time() + _LAG_PROBE_S
            await asyncio.sleep(_LAG_PROBE_S)
            self.recorder.observe("headrace_event_loop_lag_seconds", max(loop.time() - due_at_s, 0.0))


async def serve(launch: FrontLaunch, kits: Sequence[TextKit]) -> int:
    """Runs a front until SIGTERM or SIGINT and its drain. Returns the exit code."""
    sockets = [socket.socket(fileno=fd) for fd in launch.listen_fds]
    admin = None if launch.admin_fd is None else socket.socket(fileno=launch.admin_fd)
    front = Front(launch, kits, sockets, admin)
    told = asyncio.Event()
    hurry = asyncio.Event()

    def on_signal() -> None:
        if told.is_set():
            hurry.set()
        told.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    async with front.running():
        await told.wait()
        was_cut = await front.drain(hurry)
    return Exit.WORK_CUT if was_cut else Exit.GOOD


def main(arguments: list[str] | None = None) -> int:
    """Runs a front as a process."""
    parser = argparse.ArgumentParser(prog="headrace.server.front")
    parser.add_argument("--launch-fd", type=int, required=True)
    options = parser.parse_args(arguments)
    die_with_parent()
    launch = msgspec.json.decode(read_inherited(options.launch_fd), type=FrontLaunch)
    setup_log(launch.log_level, is_json=launch.is_log_json)
    with contextlib.ExitStack() as held:
        # Looking for garbage among the hundred thousand strings of a vocabulary finds none, now or later.
        gc.disable()
        try:
            kits = [_load(model, held) for model in launch.models]
        except HeadraceError as error:
            sys.stderr.write(f"headrace front: {error.message}\n")
            return exit_code_of(error)
        gc.freeze()
        gc.enable()
        return uvloop.run(serve(launch, kits))


def _load(model: ModelLaunch, held: contextlib.ExitStack) -> ModelText:
    kit = load_kit(Path(model.model_path))
    held.callback(kit.close)
    return kit


if __name__ == "__main__":
    raise SystemExit(main())
