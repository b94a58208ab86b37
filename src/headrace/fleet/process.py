"""Starting and ending one child process: sockets and settings handed down by descriptor, environment scrubbed.

A child gets its launch value as JSON on an inherited descriptor, never on the command line, where every user of the
machine could read it. It runs in a session of its own, so a Ctrl-C reaches the supervisor alone, which then ends the
children in order. When to start or end which child is ``fleet.supervisor``'s business.

A child may be started before it is known what it shall do (``WaitingChild``): importing its modules is half of a start.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

# What a child may see of our environment: where things are and how people read, never credentials.
_ENV_NAMES: Final = frozenset(
    {
        "HOME", "LANG", "LANGUAGE", "LD_LIBRARY_PATH", "LD_PRELOAD", "LOGNAME", "PATH", "PYTHONHASHSEED", "PYTHONPATH",
        "PYTHONUNBUFFERED", "PYTHONWARNINGS", "SSL_CERT_DIR", "SSL_CERT_FILE", "TEMP", "TERM", "TMP", "TMPDIR", "TZ",
        "USER", "VIRTUAL_ENV",
    }
)  # fmt: skip
_ENV_PREFIXES: Final = ("ASAN_", "LC_", "LSAN_", "MALLOC_", "OMP_", "TSAN_", "UBSAN_", "XDG_")


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """How to start one child.

    Args:
        name: for logs and status, such as ``worker-0``.
        role: ``front`` or ``worker``.
        command: argument list; ``--launch-fd N`` is added, N being the descriptor with the launch value.
        launch: the launch value's JSON.
        pass_fds: sockets that the child inherits under the same numbers.
    """

    name: str
    role: str
    command: Sequence[str]
    launch: bytes
    pass_fds: Sequence[int]


def module_command(module: str) -> tuple[str, ...]:
    """Gives the command that runs ``module`` with this interpreter.

    ``-P`` keeps the working folder off the module path: a file lying there must not become our code.
    """
    return (sys.executable, "-P", "-m", module)


def scrub_env(env: Mapping[str, str]) -> dict[str, str]:
    """Gives the part of an environment that children may see."""
    return {name: value for name, value in env.items() if name in _ENV_NAMES or name.startswith(_ENV_PREFIXES)}


class WaitingChild:
    """A process that has no launch value yet; it comes as far as reading it, and waits there.

    Call from the main thread, as for ``Child``.

    Args:
        command, pass_fds: as those of the spec that will be told.
    """

    def __init__(self, command: Sequence[str], pass_fds: Sequence[int], env: Mapping[str, str]) -> None:
        launch_fd, self._tell_fd = os.pipe()
        try:
            self._process: subprocess.Popen[bytes] | None = _start(command, launch_fd, pass_fds, env)
        except BaseException:
            os.close(self._tell_fd)
            raise
        finally:
            os.close(launch_fd)

    def tell(self, launch: bytes) -> subprocess.Popen[bytes]:
        """Lets it go on; it is the caller's from now on. Call once. One that has died meanwhile hears nothing."""
        process, self._process = self._process, None
        assert process is not None
        with contextlib.suppress(BrokenPipeError), os.fdopen(self._tell_fd, "wb") as stream:
            stream.write(launch)
        return process

    def close(self) -> None:
        """Ends it if it was told nothing."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            os.close(self._tell_fd)
            self._process = None


class Child:
    """A started process: its pid, a descriptor that turns readable when it ends, and its end.

    Call from the main thread: the kernel binds "die with the parent" to the thread that starts the child.

    Args:
        waiting: the process to use, which was started with the spec's command and descriptors; None starts one.
    """

    def __init__(self, spec: ChildSpec, env: Mapping[str, str], waiting: WaitingChild | None = None) -> None:
        if waiting is not None:
            self._process = waiting.tell(spec.launch)
        else:
            launch_fd = _memory_file(spec.launch)
            try:
                self._process = _start(spec.command, launch_fd, spec.pass_fds, env)
            finally:
                os.close(launch_fd)
        self.pid = self._process.pid
        self.pidfd = os.pidfd_open(self.pid)

    def send_signal(self, number: signal.Signals) -> None:
        """Signals the child; nothing happens when it has ended already."""
        try:
            signal.pidfd_send_signal(self.pidfd, number)
        except ProcessLookupError:
            return

    def reap(self) -> int:
        """Collects an ended child and gives its exit code, −N for signal N. Call once, when ``pidfd`` is readable."""
        code = self._process.wait()
        os.close(self.pidfd)
        return code


def _start(
    command: Sequence[str], launch_fd: int, pass_fds: Sequence[int], env: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*command, "--launch-fd", str(launch_fd)],
        stdin=subprocess.DEVNULL,
        pass_fds=(launch_fd, *pass_fds),
        env=scrub_env(env),
        start_new_session=True,
    )


def describe_exit(code: int) -> str:
    """Gives ``exit 1`` or ``signal SIGKILL``."""
    if code >= 0:
        return f"exit {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


def _memory_file(data: bytes) -> int:
    """Gives a descriptor, open for reading at its start, of a nameless file with ``data``."""
    fd = os.memfd_create("headrace-launch")
    with os.fdopen(os.dup(fd), "wb") as stream:
        stream.write(data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
