"""From samples to the figures of the tables: medians, ranges, ratios within a round, shares of the limit."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from harness.cells import CELLS, Cell
from harness.engines import OP_BY_OP, OURS
from harness.results import Quality, Results, Sample

GOAL_RATIO, GOAL_SHARE = 1.68, 0.80
MODES_APART = 1.5
"""Two bandwidth modes are told apart where the fastest probe is this much faster than the slowest."""
SAME_BITS = 0.1
"""Formats whose bits per weight differ by less are of the same size."""


@dataclass(frozen=True, slots=True)
class Row:
    """One engine with one format in one cell.

    Args:
        values: of its rounds.
        ratio: how many times as good ours is: the median of the rounds that both ran; None for ours.
        error: why there is no value.
    """

    engine: str
    format: str
    bits: float
    values: tuple[float, ...]
    ratio: float | None
    quality: Quality | None
    error: str

    @property
    def median(self) -> float | None:
        """The median of the rounds."""
        return statistics.median(self.values) if self.values else None


@dataclass(frozen=True, slots=True)
class Verdict:
    """One cell: our format that does best in it, the peers, and the machine's limit.

    Args:
        peer: the best one whose format has at least as many bits per weight as ours; ``any_peer`` of any format.
        limit: median of the sessions' limits, in the cell's unit.
        share: what ours reaches of it.
    """

    cell: Cell
    ours: Row
    peer: Row | None
    any_peer: Row | None
    limit: float | None
    share: float | None

    @property
    def words(self) -> str:
        """Which of the two goals holds, or by how much the cell falls short."""
        ratio = self.peer.ratio if self.peer else None
        reached = []
        if ratio is not None and ratio >= GOAL_RATIO:
            reached.append(f"≥ {GOAL_RATIO} × the best peer")
        if self.share is not None and self.share >= GOAL_SHARE:
            reached.append(f"≥ {GOAL_SHARE:.0%} of the limit")
        if reached:
            return " and ".join(reached)
        short = []
        if ratio is not None:
            short.append(f"{ratio / GOAL_RATIO:.0%} of the way to {GOAL_RATIO} ×")
        if self.share is not None:
            short.append(f"{self.share:.0%} of the limit")
        return "short: " + ", ".join(short) if short else "no peer measured"


def mode_of(sample: Sample, boundary: float | None) -> str:
    """Returns the bandwidth mode that the sample was taken in."""
    if boundary is None:
        return "one mode"
    return "far" if sample.bandwidth >= boundary else "near"


def boundary_of(samples: Sequence[Sample]) -> float | None:
    """Returns the bandwidth between two modes: the geometric mean of the extremes; None where they lie together."""
    found = [sample.bandwidth for sample in samples if sample.bandwidth > 0]
    if not found or max(found) < MODES_APART * min(found):
        return None
    return float((max(found) * min(found)) ** 0.5)


def verdicts(results: Results, model: str) -> list[Verdict]:
    """Returns the summary: every cell in which ours has a figure."""
    found = []
    for cell in CELLS[model]:
        table = rows(results, model, cell)
        ours = [row for row in table if row.engine == OURS and row.values]
        if ours:
            found.append(_verdict(results, model, cell, ours, table))
    return found


def _verdict(results: Results, model: str, cell: Cell, ours: Sequence[Row], table: Sequence[Row]) -> Verdict:
    best = _best(cell, ours)
    assert best is not None
    table = rows(results, model, cell, against=best.format)
    peers = [row for row in table if row.engine not in (OURS, OP_BY_OP) and row.values]
    same = [row for row in peers if row.bits > best.bits - SAME_BITS]
    limits = [
        limit.value
        for limit in results.limits
        if (limit.model, limit.format, limit.cell) == (model, best.format, cell.name)
    ]
    limit = statistics.median(limits) if limits else None
    share = best.median / limit if limit and best.median else None
    return Verdict(cell, best, _best(cell, same), _best(cell, peers), limit, share)


def op_by_op(results: Results, model: str) -> list[tuple[Cell, Row, list[Row]]]:
    """Returns, for each cell that it ran, our op-by-op arm and llama.cpp's formats with the arm's ratio to them."""
    found = []
    for cell in CELLS[model]:
        arm = next((row for row in rows(results, model, cell) if row.engine == OP_BY_OP and row.values), None)
        if arm is not None:
            table = rows(results, model, cell, against=arm.format, against_engine=OP_BY_OP)
            found.append((cell, arm, [row for row in table if row.engine == "llama.cpp" and row.ratio is not None]))
    return found


def rows(results: Results, model: str, cell: Cell, against: str | None = None, against_engine: str = OURS) -> list[Row]:
    """Returns every engine and format of a cell, best first.

    Args:
        against: format of ``against_engine`` that ratios compare with; None takes our best.
    """
    samples = [sample for sample in results.samples if (sample.model, sample.cell) == (model, cell.name)]
    entries = {(entry.engine, entry.format): entry.bits for entry in results.entries if entry.model == model}
    by_name: dict[tuple[str, str], list[Sample]] = {}
    for sample in samples:
        by_name.setdefault((sample.engine, sample.format), []).append(sample)
    if against is None:
        ours = {form: _values(found) for (engine, form), found in by_name.items() if engine == OURS and _values(found)}
        sign = -1 if cell.is_less_better else 1
        against = max(ours, key=lambda form: sign * statistics.median(ours[form])) if ours else None
    own = _by_round(by_name.get((against_engine, against or ""), []))
    qualities = {(found.engine, found.format): found for found in results.quality if found.model == model}
    table = []
    for (engine, form), found in by_name.items():
        both = [
            (value / own[moment] if cell.is_less_better else own[moment] / value)
            for moment, value in _by_round(found).items()
            if moment in own
        ]
        ratio = statistics.median(both) if both and engine != against_engine else None
        error = next((sample.error for sample in reversed(found) if sample.error), "")
        bits = entries.get((engine, form), 0.0)
        table.append(Row(engine, form, bits, _values(found), ratio, qualities.get((engine, form)), error))
    sign = 1 if cell.is_less_better else -1
    return sorted(table, key=lambda row: (row.median is None, sign * (row.median or 0.0)))


def _values(samples: Sequence[Sample]) -> tuple[float, ...]:
    return tuple(sample.value for sample in samples if sample.value)


def _by_round(samples: Sequence[Sample]) -> dict[tuple[int, int], float]:
    return {(sample.session, sample.round): sample.value for sample in samples if sample.value}


def _best(cell: Cell, table: Sequence[Row]) -> Row | None:
    """By the figure: less is better for times and memory."""
    sign = 1 if cell.is_less_better else -1
    return min((row for row in table if row.median), key=lambda row: sign * (row.median or 0.0), default=None)
