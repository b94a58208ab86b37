"""What a running server says about itself, and the control socket on which it says it.

One JSON line in, one JSON line out: ``{"command": "status"}`` → ``ServerStatus``. Only this user may connect.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Final

import msgspec

from headrace.base.errors import MachineError, ProtocolError
from headrace.protocol.frames import Status

CONTROL_SOCKET_NAME: Final = "control.sock"
_MAX_LINE_BYTES: Final = 2**20
_TIMEOUT_S: Final = 5.0


class ServerState(StrEnum):
    """Where a server is in its life."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


class ChildState(StrEnum):
    """Where a child is in its life."""

    STARTING = "starting"
    RUNNING = "running"
    RESTARTING = "restarting"
    CRASH_LOOP = "crash_loop"
    STOPPED = "stopped"


class ChildStatus(msgspec.Struct, frozen=True):
    """One front or worker.

    Args:
        pid: None while none runs.
        restarts: starts after the first.
        uptime_s: since its last start, 0 while none runs.
        last_exit: how the one before ended, ``signal SIGKILL``; empty when none has ended.
        next_start_s: seconds until it is started again, None while it runs.
        worker: a worker's last heartbeat.
        model: a worker's model; empty for a front.
    """

    name: str
    role: str
    state: ChildState
    pid: int | None
    restarts: int
    uptime_s: float
    last_exit: str
    next_start_s: float | None = None
    worker: Status | None = None
    model: str = ""


class ServerStatus(msgspec.Struct, frozen=True):
    """One server: its supervisor and children."""

    name: str
    version: str
    pid: int
    state: ServerState
    models: list[str]
    urls: list[str]
    admin_urls: list[str]
    started_at_s: float
    uptime_s: float
    children: list[ChildStatus]


class _Command(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    command: str


async def serve_control(listener: socket.socket, status: Callable[[], ServerStatus]) -> asyncio.Server:
    """Answers on the control socket until the returned server is closed."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if _peer_uid(writer.get_extra_info("socket")) not in (0, os.getuid()):
                return
            async with asyncio.timeout(_TIMEOUT_S):
                command = msgspec.json.decode(await reader.readline(), type=_Command).command
                reply: object = status() if command == "status" else {"error": f"unknown command {command!r}"}
                writer.write(msgspec.json.encode(reply) + b"\n")
                await writer.drain()
        except (OSError, TimeoutError, ValueError, msgspec.MsgspecError):
            return
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    return await asyncio.start_unix_server(answer, sock=listener, limit=_MAX_LINE_BYTES)


def read_status(path: Path) -> ServerStatus:
    """Asks the server behind a control socket.

    Raises:
        MachineError: nobody answers there.
        ProtocolError: the answer is not one of ours.
    """
    data = b""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
            link.settimeout(_TIMEOUT_S)
            link.connect(str(path))
            link.sendall(b'{"command":"status"}\n')
            while not data.endswith(b"\n") and len(data) < _MAX_LINE_BYTES:
                part = link.recv(65536)
                if not part:
                    break
                data += part
    except OSError as error:
        raise MachineError(f"no server answers at {path}: {error.strerror or error}") from error
    try:
        return msgspec.json.decode(data, type=ServerStatus)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"{path}: the answer is not a status: {error}") from error


def list_control_sockets(runtime: Path) -> list[Path]:
    """Gives the control sockets in a runtime folder, of servers dead or alive."""
    return sorted(runtime.glob(f"*/{CONTROL_SOCKET_NAME}"))


def _peer_uid(link: socket.socket) -> int:
    credentials = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return int(uid)
