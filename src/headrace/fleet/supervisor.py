"""The supervisor: starts the fronts and workers of one server, watches them, restarts what dies, ends everything.

No HTTP and no model live here. A front's death touches no worker and a worker's no front; the listening sockets stay
open here, so clients of a restarting front wait in the backlog. Two watchers per worker: its pidfd (it ended) and its
heartbeat (it hangs, judged by ``fleet.liveness``). The pauses between restarts are ``fleet.restart``'s.

    SIGTERM, SIGINT, SIGHUP   drain: fronts finish what runs, then workers end
    the same again            fast: fronts cut what runs
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import headrace
from headrace.base.clock import Clock
from headrace.base.errors import ProtocolError
from headrace.base.exits import Exit, is_permanent
from headrace.base.log import get_log
from headrace.fleet import liveness, restart
from headrace.fleet.liveness import Liveness, LivenessConfig
from headrace.fleet.process import Child, ChildSpec, WaitingChild, describe_exit
from headrace.fleet.restart import RestartConfig
from headrace.fleet.sockets import Listener, open_unix_listener
from headrace.fleet.status import (
    CONTROL_SOCKET_NAME,
    ChildState,
    ChildStatus,
    ServerState,
    ServerStatus,
    serve_control,
)
from headrace.protocol.frames import LINK_VERSION, FrameReader, FromWorker, Hello, Status, WorkerState, encode_frame
from headrace.protocol.launch import Kind

STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

log = get_log(__name__)


@dataclass(frozen=True, slots=True)
class SupervisorConfig:
    """Limits, in seconds unless said otherwise.

    Args:
        drain_s: what fronts may take to end after SIGTERM; they bound their own drains, this is the backstop.
        fast_s: what fronts may take after the second signal.
        worker_stop_s: what workers may take to end once the fronts are gone.
        reconnect_s: pause before the link to a worker is tried again.
        proven_s: a front that has lived this long has started well.
    """

    liveness: LivenessConfig = field(default_factory=LivenessConfig)
    restart: RestartConfig = field(default_factory=RestartConfig)
    drain_s: float = 135.0
    fast_s: float = 0.9
    worker_stop_s: float = 5.0
    reconnect_s: float = 0.25
    proven_s: float = 5.0


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """A worker to run, the socket path on which it answers, and its model's canonical name."""

    spec: ChildSpec
    socket_path: Path
    model: str


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that one server consists of.

    Args:
        name: the instance's name: its port.
        models: canonical names of what is served.
        kinds: what each of them gives.
        folder: its private runtime folder.
        listeners, admin_listeners: open TCP sockets; the fronts' specs pass their descriptors on. The workers' Unix
            sockets are held open by the caller.
    """

    name: str
    models: Sequence[str]
    kinds: Sequence[Kind]
    folder: Path
    listeners: Sequence[Listener]
    admin_listeners: Sequence[Listener]
    workers: Sequence[WorkerPlan]
    fronts: Sequence[ChildSpec]


@dataclass(slots=True, eq=False)
class _Slot:
    """One place for a child: the process that fills it now, and its history."""

    spec: ChildSpec
    socket_path: Path | None = None
    model: str = ""
    child: Child | None = None
    state: ChildState = ChildState.STARTING
    started_at_s: float = 0.0
    next_start_at_s: float | None = None
    num_starts: int = 0
    deaths_at_s: tuple[float, ...] = ()
    last_exit: str = ""
    has_been_up: bool = False
    view: Liveness = field(default_factory=Liveness)
    timer: asyncio.TimerHandle | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class Supervisor:
    """Runs a plan to its end.

    Args:
        on_ready: called once, when every worker is ready for the first time and every front runs.
        waiting: by the names of their specs, children that were started already and wait for their launch values.
        env: the environment that children get the allowed part of.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        clock: Clock,
        env: Mapping[str, str],
        config: SupervisorConfig | None = None,
        on_ready: Callable[[], None] = lambda: None,
        waiting: Mapping[str, WaitingChild] | None = None,
    ) -> None:
        self._plan = plan
        self._clock = clock
        self._env = env
        self._config = config or SupervisorConfig()
        self._on_ready = on_ready
        self._waiting = dict(waiting or {})
        self._workers = [_Slot(worker.spec, worker.socket_path, worker.model) for worker in plan.workers]
        self._fronts = [_Slot(spec) for spec in plan.fronts]
        self._state = ServerState.STARTING
        self._started_at_s = clock.now_s()
        self._started_wall_s = clock.wall_s()
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._exit = Exit.GOOD

    def request_stop(self) -> None:
        """Starts the drain; called again, hurries it."""
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    async def run(self) -> Exit:
        """Starts everything, waits for the order to stop (or a fault that no restart cures), and ends everything.

        The signal handlers stay until the loop closes: a signal that comes late must not change how this ends.
        """
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup keeps SIGHUP ignored
                loop.add_signal_handler(number, self.request_stop)
        control = await serve_control(open_unix_listener(self._plan.folder / CONTROL_SOCKET_NAME), self.status)
        log.info("supervisor_started", pid=os.getpid(), urls=[listener.url for listener in self._plan.listeners])
        tasks = [
            asyncio.create_task(self._tick()),
            *(asyncio.create_task(self._listen(slot)) for slot in self._workers),
        ]
        try:
            for slot in (*self._workers, *self._fronts):  # workers first: loading is the longest
                self._start(slot)
            await self._stop.wait()
            await self._drain()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._kill_all()
            control.close()
        log.info("supervisor_stopped", exit_code=int(self._exit))
        return self._exit

    def status(self) -> ServerStatus:
        """Gives what `headrace status` shows."""
        now_s = self._clock.now_s()
        return ServerStatus(
            name=self._plan.name,
            version=headrace.__version__,
            pid=os.getpid(),
            state=self._state,
            models=list(self._plan.models),
            urls=[listener.url for listener in self._plan.listeners],
            admin_urls=[listener.url for listener in self._plan.admin_listeners],
            started_at_s=self._started_wall_s,
            uptime_s=now_s - self._started_at_s,
            children=[
                ChildStatus(
                    name=slot.spec.name,
                    role=slot.spec.role,
                    model=slot.model,
                    state=slot.state,
                    pid=slot.child.pid if slot.child else None,
                    restarts=max(0, slot.num_starts - 1),
                    uptime_s=now_s - slot.started_at_s if slot.child else 0.0,
                    last_exit=slot.last_exit,
                    next_start_s=None if slot.next_start_at_s is None else max(0.0, slot.next_start_at_s - now_s),
                    worker=slot.view.status if slot.child else None,
                )
                for slot in (*self._fronts, *self._workers)
            ],
        )

    def _start(self, slot: _Slot) -> None:
        slot.timer = slot.next_start_at_s = None
        slot.view = Liveness()
        slot.started_at_s = self._clock.now_s()
        slot.num_starts += 1
        try:
            child = Child(slot.spec, self._env, self._waiting.pop(slot.spec.name, None))
        except OSError as error:  # no memory or process table full: as good as a death
            log.error("child_exited", child=slot.spec.name, exit=f"cannot start: {error.strerror}")
            slot.last_exit = f"cannot start: {error.strerror}"
            self._restart_later(slot)
            return
        slot.child = child
        slot.state = ChildState.STARTING if slot in self._workers else ChildState.RUNNING
        asyncio.get_running_loop().add_reader(child.pidfd, self._on_exit, slot)
        log.info("child_started", child=slot.spec.name, pid=child.pid, num_starts=slot.num_starts)

    def _on_exit(self, slot: _Slot) -> None:
        child = slot.child
        assert child is not None
        asyncio.get_running_loop().remove_reader(child.pidfd)
        code = child.reap()
        lived_s = self._clock.now_s() - slot.started_at_s
        slot.child = None
        slot.last_exit = describe_exit(code)
        has_been_up = slot.has_been_up or (slot in self._fronts and lived_s > self._config.proven_s)
        if self._stop.is_set():
            slot.state = ChildState.STOPPED
            slot.ended.set()
            if slot in self._fronts and code not in (Exit.GOOD, -signal.SIGTERM):
                self._exit = self._exit or Exit.WORK_CUT
            log.info(
                "child_exited", child=slot.spec.name, pid=child.pid, exit=slot.last_exit, lived_s=round(lived_s, 3)
            )
            return
        log.error("child_exited", child=slot.spec.name, pid=child.pid, exit=slot.last_exit, lived_s=round(lived_s, 3))
        if is_permanent(code) and not has_been_up:
            slot.state = ChildState.STOPPED
            slot.ended.set()
            self._exit = Exit(code)
            self._stop.set()
            self._hurry.set()
            return
        slot.has_been_up = has_been_up
        self._restart_later(slot)

    def _restart_later(self, slot: _Slot) -> None:
        now_s = self._clock.now_s()
        slot.deaths_at_s, decision = restart.decide(slot.deaths_at_s, self._config.restart, now_s)
        slot.state = ChildState.CRASH_LOOP if decision.is_crash_loop else ChildState.RESTARTING
        slot.next_start_at_s = now_s + decision.pause_s
        slot.timer = asyncio.get_running_loop().call_later(decision.pause_s, self._start, slot)
        event = "child_crash_loop" if decision.is_crash_loop else "child_restarting"
        log.warning(event, child=slot.spec.name, pause_s=decision.pause_s, reason=decision.reason)

    async def _listen(self, slot: _Slot) -> None:
        """Keeps a link to a worker and notes what it says; a broken link is made again."""
        assert slot.socket_path is not None
        while True:
            with contextlib.suppress(OSError, ProtocolError):
                reader, writer = await asyncio.open_unix_connection(slot.socket_path)
                try:
                    writer.write(encode_frame(Hello(version=LINK_VERSION, peer="supervisor")))
                    frames = FrameReader(FromWorker)
                    while data := await reader.read(2**16):
                        for frame in frames.feed(data):
                            self._hear(slot, frame if isinstance(frame, Status) else None)
                finally:
                    writer.close()
            await asyncio.sleep(self._config.reconnect_s)

    def _hear(self, slot: _Slot, status: Status | None) -> None:
        slot.view = liveness.hear(slot.view, status)
        if status is None or status.state is not WorkerState.READY or slot.child is None:
            return
        slot.state = ChildState.RUNNING
        slot.has_been_up = True
        is_up = all(worker.has_been_up for worker in self._workers) and all(front.child for front in self._fronts)
        if self._state is ServerState.STARTING and is_up:
            self._state = ServerState.READY
            self._on_ready()

    async def _tick(self) -> None:
        """Counts time against the workers and kills the one that hangs; its end is then handled like any other."""
        last_s = self._clock.now_s()
        while True:
            await asyncio.sleep(self._config.liveness.tick_s)
            now_s = self._clock.now_s()
            for slot in self._workers:
                if slot.child is None:
                    continue
                slot.view = liveness.tick(slot.view, now_s - last_s, self._config.liveness)
                fault = liveness.find_fault(slot.view, self._config.liveness)
                if fault is not None:
                    log.error("child_killed", child=slot.spec.name, pid=slot.child.pid, reason=fault)
                    slot.child.send_signal(signal.SIGKILL)
                    slot.view = Liveness()  # the kill is on its way; do not count on
            last_s = now_s

    async def _drain(self) -> None:
        self._state = ServerState.DRAINING
        log.info("drain_started", is_fast=self._hurry.is_set())
        for listener in (*self._plan.listeners, *self._plan.admin_listeners):
            listener.socket.close()  # the fronts hold theirs, and close them when they stop accepting
        for slot in (*self._fronts, *self._workers):
            if slot.timer is not None:
                slot.timer.cancel()
            if slot.child is None:
                slot.state = ChildState.STOPPED
                slot.next_start_at_s = None
                slot.ended.set()
        await self._end(self._fronts, self._config.drain_s)
        await self._end(self._workers, self._config.worker_stop_s)
        log.info("drain_ended", exit_code=int(self._exit))

    async def _end(self, slots: Sequence[_Slot], limit_s: float) -> None:
        """Ends children: SIGTERM; at the second signal SIGTERM again and ``fast_s``; SIGKILL at the limit."""
        _signal(slots, signal.SIGTERM)
        ended = asyncio.ensure_future(asyncio.gather(*(slot.ended.wait() for slot in slots)))
        hurried = asyncio.create_task(self._hurry.wait())
        await asyncio.wait((ended, hurried), timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        if not ended.done() and self._hurry.is_set():
            _signal(slots, signal.SIGTERM)
            await asyncio.wait((ended,), timeout=self._config.fast_s)
        hurried.cancel()
        if not ended.done():
            for slot in slots:
                if slot.child is not None:
                    log.warning("child_killed", child=slot.spec.name, pid=slot.child.pid, reason="did not end in time")
            _signal(slots, signal.SIGKILL)
        await ended

    def _kill_all(self) -> None:
        """Ends what is left after a bug of our own; after a drain nothing is."""
        for slot in (*self._fronts, *self._workers):
            if slot.child is not None:
                asyncio.get_running_loop().remove_reader(slot.child.pidfd)
                slot.child.send_signal(signal.SIGKILL)
                slot.child.reap()
                slot.child = None


def _signal(slots: Sequence[_Slot], number: signal.Signals) -> None:
    for slot in slots:
        if slot.child is not None:
            slot.child.send_signal(number)
