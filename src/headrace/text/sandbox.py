"""Keeps one child process that renders chat templates, and replaces it when a template has killed it.

The parent's side of ``sandbox_child``: one job at a time, JSON both ways, never a template in this process. Calls
block and belong in a thread. The child ends when this process does: its input ends.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from headrace.base.errors import MachineError, OverloadedError

CHILD: Final = Path(__file__).with_name("sandbox_child.py")
_HEADER: Final = struct.Struct(">I")
# What an interpreter may need from the environment to start; nothing else is passed on.
_PASSED_ENV: Final = ("LD_LIBRARY_PATH", "PATH", "TZ")


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """What one job may cost.

    Args:
        cpu_s: CPU seconds of a render; reached in Python code it fails, at twice that in C code the child is killed.
        load_cpu_s: the same for compiling and probing all templates of a model, once (70 real ones take ≤ 0.2 s each).
        wall_s: after this the child is killed whatever it does: CPU time may pass slowly on a busy machine.
        wait_s: how long a job may wait for those before it.
        memory_bytes: address space beyond the child's own at rest and 8 bytes for every byte of the job.
        output_chars, output_ratio: longest text = ``output_chars`` + ``output_ratio`` × bytes of the job.
    """

    cpu_s: float = 0.2
    load_cpu_s: float = 4.0
    wall_s: float = 10.0
    wait_s: float = 10.0
    memory_bytes: int = 64 * 2**20
    output_chars: int = 64 * 2**10
    output_ratio: int = 4


class JobError(StrEnum):
    """Why a job gave no text."""

    REFUSED = "refused"
    FAILED = "failed"
    SYNTAX = "syntax"
    TIME = "time"
    MEMORY = "memory"
    OUTPUT = "output"


class SandboxError(Exception):
    """A job failed; ``text.template`` says what that means for whom."""

    def __init__(self, kind: JobError, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message


class _ChildLostError(SandboxError):
    """The child ended by a signal that is not our own timer's."""


class Sandbox:
    """One child with a model's templates loaded. Safe to call from several threads; they take turns.

    Args:
        sources: template name to source.
    """

    def __init__(self, sources: dict[str, str], limits: SandboxLimits) -> None:
        self._sources = sources
        self._limits = limits
        self._turn = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._link: socket.socket | None = None

    def load(self) -> dict[str, Any]:
        """Starts the child where there is none. Gives what it found out about each template.

        Raises:
            SandboxError: a template is malformed or too expensive.
            MachineError: the child cannot be started.
        """
        with self._turn:
            self._end()
            return self._start()

    def render(self, name: str, variables: dict[str, Any], now: list[int]) -> str:
        """Renders one template.

        Raises:
            SandboxError: the template refused, failed or cost too much.
            OverloadedError: the jobs before it took too long.
            MachineError: the child cannot be started.
        """
        if not self._turn.acquire(timeout=self._limits.wait_s):
            raise OverloadedError(
                f"the chat template waited over {self._limits.wait_s:.0f} s for its turn", retry_after_s=1.0
            )
        try:
            if self._child is None or self._child.poll() is not None:
                self._start()
            data = json.dumps(variables)
            job = {"do": "render", "name": name, "now": now, "cpu_s": self._limits.cpu_s}
            try:
                text = self._ask(job, data)["text"]
            except _ChildLostError:
                # It may have been killed between two renders; a job that kills a fresh child too is to blame itself.
                self._start()
                text = self._ask(job, data)["text"]
            assert isinstance(text, str)
            return text
        finally:
            self._turn.release()

    def close(self) -> None:
        """Ends the child."""
        with self._turn:
            self._end()

    @property
    def pid(self) -> int | None:
        """The child's process id, or None where none runs."""
        return None if self._child is None else self._child.pid

    def _start(self) -> dict[str, Any]:
        self._end()
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._child = subprocess.Popen(
                    [sys.executable, "-E", "-P", str(CHILD)],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    env={name: os.environ[name] for name in _PASSED_ENV if name in os.environ},
                    cwd="/",
                    process_group=0,  # a terminal's Ctrl-C is for the server, which drains first
                )
            except OSError as fault:
                ours.close()
                raise MachineError(f"the template process cannot be started: {fault}") from fault
        self._link = ours
        job = {"do": "load", "sources": self._sources, "now": [2026, 1, 1], "cpu_s": self._limits.load_cpu_s}
        loaded = self._ask(job, "{}")["loaded"]
        assert isinstance(loaded, dict)
        return loaded

    def _end(self) -> int | None:
        """Kills the child, if any, and gives how it ended."""
        if self._link is not None:
            self._link.close()
        child, self._child, self._link = self._child, None, None
        if child is None:
            return None
        child.kill()
        return child.wait()

    def _ask(self, job: dict[str, Any], variables: str) -> dict[str, Any]:
        limits = self._limits
        # The variables are already JSON; the rest of the job is put around them, so that they are written out once.
        size = len(variables) + sum(map(len, job.get("sources", {}).values()))
        job["memory_bytes"] = limits.memory_bytes + 8 * size
        job["limit_chars"] = limits.output_chars + limits.output_ratio * size
        data = f'{json.dumps(job)[:-1]}, "variables": {variables}}}'.encode("ascii")
        try:
            answer = json.loads(self._exchange(_HEADER.pack(len(data)) + data))
        except TimeoutError as fault:
            self._end()
            raise SandboxError(JobError.TIME, f"it ran for over {limits.wall_s:.0f} s") from fault
        except (OSError, EOFError) as fault:
            status = self._end()
            if status == -signal.SIGVTALRM:
                raise SandboxError(JobError.TIME, "") from fault
            if status is not None and status < 0:  # the kernel refused it memory at a place that cannot report it
                raise _ChildLostError(JobError.MEMORY, f"the process ended with signal {-status}") from fault
            raise MachineError(f"the template process ended with status {status}") from fault
        assert isinstance(answer, dict)
        if "error" in answer:
            raise SandboxError(JobError(answer["error"]), str(answer["message"]))
        return answer

    def _exchange(self, data: bytes) -> bytes:
        link = self._link
        assert link is not None
        deadline = time.monotonic() + self._limits.wall_s

        def remaining_s() -> float:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            return left

        def take(size: int) -> bytes:
            parts = bytearray()
            while len(parts) < size:
                link.settimeout(remaining_s())
                part = link.recv(min(size - len(parts), 2**20))
                if not part:
                    raise EOFError
                parts += part
            return bytes(parts)

        link.settimeout(remaining_s())
        link.sendall(data)
        return take(_HEADER.unpack(take(_HEADER.size))[0])
