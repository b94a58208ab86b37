"""One engine with one format of one model: it starts, measures cells, and ends."""

from __future__ import annotations

import json
import select
from collections.abc import Mapping
from pathlib import Path
from time import monotonic
from typing import Any, Protocol

from harness.cells import Cell, Kind
from harness.processes import CellError, Group, wait_until

START_LIMIT_S = 180
MEASURE_LIMIT_S = 600
ENCODE_S = 1.0


class Contender(Protocol):
    """What the rounds need of an engine."""

    engine: str
    format: str
    weight_bytes: int

    def start(self) -> float:
        """Starts it; returns the seconds to its first token or vector."""

    def can(self, cell: Cell) -> bool:
        """Whether it has the cell at all."""

    def measure(self, cell: Cell) -> float:
        """Returns the cell's figure in its unit. Raises CellError where it cannot."""

    def pause(self) -> None:
        """Takes no CPU until it is resumed."""

    def resume(self) -> None:
        """Is ready to measure."""

    def end(self) -> None:
        """Ends its processes."""

    def answer(self, method: str, **fields: Any) -> dict[str, Any]:
        """Asks for what is no cell: distributions, vectors."""


class Grouped:
    """An engine that runs as one group of processes, from its start to its end.

    Args:
        path: the model; its weight files are counted.
    """

    def __init__(self, engine: str, form: str, path: Path) -> None:
        self.engine, self.format = engine, form
        self.weight_bytes = weight_bytes(path)
        self._group: Group | None = None
        self._peak_bytes = 0

    def peak_bytes(self) -> int:
        """Returns the most that its processes held at once, over all its lives."""
        if self._group:
            self._peak_bytes = max(self._peak_bytes, self._group.peak_bytes())
        return self._peak_bytes

    def pause(self) -> None:
        if self._group:
            self._group.pause()

    def resume(self) -> None:
        if self._group:
            self._group.resume()

    def end(self) -> None:
        if self._group:
            self.peak_bytes()
            self._group.end()
            self._group = None


class Driven(Grouped):
    """A peer behind one of ``drivers/``: requests and answers over pipes.

    Args:
        command: interpreter of the peer's environment, driver, and its arguments.
    """

    def __init__(
        self, engine: str, form: str, command: list[str | Path], path: Path, log: Path, variables: Mapping[str, str]
    ) -> None:
        super().__init__(engine, form, path)
        self._command, self._log, self._variables = command, log, variables

    def start(self) -> float:
        started_at_s = monotonic()
        self._group = Group(self._command, log=self._log, variables=self._variables, is_piped=True)
        self._read(START_LIMIT_S)
        return monotonic() - started_at_s

    def can(self, cell: Cell) -> bool:
        return cell.kind is not Kind.CLIENTS

    def measure(self, cell: Cell) -> float:
        match cell.kind:
            case Kind.DECODE:
                found = self.answer("decode", prompt_tokens=cell.prompt_tokens, output_tokens=cell.output_tokens)
            case Kind.PREFILL:
                found = self.answer("prefill", prompt_tokens=cell.prompt_tokens)
            case Kind.BATCH:
                sizes = {"prompt_tokens": cell.prompt_tokens, "output_tokens": cell.output_tokens}
                found = self.answer("batch", sequences=cell.sequences, **sizes)
            case Kind.ENCODE:
                found = self.answer("encode", texts=cell.sequences, tokens=cell.prompt_tokens, seconds=ENCODE_S)
            case Kind.START:
                return restart(self)
            case Kind.MEMORY:
                return self.peak_bytes() / 2**20
            case Kind.CLIENTS:
                raise CellError("has no HTTP server")
        return float(found["tokens"]) / float(found["seconds"])

    def answer(self, method: str, **fields: Any) -> dict[str, Any]:
        group = self._group
        assert group is not None, "started first"
        assert group.process.stdin is not None
        try:
            group.process.stdin.write(json.dumps({"do": method, **fields}) + "\n")
            group.process.stdin.flush()
        except BrokenPipeError as error:
            raise CellError(f"it died: {group.last_words()}") from error
        found = self._read(MEASURE_LIMIT_S)
        if "error" in found:
            raise CellError(str(found["error"]))
        return found

    def _read(self, limit_s: float) -> dict[str, Any]:
        assert self._group is not None
        out = self._group.process.stdout
        assert out is not None
        if not select.select([out], [], [], limit_s)[0]:
            raise CellError(f"no answer within {limit_s} s")
        line = out.readline()
        if not line:
            wait_until(monotonic() + 1, "the driver", self._group)
            raise CellError(f"it died: {self._group.last_words()}")
        found: dict[str, Any] = json.loads(line)
        return found


def restart(contender: Contender) -> float:
    """Ends it and starts it again; returns what the start took."""
    contender.end()
    return contender.start()


def weight_bytes(path: Path) -> int:
    """Returns the bytes of a model's weight files: the file itself, or those of a folder."""
    if path.is_file():
        return path.stat().st_size
    suffixes = (".bin", ".safetensors", ".onnx", ".data")
    found = [file for file in path.iterdir() if file.suffix in suffixes and "tokenizer" not in file.name]
    return sum(file.stat().st_size for file in found)
