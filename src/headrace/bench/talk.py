"""A sample on its way: the bytes of its request, and of those that follow in its conversation."""

from __future__ import annotations

from typing import Final

import msgspec

from headrace.base.errors import ConfigError
from headrace.bench.connection import Target
from headrace.bench.flight import Flight
from headrace.bench.records import Operation, Settings
from headrace.bench.sample import PATHS, Sample, request_body

_ENCODE: Final = msgspec.json.Encoder().encode
_FORBIDDEN: Final = frozenset({"content-length", "host", "transfer-encoding", "connection"})


class Wire:
    """Makes requests of bodies; heads are put together once.

    Raises:
        ConfigError: a header has no name, a line break, or is one that only we can set.
    """

    def __init__(self, target: Target, headers: dict[str, str]) -> None:
        lines = {"content-type": "application/json", "user-agent": "headrace-bench"}
        for name, value in headers.items():
            lower = name.strip().lower()
            if not lower or any(sign in f"{name}{value}" for sign in "\r\n\0") or not f"{name}{value}".isascii():
                raise ConfigError(f"--header {name!r}: a header is one line of ASCII, NAME: VALUE")
            if lower in _FORBIDDEN:
                raise ConfigError(f"--header {lower} is set by the connection itself")
            lines[lower] = value.strip()
        self._has_own_id = "x-request-id" in lines
        rest = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._heads: dict[Operation, bytes] = {
            operation: f"POST {target.prefix}{path} HTTP/1.1\r\nhost: {target.authority}\r\n{rest}".encode()
            for operation, path in PATHS.items()
        }

    def request(self, operation: Operation, index: int, body: bytes) -> bytes:
        """Gives the bytes of a request; ``x-request-id`` says its number, so that it is found in the server's logs."""
        number = b"" if self._has_own_id else b"x-request-id: bench-%d\r\n" % index
        return b"%b%bcontent-length: %d\r\n\r\n%b" % (self._heads[operation], number, len(body), body)


class Talk:
    """A sample and how far its conversation has come.

    Args:
        index: of its first turn.
        is_counted: the texts' tokens will be counted.
    """

    __slots__ = ("_body", "_is_counted", "_sample", "_settings", "_wire", "_wire_bytes", "index", "turn")

    def __init__(self, index: int, sample: Sample, settings: Settings, wire: Wire, *, is_counted: bool) -> None:
        self.index = index
        self.turn = 0
        self._sample = sample
        self._settings = settings
        self._wire = wire
        self._is_counted = is_counted
        self._body = request_body(sample, settings)
        self._wire_bytes = self._encode()

    @property
    def body(self) -> dict[str, object]:
        """The fields of the present turn's request."""
        return self._body

    def take_off(self, scheduled_s: float) -> Flight:
        """Gives the present turn's request."""
        return Flight(
            self.index + self.turn,
            self._sample.operation,
            scheduled_s,
            self._wire_bytes,
            line=self._sample.line,
            turn=self.turn,
            is_kept=self._is_counted or self.turn < len(self._sample.follow_ups),
        )

    def advance(self, answer: str) -> float | None:
        """Goes on to the next turn; gives the pause before it in seconds, or None where the talk is over."""
        follow_ups = self._sample.follow_ups
        if self.turn >= len(follow_ups):
            return None
        pauses_s = self._sample.pauses_s
        pause_s = pauses_s[self.turn] if self.turn < len(pauses_s) else 0.0
        messages = self._body.get("messages")
        before = messages if isinstance(messages, list) else []
        said = {"role": "assistant", "content": answer}
        self._body = {**self._body, "messages": [*before, said, *follow_ups[self.turn]]}
        self.turn += 1
        self._wire_bytes = self._encode()
        return pause_s

    def _encode(self) -> bytes:
        return self._wire.request(self._sample.operation, self.index + self.turn, _ENCODE(self._body))
