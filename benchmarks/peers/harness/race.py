"""Who is measured next, and how long it will take: what the samples so far say."""

from __future__ import annotations

import statistics

from harness.cells import CELLS, LARGE, SMALL, Cell, Kind
from harness.contender import Contender
from harness.engines import OP_BY_OP, OURS
from harness.results import Results
from harness.table import SAME_BITS

NEAR = 0.7
"""A peer is measured again while its median is within this share of the best peer's."""
NUM_FEW = 2
DEAR_PROMPT = 1024
"""Prompts longer than this take minutes in some engines, so only what decides is measured after them."""
USUAL_START_S = {"vLLM": 90.0}
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
        if contender.engine in (OURS, OP_BY_OP) or mine not in medians:
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
            if key[0] not in (OURS, OP_BY_OP) and other is not None and is_small(key) == is_small(mine)
        ]
        if cell.is_less_better:
            return value * NEAR <= min(peers)
        return value >= NEAR * max(peers)

    def few(self, model: str, cell: Cell, able: list[Contender]) -> list[Contender]:
        """Returns ours, in the format that did best, with its op-by-op arm, and the two peers that the table will name.

        Those are the best one of our bits or more and the best of fewer; where one of them is missing, the next best.
        """
        ordered = self.ordered(model, cell, able)
        ours = [each for each in ordered if each.engine == OURS]
        if cell.sequences > 1 or cell.prompt_tokens > DEAR_PROMPT:
            ours = ours[:1]
        peers = [each for each in ordered if each.engine not in (OURS, OP_BY_OP)]
        bits = min((self._bits(model, each) for each in ours), default=0.0) - SAME_BITS
        same = next((each for each in peers if self._bits(model, each) > bits), None)
        small = next((each for each in peers if self._bits(model, each) <= bits), None)
        chosen = [each for each in (same, small) if each is not None]
        chosen += [each for each in peers if each not in chosen][: NUM_FEW - len(chosen)]
        arms = [each for each in ordered if each.engine == OP_BY_OP and cell.prompt_tokens <= DEAR_PROMPT]
        return [*ours, *arms, *chosen]

    def ordered(self, model: str, cell: Cell, able: list[Contender]) -> list[Contender]:
        """Returns ours, then its op-by-op arm, then the peers, each of them the best in the cell first.

        Where a cell was never measured, its figures on the small model say who is likely to be good; then the ranks.
        """
        known = self._medians(model, cell)
        likely = self._medians(SMALL, cell) if model == LARGE else {}
        sign = 1 if cell.is_less_better else -1

        def order(each: Contender) -> tuple[int, int, float]:
            kind = 0 if each.engine == OURS else 1 if each.engine == OP_BY_OP else 2
            for place, medians in enumerate((known, likely)):
                value = medians.get((each.engine, each.format))
                if value is not None:
                    return kind, place, sign * value
            return kind, 2, -self.rank(model, each)

        return sorted(able, key=order)

    def start_s(self, model: str, contender: Contender) -> float:
        """Returns the seconds that its first start takes: as the cell of starts has it, or as long as is usual."""
        starts = [self._medians(model, cell) for cell in CELLS[model] if cell.kind is Kind.START]
        known = [found.get((contender.engine, contender.format)) for found in starts]
        return next((value for value in known if value is not None), USUAL_START_S.get(contender.engine, UNKNOWN_S))

    def _bits(self, model: str, contender: Contender) -> float:
        found = (entry for entry in self._results.entries if entry.model == model)
        return next((e.bits for e in found if (e.engine, e.format) == (contender.engine, contender.format)), 0.0)

    def rank(self, model: str, contender: Contender) -> float:
        """Returns how good a peer was in the model's cells so far: mean share of the best peer, 1 at most."""
        shares = []
        for cell in CELLS[model]:
            found = {
                key: value
                for key, value in self._medians(model, cell).items()
                if value is not None and key[0] not in (OURS, OP_BY_OP)
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
