"""The sockets that a server opens once and hands down: public and admin TCP listeners, the worker's Unix socket.

Because the supervisor holds them open, a child's restart drops no queued connection.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Final

from headrace.base.errors import AddressInUseError, ConfigError, MachineError

# Connections that may wait while a front restarts; the kernel caps it at net.core.somaxconn.
_BACKLOG: Final = 4096
# sun_path of Linux holds 108 bytes, the last of them a zero.
_MAX_PATH_BYTES: Final = 107


@dataclass(frozen=True, slots=True)
class Listener:
    """One listening TCP socket."""

    socket: socket.socket
    host: str
    port: int

    @property
    def url(self) -> str:
        """The base URL that a client on this machine may use."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


def open_listeners(host: str, port: int, *, setting: str) -> list[Listener]:
    """Opens a listener on every address that ``host`` stands for.

    Args:
        port: 0 takes a free one, the same on all addresses.
        setting: ``section.name`` of the port, for messages.

    Raises:
        AddressInUseError: another program listens there.
        ConfigError: ``host`` is no address of this machine, or the port may not be used.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"host {host!r} is not an address or name of this machine: {error}") from error
    listeners: list[Listener] = []
    try:
        for family, address in sorted({(family, str(place[0])) for family, _, _, _, place in found}):
            listeners.append(_open(family, address, listeners[0].port if listeners else port, setting))
    except BaseException:
        for listener in listeners:
            listener.socket.close()
        raise
    return listeners


def _open(family: socket.AddressFamily, address: str, port: int, setting: str) -> Listener:
    listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind((address, port))
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise AddressInUseError(
                f"port {port} on {address} is in use by another program: stop it or set another {setting}"
            ) from error
        raise ConfigError(f"cannot listen on {address} port {port}: {error.strerror}: change {setting}") from error
    return Listener(listener, address, listener.getsockname()[1])


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches ``host``; a name counts when all its addresses do."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"host {host!r} is not an address or name of this machine: {error}") from error
    return all(ip_address(str(place[0]).partition("%")[0]).is_loopback for *_, place in found)


def open_unix_listener(path: Path) -> socket.socket:
    """Opens a Unix socket that only this user may connect to, replacing a dead one.

    Raises:
        ConfigError: the path is too long for a socket.
    """
    if len(os.fsencode(path)) > _MAX_PATH_BYTES:
        raise ConfigError(
            f"socket path {path} has {len(os.fsencode(path))} bytes, the limit is {_MAX_PATH_BYTES}: set paths.runtime"
        )
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    listener.bind(str(path))
    path.chmod(0o600)  # the folder is 0700, so nobody could connect in between
    listener.listen(_BACKLOG)
    listener.setblocking(False)
    return listener


def runtime_folder(configured: str | None, env: Mapping[str, str]) -> Path:
    """Gives the folder for sockets, made and checked to be this user's alone (0700).

    Raises:
        MachineError: it exists and belongs to somebody else, or others may enter it.
    """
    if configured:
        folder = Path(configured)
    elif env.get("XDG_RUNTIME_DIR") and Path(env["XDG_RUNTIME_DIR"]).is_dir():
        folder = Path(env["XDG_RUNTIME_DIR"], "headrace")
    else:
        folder = Path(env.get("TMPDIR") or "/tmp", f"headrace-{os.getuid()}")  # noqa: S108 - owner and mode are checked
    return private_folder(folder)


def state_folder(configured: str | None, env: Mapping[str, str]) -> Path:
    """Gives the folder for what outlives a run: locks, the database."""
    if configured:
        return private_folder(Path(configured))
    base = env.get("XDG_STATE_HOME") or str(Path(env.get("HOME") or Path.home(), ".local", "state"))
    return private_folder(Path(base, "headrace"))


def private_folder(folder: Path) -> Path:
    """Makes ``folder`` 0700 where it is missing; refuses one that others own or may enter.

    Raises:
        MachineError: as said, or it cannot be made.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise MachineError(f"folder {folder} cannot be made: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise MachineError(f"{folder} is not a folder of this user: remove it or set paths.runtime and paths.state")
    if found.st_mode & 0o077:
        raise MachineError(f"folder {folder} is open to other users (mode {found.st_mode & 0o777:o}): chmod 700 it")
    return folder
