"""What the mock really did, as it did it: the truth that tools are checked against. One JSON line per request."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from headrace.base.errors import ConfigError


class Truth(msgspec.Struct):
    """One request as the mock saw it; moments are ``time.monotonic``, which all processes of a machine share.

    Args:
        request_id: the client's ``x-request-id``; empty where it sent none.
        arrival_s: the request's last byte was read.
        due_s: when the script wanted each write.
        write_s: when each write was handed to the operating system, measured before it.
        ended_s: the last byte was handed over, or the connection ended.
        fault: what went wrong on purpose; ``left`` when the client went away.
    """

    number: int
    request_id: str
    path: str
    arrival_s: float
    status: int = 0
    tokens: int = 0
    due_s: list[float] = []
    write_s: list[float] = []
    ended_s: float = 0.0
    fault: str | None = None


class TruthLog:
    """Appends truths to a file, about a second's worth at a time.

    Raises:
        ConfigError: the file cannot be written.
    """

    _FLUSH_LINES: Final = 500

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("wb")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
        self._lines: list[bytes] = []
        self._encode = msgspec.json.Encoder().encode

    def add(self, truth: Truth) -> None:
        """Appends one."""
        self._lines.append(self._encode(truth))
        if len(self._lines) >= self._FLUSH_LINES:
            self.flush()

    def flush(self) -> None:
        """Brings all so far to the file."""
        self._file.write(b"".join(line + b"\n" for line in self._lines))
        self._file.flush()
        self._lines.clear()

    def close(self) -> None:
        """Writes the rest and closes."""
        self.flush()
        self._file.close()


def read_truths(path: Path) -> list[Truth]:
    """Gives all truths of a file."""
    return [msgspec.json.decode(line, type=Truth) for line in path.read_bytes().splitlines()]
