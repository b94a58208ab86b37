"""Puts one server together: opens its sockets, takes its lock, writes its plan, and runs the supervisor over it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from headrace.base.clock import Clock
from headrace.base.config import Config
from headrace.base.errors import AlreadyRunningError, ConfigError
from headrace.base.exits import Exit
from headrace.base.log import get_log
from headrace.fleet.gate import open_gate
from headrace.fleet.launch import Resolved, front_launch, model_launch, worker_launch
from headrace.fleet.process import ChildSpec, WaitingChild, module_command
from headrace.fleet.sockets import (
    Listener,
    is_loopback,
    open_listeners,
    open_unix_listener,
    private_folder,
    runtime_folder,
    state_folder,
)
from headrace.fleet.supervisor import Plan, Supervisor, SupervisorConfig, WorkerPlan
from headrace.protocol.launch import GateLaunch, Kind

WORKER_MODULE: Final = "headrace.engine.worker"
FRONT_MODULE: Final = "headrace.server.front"
# A front needs a descriptor per client and a worker one per file; 64k is what service managers grant.
_OPEN_FILES: Final = 65_536
# Drain of the fronts plus what they take to say goodbye.
_DRAIN_MARGIN_S: Final = 10.0
# Short: a socket's whole path has 107 bytes.
_WORKER_SOCKET_NAME: Final = "w{}.sock"
_WORKER_NAME: Final = "worker-{}"
_FRONT_NAME: Final = "front-{}"

log = get_log(__name__)


@dataclass(frozen=True, slots=True)
class Model:
    """A model to serve.

    Args:
        path: where it lies.
        names: what requests call it, the canonical name first.
        config: its own settings.
        resolved: what they come to.
        kind: what it gives.
        memory_bytes: its part of a memory that several models share; None for a model alone.
    """

    path: Path
    names: tuple[str, ...]
    config: Config
    resolved: Resolved
    kind: Kind = Kind.GENERATE
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Modules:
    """Commands of the children; tests put stand-ins here."""

    worker: Sequence[str] = field(default_factory=lambda: module_command(WORKER_MODULE))
    front: Sequence[str] = field(default_factory=lambda: module_command(FRONT_MODULE))


async def run_server(
    config: Config,
    models: Sequence[Model] | Callable[[], Model],
    *,
    clock: Clock,
    env: Mapping[str, str],
    on_ready: Callable[[Plan], None] = lambda _plan: None,
    modules: Modules | None = None,
    supervisor_config: SupervisorConfig | None = None,
) -> Exit:
    """Serves models until told to stop.

    Args:
        config: the settings of the server itself.
        models: at least one; no name belongs to two. Or a function that gives the only one in a moment: its processes
            start before it is called, and import their modules meanwhile.

    Raises:
        HeadraceError: what ``models`` raises.
        AddressInUseError, ConfigError, MachineError: as the sockets' functions say.
        AlreadyRunningError: a server of this user holds the same port and state folder.
    """
    server = config.server
    is_local = is_loopback(server.host)
    if not is_local and not server.accept_open_access:
        raise ConfigError(
            f"server.host {server.host} is reached by other machines, and no keys are set: bind 127.0.0.1, "
            "or pass --accept-open-access if everybody there may use this server"
        )
    if not is_loopback(server.admin_host):
        raise ConfigError(f"server.admin_host {server.admin_host} must be a loopback address: use 127.0.0.1")
    _set_process_limits()
    state = state_folder(config.paths.state, env)
    with contextlib.ExitStack() as held:
        # Locked before the port is tried, so that a second start of ours is told from another program's port.
        if server.port:
            held.callback(os.close, _lock(state, str(server.port)))
        listeners = open_listeners(server.host, server.port, setting="server.port")
        for listener in listeners:
            held.enter_context(listener.socket)
        admin = open_listeners(server.admin_host, server.admin_port, setting="server.admin_port")
        for listener in admin:
            held.enter_context(listener.socket)
        name = str(listeners[0].port)
        if not server.port:
            held.callback(os.close, _lock(state, name))
        folder = private_folder(runtime_folder(config.paths.runtime, env) / name)
        held.callback(_remove, folder)
        modules = modules or Modules()
        sockets = _WorkerSockets(folder, held)
        front_fds = [
            # One front answers for metrics and admin: a scrape must not meet another process each time.
            tuple(listener.socket.fileno() for listener in (*listeners, *(admin[:1] if index == 0 else ())))
            for index in range(server.fronts)
        ]
        waiting: dict[str, WaitingChild] = {}
        if callable(models):
            early = {_WORKER_NAME.format(0): (modules.worker, (sockets.fd(0),))}  # first: loading is the longest
            early |= {_FRONT_NAME.format(index): (modules.front, fds) for index, fds in enumerate(front_fds)}
            for child, (command, fds) in early.items():
                waiting[child] = WaitingChild(command, fds, env)
                held.callback(waiting[child].close)
            models = [models()]
        gates = open_gate(
            [model.resolved.threads for model in models],
            [model.config.inference_engine.thread_share for model in models],
            len(os.sched_getaffinity(0)),
            held,
        )
        places = [
            _Place(model, index, sockets.path(index), sockets.fd(index), gates[index])
            for index, model in enumerate(models)
        ]
        plan = _make_plan(config, places, folder, listeners, admin, front_fds, modules)
        if not is_local:
            log.warning("config_warning", key="server.host", message="serving without keys to other machines")
        limits = supervisor_config or SupervisorConfig(
            drain_s=max(server.drain_s, server.stream_drain_s) + _DRAIN_MARGIN_S
        )
        supervisor = Supervisor(
            plan, clock=clock, env=env, config=limits, on_ready=lambda: on_ready(plan), waiting=waiting
        )
        return await supervisor.run()


class _WorkerSockets:
    """The workers' sockets, each opened when it is first asked for."""

    def __init__(self, folder: Path, held: contextlib.ExitStack) -> None:
        self._folder = folder
        self._held = held
        self._fds: dict[int, int] = {}

    def path(self, index: int) -> Path:
        """Where the fronts find it."""
        return self._folder / _WORKER_SOCKET_NAME.format(index)

    def fd(self, index: int) -> int:
        """What the worker inherits."""
        if index not in self._fds:
            self._fds[index] = self._held.enter_context(open_unix_listener(self.path(index))).fileno()
        return self._fds[index]


