"""What peers are expected to reach on a machine, and the rounds that are void because one did not.

A peer that runs far off what it is known to do was set up or disturbed in a way that says nothing about it, so its
round must not count, whomever that favours. Expectations are committed (`expected.json`, written by `expect` from
earlier sessions), each for one kind of machine and one bandwidth.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from harness.cells import CELLS, Kind
from harness.engines import OP_BY_OP, OURS
from harness.results import Results, Sample, Session
from harness.table import MODES_APART, boundary_of, mode_of

OFF_RATIO = 0.15
"""Differences between a peer's runs that are smaller mean nothing."""
LEAST_ROUNDS = 3
SPEEDS = (Kind.DECODE, Kind.PREFILL, Kind.BATCH, Kind.ENCODE)
FILE = Path(__file__).parents[1] / "expected.json"


class Expectation(msgspec.Struct, frozen=True):
    """What one peer reached in one cell.

    Args:
        machine: as `machine_of` names it.
        value: median of ``rounds`` rounds, in the cell's unit.
        bandwidth: bytes per second, the median of what was probed around them.
        until: when the last of its sessions began; only later ones are judged by it.
    """

    machine: str
    model: str
    cell: str
    engine: str
    format: str
    value: float
    bandwidth: float
    rounds: int
    until: str


@dataclass(frozen=True, slots=True)
class Judged:
    """Results without what is void.

    Args:
        voids: a line for each void round, or void figure of a peer that does not decide.
        num_judged: figures that an expectation could be held against.
    """

    results: Results
    voids: list[str]
    num_judged: int

    def words(self, model: str) -> str:
        """Returns what the page says of it."""
        if not self.num_judged:
            return "No expectation is committed for this machine and bandwidth: no round could be voided."
        found = [line for line in self.voids if line.startswith(model)]
        head = f"Peers are expected within {OFF_RATIO:.0%} of their earlier medians on this machine (`expected.json`)"
        return f"{head}; void: " + ("none." if not found else "".join(f"\n- {line}" for line in found))


def machine_of(session: Session) -> str:
    """Returns what tells kinds of machines apart: one CPU name stands for several generations."""
    return f"{session.cpu}, {session.isa}, {session.cores} cores, {session.threads} threads"


def judge(results: Results, expectations: Sequence[Expectation]) -> Judged:
    """Leaves out the rounds of a cell whose best expected peer is off, and the figures of other peers that are."""
    void_rounds: set[tuple[int, int, str, str]] = set()
    void_samples: set[tuple[int, int, str, str, str, str]] = set()
    voids: list[str] = []
    num_judged = 0
    for sample in results.samples:
        session = results.sessions[sample.session]
        own = [one for one in expectations if one.machine == machine_of(session) and session.started_at > one.until]
        wanted = _expected(sample, own)
        if wanted is None or not sample.value:
            continue
        num_judged += 1
        if abs(sample.value / wanted.value - 1) <= OFF_RATIO:
            continue
        decides = _is_best(wanted, own)
        if decides:
            void_rounds.add((sample.session, sample.round, sample.model, sample.cell))
        void_samples.add(_key(sample))
        voids.append(
            f"{sample.model}, {sample.cell}, session {sample.session + 1}, round {sample.round + 1}: {sample.engine} "
            f"{sample.format} at {sample.value:,.4g}, expected {wanted.value:,.4g} at {wanted.bandwidth / 1e9:.0f} GB/s"
            f"{'' if decides else ' (its figure alone)'}"
        )
    kept = [
        sample
        for sample in results.samples
        if _key(sample) not in void_samples
        and (sample.session, sample.round, sample.model, sample.cell) not in void_rounds
    ]
    fields = {name: getattr(results, name) for name in results.__struct_fields__}
    return Judged(Results(**{**fields, "samples": kept}), voids, num_judged)


def _key(sample: Sample) -> tuple[int, int, str, str, str, str]:
    return (sample.session, sample.round, sample.model, sample.cell, sample.engine, sample.format)


def _expected(sample: Sample, expectations: Sequence[Expectation]) -> Expectation | None:
    """The expectation of the nearest bandwidth; none where that is another mode."""
    if sample.bandwidth <= 0:
        return None
    names = (sample.model, sample.cell, sample.engine, sample.format)
    found = [one for one in expectations if (one.model, one.cell, one.engine, one.format) == names]
    near = min(found, key=lambda one: abs(math.log(one.bandwidth / sample.bandwidth)), default=None)
    if near is None or abs(math.log(near.bandwidth / sample.bandwidth)) > math.log(MODES_APART) / 2:
        return None
    return near


def _is_best(wanted: Expectation, expectations: Sequence[Expectation]) -> bool:
    peers = [one.value for one in expectations if (one.model, one.cell) == (wanted.model, wanted.cell)]
    return wanted.value >= max(peers)


def expectations_of(results: Results) -> list[Expectation]:
    """Returns the medians of every peer with enough rounds in one mode of one kind of machine; speeds only."""
    found = []
    for machine in sorted({machine_of(session) for session in results.sessions}):
        sessions = {index for index, one in enumerate(results.sessions) if machine_of(one) == machine}
        until = max(results.sessions[index].started_at for index in sessions)
        for model in sorted({sample.model for sample in results.samples}):
            speeds = {cell.name for cell in CELLS[model] if cell.kind in SPEEDS}
            mine = [one for one in results.samples if one.session in sessions and one.model == model and one.value]
            boundary = boundary_of(mine)
            groups: dict[tuple[str, str, str, str], list[Sample]] = {}
            for one in mine:
                if one.engine not in (OURS, OP_BY_OP) and one.cell in speeds:
                    groups.setdefault((one.cell, one.engine, one.format, mode_of(one, boundary)), []).append(one)
            for (cell, engine, form, _), samples in sorted(groups.items()):
                if len(samples) >= LEAST_ROUNDS:
                    value = statistics.median(one.value or 0.0 for one in samples)
                    bandwidth = statistics.median(one.bandwidth for one in samples)
                    names = (machine, model, cell, engine, form)
                    found.append(Expectation(*names, round(value, 3), round(bandwidth, -8), len(samples), until))
    return found


def read_expectations(path: Path = FILE) -> list[Expectation]:
    """Returns what is committed; nothing where there is no file."""
    return msgspec.json.decode(path.read_bytes(), type=list[Expectation]) if path.exists() else []


def write_expectations(expectations: Sequence[Expectation], path: Path = FILE) -> None:
    """Writes the file, one entry a line."""
    lines = ",\n".join(json.dumps(msgspec.to_builtins(one), ensure_ascii=False) for one in expectations)
    part = path.with_suffix(".part")
    part.write_text(f"[\n{lines}\n]\n")
    os.replace(part, path)
