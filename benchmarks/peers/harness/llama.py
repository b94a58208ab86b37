"""llama.cpp, by its own two benchmarks: single streams by llama-bench, batches by llama-batched-bench."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from time import monotonic
from typing import Any

from harness.cells import Cell, Kind
from harness.contender import weight_bytes
from harness.processes import CellError


class LlamaCpp:
    """One GGUF. Every measurement is a process of its own, which loads the file anew: that is not in the figure.

    Args:
        folder: of its programs.
    """

    engine = "llama.cpp"

    def __init__(self, form: str, folder: Path, path: Path, threads: int, variables: Mapping[str, str]) -> None:
        self.format = form
        self.weight_bytes = weight_bytes(path)
        self._folder, self._variables = folder, variables
        self._base = ["-m", str(path), "-t", str(threads)]
        self._peak_bytes = 0

    def start(self) -> float:
        """Its smallest run, start to end: it has no server here, so HTTP is not in the time."""
        started_at_s = monotonic()
        self._bench("-p", "4", "-n", "0", "--no-warmup")
        return monotonic() - started_at_s

    def can(self, cell: Cell) -> bool:
        return cell.kind not in (Kind.ENCODE, Kind.CLIENTS)

    def measure(self, cell: Cell) -> float:
        match cell.kind:
            case Kind.DECODE:
                return self._bench("-p", "0", "-n", str(cell.output_tokens), "-d", str(cell.prompt_tokens))
            case Kind.PREFILL:
                return self._bench("-p", str(cell.prompt_tokens), "-n", "0")
            case Kind.BATCH:
                return self._batch(cell)
            case Kind.START:
                return self.start()
            case Kind.MEMORY:
                if not self._peak_bytes:
                    raise CellError("no cell was measured before")
                return self._peak_bytes / 2**20
            case Kind.ENCODE | Kind.CLIENTS:
                raise CellError("makes text")

    def answer(self, method: str, **fields: Any) -> dict[str, Any]:
        raise CellError(f"cannot {method}")

    def pause(self) -> None:
        """Nothing runs between measurements."""

    def resume(self) -> None:
        """Nothing runs between measurements."""

    def end(self) -> None:
        """Nothing runs between measurements."""

    def _bench(self, *options: str) -> float:
        (found,) = json.loads(self._run("llama-bench", [*self._base, *options, "-r", "1", "-o", "json"]))
        return float(found["avg_ts"])

    def _batch(self, cell: Cell) -> float:
        each = cell.prompt_tokens + cell.output_tokens
        sizes = ["-c", str(cell.sequences * each), "-b", "2048", "-ub", "512"]
        shape = ["-npp", str(cell.prompt_tokens), "-ntg", str(cell.output_tokens), "-npl", str(cell.sequences)]
        text = self._run("llama-batched-bench", [*self._base, *sizes, *shape, "--output-format", "jsonl"])
        found = json.loads(next(line for line in text.splitlines() if line.startswith("{")))
        return cell.sequences * cell.output_tokens / float(found["t"])

    def _run(self, program: str, options: list[str]) -> str:
        command = [str(self._folder / program), *options]
        environment = {**os.environ, **self._variables}
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdout=pipe, stderr=subprocess.DEVNULL, env=environment, text=True) as process:
            assert process.stdout is not None
            try:
                text = process.stdout.read()
            except BaseException:
                process.kill()  # leaving the block waits for it
                raise
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise CellError(f"{program} ended with {process.returncode}")
        self._peak_bytes = max(self._peak_bytes, 1024 * usage.ru_maxrss)
        return text
