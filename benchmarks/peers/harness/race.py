"""Who is measured next, and how long it will take: what the samples so far say."""

from __future__ import annotations

import statistics

from harness.cells import CELLS, Cell, Kind
from harness.contender import Contender
from harness.engines import OURS
from harness.results import Results
from harness.table import SAME_BITS

NEAR = 0.7
"""A peer is measured again while its median is within this share of the best peer's."""
UNKNOWN_S = 10.0
"""What a measurement is taken to last when nothing is known."""
FASTER_TOGETHER = 3.0
"""How many times as fast as one sequence several decode together, at most, before it was measured."""


class Race:
    """A view of the results; it keeps nothing of its own."""

    def __init__(self, results: Results) -> None:
        self._results = results

    def is_near(self, model: str, cell: Cell, contender: Contender) -> bool:
        """Whether it counts in the cell: ours always; a peer until it was measured, and while it is near the best.

        The best of the peers with our bits or more, or with fewer, as its own are: the table needs both.
        """
        medians = self._medians(model, cell)
        mine = (contender.engine, contender.format)
        if contender.engine == OURS or mine not in medians:
            return True
        value = medians[mine]
        if value is None:
            return False
        bits = {(entry.engine, entry.format): entry.bits for entry in self._results.entries if entry.model == model}
        ours = min((found for (engine, _), found in bits.items() if engine == OURS), default=0.0)

        def is_small(key: tuple[str, str]) -> bool:
            return bits.get(key, 0.0) <= ours - SAME_BITS

        peers = [
            other
            for key, other in medians.items()
            if key[0] != OURS and other is not None and is_small(key) == is_small(mine)
        ]
        if cell.is_less_better:
            return value * NEAR <= min(peers)
        return value >= NEAR * max(peers)

    def rank(self, model: str, contender: Contender) -> float:
        """Returns how good a peer was in the model's cells so far: mean share of the best peer, 1 at most."""
        shares = []
        for cell in CELLS[model]:
            found = {
                key: value for key, value in self._medians(model, cell).items() if value is not None and key[0] != OURS
            }
            value = found.get((contender.engine, contender.format))
            if value is not None:
                shares.append(min(found.values()) / value if cell.is_less_better else value / max(found.values()))
        return statistics.mean(shares) if shares else 0.0

    def expected_s(self, model: str, cell: Cell, contender: Contender) -> float:
        """Returns the seconds that the next measurement takes: as the last ones did, or by the speeds seen so far."""
        key = (model, cell.name, contender.engine, contender.format)
        known = [one.wall_s for one in self._results.samples if (one.model, one.cell, one.engine, one.format) == key]
        if known:
            return statistics.median(known[-3:])
        if cell.kind in (Kind.MEMORY, Kind.ENCODE, Kind.CLIENTS):
            return 2.0
        prefill, decode = (self._speed(model, kind, contender) for kind in (Kind.PREFILL, Kind.DECODE))
        if cell.kind is Kind.START or prefill is None or decode is None:
            return UNKNOWN_S
        together = min(cell.sequences, FASTER_TOGETHER)
        return cell.sequences * (cell.prompt_tokens / prefill + cell.output_tokens / (decode * together))

    def _speed(self, model: str, kind: Kind, contender: Contender) -> float | None:
        """The tokens per second that a single sequence was seen to make."""
        for cell in CELLS[model]:
            value = self._medians(model, cell).get((contender.engine, contender.format))
            if cell.kind is kind and value is not None:
                return value
        return None

    def _medians(self, model: str, cell: Cell) -> dict[tuple[str, str], float | None]:
        """Median by engine and format; None where it was tried and never worked."""
        found: dict[tuple[str, str], list[float]] = {}
        for one in self._results.samples:
            if (one.model, one.cell) == (model, cell.name):
                values = found.setdefault((one.engine, one.format), [])
                if one.value is not None:
                    values.append(one.value)
        return {key: statistics.median(values) if values else None for key, values in found.items()}
