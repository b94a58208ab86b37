"""Says whether a grammar can be used, without ever compiling it in this process.

The parent's side of ``grammar_child``: one child, started with the first grammar and replaced when one has killed it.
Verdicts are remembered, so a schema that comes with every request is compiled once. ``check`` blocks and belongs in a
thread of its own: a grammar may take its full second.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

import msgspec

from headrace.base.errors import MachineError, OverloadedError, RequestError
from headrace.protocol.frames import MAX_GRAMMAR_CHARS, Grammar
from headrace.text.grammar_verdict import HEADER, Verdict

_MAX_VERDICTS: Final = 512
# Verdicts on long grammars are not worth their memory.
_MAX_KEPT_CHARS: Final = 16 * 2**10
_PASSED_ENV: Final = ("LD_LIBRARY_PATH", "PATH", "PYTHONPATH")
_decode = msgspec.msgpack.Decoder(Verdict).decode


@dataclass(frozen=True, slots=True)
class CheckLimits:
    """What one grammar may cost.

    Args:
        cpu_s: CPU seconds; a real schema takes 1 to 50 ms.
        wall_s: seconds after which the child is killed whatever it does, for machines that are busy.
        wait_s: how long a grammar may wait for those before it.
        memory_bytes: address space beyond the child's own at rest.
    """

    cpu_s: float = 1.0
    wall_s: float = 10.0
    wait_s: float = 10.0
    memory_bytes: int = 512 * 2**20


class GrammarCheck:
    """Tries grammars. Safe to call from several threads; they take turns."""

    def __init__(self, limits: CheckLimits = CheckLimits()) -> None:
        self._limits = limits
        self._turn = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._link: socket.socket | None = None
        self._verdicts: OrderedDict[Grammar, Verdict] = OrderedDict()

    @property
    def child_pid(self) -> int | None:
        """The trying process's id, for tests."""
        return None if self._child is None else self._child.pid

    def check(self, grammar: Grammar, param: str) -> Grammar:
        """Gives the grammar as the worker shall have it.

        Args:
            param: the request's field, for errors.

        Raises:
            RequestError: ``invalid_grammar`` or ``grammar_too_expensive``.
            OverloadedError: the grammars before it took too long.
            MachineError: the child cannot be started.
        """
        if len(grammar.source) > MAX_GRAMMAR_CHARS:
            raise RequestError(
                f"{param} has {len(grammar.source)} characters as a grammar, the limit is {MAX_GRAMMAR_CHARS}",
                param=param,
                code="grammar_too_expensive",
            )
        verdict = self._verdicts.get(grammar)
        if verdict is None:
            if not self._turn.acquire(timeout=self._limits.wait_s):
                raise OverloadedError("the grammar waited too long for its turn: try again", retry_after_s=1.0)
            try:
                verdict = self._ask(grammar)
                self._remember(grammar, verdict)
            finally:
                self._turn.release()
        if verdict.grammar is None:
            code = "invalid_grammar" if verdict.error else "grammar_too_expensive"
            message = verdict.error or (
                f"the grammar or schema takes over {self._limits.cpu_s:g} s or "
                f"{self._limits.memory_bytes // 2**20} MiB to compile, or is nested too deeply: make it smaller"
            )
            raise RequestError(f"{param}: {message}", param=param, code=code)
        return verdict.grammar

    def close(self) -> None:
        """Ends the child."""
        with self._turn:
            self._end()

    def _remember(self, grammar: Grammar, verdict: Verdict) -> None:
        if len(grammar.source) <= _MAX_KEPT_CHARS:
            self._verdicts[grammar] = verdict
            if len(self._verdicts) > _MAX_VERDICTS:
                self._verdicts.popitem(last=False)

    def _ask(self, grammar: Grammar) -> Verdict:
        """Asks the child; a grammar that kills it gets an empty verdict, if it kills a fresh one too."""
        for _ in range(2):
            if self._child is None or self._child.poll() is not None:
                self._start()
            try:
                return _decode(self._exchange(msgspec.msgpack.encode(grammar)))
            except (OSError, EOFError, TimeoutError):
                status = self._end()
                if status >= 0:
                    raise MachineError(f"the process that tries grammars ended with status {status}") from None
        return Verdict()

    def _start(self) -> None:
        self._end()
        ours, theirs = socket.socketpair()
        limits = self._limits
        with theirs:
            try:
                self._child = subprocess.Popen(
                    [
                        sys.executable, "-P", "-m", "headrace.text.grammar_child",
                        str(limits.cpu_s), str(limits.memory_bytes),
                    ],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env={name: os.environ[name] for name in _PASSED_ENV if name in os.environ},
                    cwd="/",
                    process_group=0,  # a terminal's Ctrl-C is for the server, which drains first
                )  # fmt: skip
            except OSError as fault:
                ours.close()
                raise MachineError(f"the process that tries grammars cannot be started: {fault}") from fault
        self._link = ours

    def _end(self) -> int:
        """Kills the child, if any, and gives how it ended."""
        if self._link is not None:
            self._link.close()
        child, self._child, self._link = self._child, None, None
        if child is None:
            return 0
        child.kill()
        return child.wait()

    def _exchange(self, data: bytes) -> bytes:
        assert self._link is not None
        until_s = time.monotonic() + self._limits.wall_s
        self._link.settimeout(self._limits.wall_s)
        self._link.sendall(HEADER.pack(len(data)) + data)
        return self._take(HEADER.unpack(self._take(HEADER.size, until_s))[0], until_s)

    def _take(self, size: int, until_s: float) -> bytes:
        assert self._link is not None
        parts = bytearray()
        while len(parts) < size:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            self._link.settimeout(left_s)
            part = self._link.recv(size - len(parts))
            if not part:
                raise EOFError
            parts += part
        return bytes(parts)