@dataclass(frozen=True, slots=True)
class _Place:
    """A model, the socket of its worker, and the worker's place at the gate."""

    model: Model
    index: int
    socket_path: Path
    socket_fd: int
    gate: GateLaunch | None


def _make_plan(
    config: Config,
    places: Sequence[_Place],
    folder: Path,
    listeners: list[Listener],
    admin: list[Listener],
    front_fds: Sequence[tuple[int, ...]],
    modules: Modules,
) -> Plan:
    is_local = is_loopback(config.server.host)
    listen_fds = [listener.socket.fileno() for listener in listeners]
    behind = [
        model_launch(
            place.model.config,
            place.model.resolved,
            model_path=place.model.path,
            served_names=place.model.names,
            kind=place.model.kind,
            worker_socket_path=place.socket_path,
        )
        for place in places
    ]
    fronts = []
    for index, fds in enumerate(front_fds):
        admin_fd = admin[0].socket.fileno() if index == 0 else None
        launch = front_launch(
            config, behind, listen_fds=listen_fds, admin_fd=admin_fd, is_loopback=is_local, index=index
        )
        fronts.append(
            ChildSpec(
                name=_FRONT_NAME.format(index),
                role="front",
                command=modules.front,
                launch=msgspec.json.encode(launch),
                pass_fds=fds,
            )
        )
    return Plan(
        name=folder.name,
        models=tuple(place.model.names[0] for place in places),
        kinds=tuple(place.model.kind for place in places),
        folder=folder,
        listeners=listeners,
        admin_listeners=admin,
        workers=[_plan_worker(place, modules) for place in places],
        fronts=fronts,
    )


def _plan_worker(place: _Place, modules: Modules) -> WorkerPlan:
    model = place.model
    launch = worker_launch(
        model.config,
        model.resolved,
        model_path=model.path,
        name=model.names[0],
        socket_fd=place.socket_fd,
        memory_bytes=model.memory_bytes,
        gate=place.gate,
    )
    gate_fds = () if place.gate is None else (place.gate.memory_fd, *place.gate.wake_fds)
    spec = ChildSpec(
        name=_WORKER_NAME.format(place.index),
        role="worker",
        command=modules.worker,
        launch=msgspec.json.encode(launch),
        pass_fds=(place.socket_fd, *gate_fds),
    )
    return WorkerPlan(spec, place.socket_path, model.names[0])


def _remove(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


def _lock(state: Path, name: str) -> int:
    """Gives a descriptor that holds the lock of the server ``name`` until it is closed or this process dies."""
    path = state / f"serve-{name}.lock"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.read(fd, 32).decode(errors="replace").strip()
        os.close(fd)
        raise AlreadyRunningError(
            f"a server on port {name} runs already (pid {holder or 'unknown'}, lock {path}): stop it "
            "or set another server.port"
        ) from error
    os.ftruncate(fd, 0)
    os.write(fd, f"{os.getpid()}\n".encode())
    return fd


def _set_process_limits() -> None:
    """No core dumps, which would hold prompts and keys; as many open files as the system lets us have."""
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
