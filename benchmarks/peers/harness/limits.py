"""What the machine could do at best in a cell, by the formula of ``program.cost.limit_s``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.cells import Cell, Kind
from headrace.engine.loader import Inspection, inspect
from headrace.kernels import vm
from headrace.program.cost import Arithmetic, Work, arithmetic_of, limit_s, step_cost
from headrace.protocol.launch import WorkerLaunch


@dataclass(frozen=True, slots=True)
class Machine:
    """The probed rates: bytes per second and, of each arithmetic, operations per second."""

    bandwidth: float
    peaks: dict[Arithmetic, float]


def probe_peaks(threads: int, seconds: float = 0.1) -> dict[Arithmetic, float]:
    """Returns what the best instruction set reaches in registers."""
    isa = vm.best_isa()
    return {kind: vm.probe_peak(isa, kind, threads, seconds) for kind in Arithmetic}


class Costs:
    """What each cell of one model in one format costs. Reads headers only."""

    def __init__(self, path: Path, form: str, threads: int) -> None:
        self._inspection: Inspection = inspect(
            WorkerLaunch(
                str(path),
                "costs",
                -1,
                threads=threads,
                dtype="fp32" if form == "fp32" else "bf16",
                quantization="int8" if form == "int8" else "none",
            )
        )
        values: dict[Arithmetic, int] = {}
        for spec in self._inspection.program.weights:
            if spec.kind == "matrix":
                kind = arithmetic_of(self._inspection.layouts[spec.index])
                values[kind] = values.get(kind, 0) + spec.n * spec.k
        self.arithmetic = max(values, key=values.__getitem__)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights as they lie in memory."""
        return self._inspection.weight_bytes

    def best(self, cell: Cell, machine: Machine) -> float | None:
        """Returns what no engine could pass with this format, in the cell's unit; None where nothing limits."""
        sequences, prompt, output = cell.sequences, cell.prompt_tokens, cell.output_tokens
        match cell.kind:
            case Kind.DECODE:
                return 1 / self._step_s(Work(1, 1, [prompt + output // 2]), machine)
            case Kind.PREFILL:
                return prompt / self._prompts_s(1, prompt, machine)
            case Kind.BATCH:
                steps_s = output * self._step_s(Work(sequences, sequences, [prompt + output // 2] * sequences), machine)
                return sequences * output / (self._prompts_s(sequences, prompt, machine) + steps_s)
            case Kind.ENCODE | Kind.CLIENTS:
                rows = sequences * prompt
                return sequences / self._step_s(Work(rows, 0, [prompt] * rows, sequences=sequences), machine)
            case Kind.START | Kind.MEMORY:
                return None

    def _prompts_s(self, sequences: int, tokens: int, machine: Machine) -> float:
        """Chunks of the scheduler's size; that they share steps makes no difference to what is computed."""
        chunk = self._inspection.launch.max_step_tokens
        total_s, contexts = 0.0, list(range(1, tokens + 1)) * sequences
        for start in range(0, len(contexts), chunk):
            part: Sequence[int] = contexts[start : start + chunk]
            ends = sum(context == tokens for context in part)
            total_s += self._step_s(Work(len(part), ends, part), machine)
        return total_s

    def _step_s(self, work: Work, machine: Machine) -> float:
        found = self._inspection
        cost = step_cost(found.program, found.layouts, found.kv_type, work)
        peak = machine.peaks[self.arithmetic]
        return limit_s(cost.bytes_moved, cost.operations, bandwidth=machine.bandwidth, peak=peak)
