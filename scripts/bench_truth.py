"""What a load generator noted, beside what the mock server did: by percentiles of one definition, and by request."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from bench_tools import Moment, Noted, Reading

from headrace.bench.mock.truth import Truth

NAMES = ("ttft", "itl", "e2e")


@dataclass(frozen=True)
class Off:
    """How far a tool's figure is from the truth.

    Args:
        p50_off_s, p99_off_ratio: between percentiles of the same definition; a ratio less one.
        pair_p50_s, pair_p99_s: percentiles of the distance between what the tool noted of a request and what the mock
            did to it; None where the tool notes no requests.
    """

    p50_s: float
    p99_s: float
    true_p50_s: float
    true_p99_s: float
    pair_p50_s: float | None
    pair_p99_s: float | None

    @property
    def p50_off_s(self) -> float:
        """Seconds at the median."""
        return self.p50_s - self.true_p50_s

    @property
    def p99_off_ratio(self) -> float:
        """Share of the true p99."""
        return self.p99_s / self.true_p99_s - 1 if self.true_p99_s else 0.0


def percentile(values: Sequence[float], quantile: float) -> float:
    """Gives the nearest rank: the smallest value that at least this share does not exceed.

    It has to be the same on both sides. Of 800 requests with a long tail, the one beside the p99 is some 4 ms away:
    more than any tool is wrong by.
    """
    ordered = sorted(values)
    return ordered[max(0, math.ceil(quantile * len(ordered) - 1e-9) - 1)]


def good_of(truths: Sequence[Truth]) -> list[Truth]:
    """Gives the answers that were whole, in the order in which they were asked for."""
    found = [truth for truth in truths if truth.status == 200 and truth.write_s and truth.fault is None]
    return sorted(found, key=lambda truth: truth.arrival_s)


def noted_of(truth: Truth) -> Noted:
    """Gives what a faultless tool would note."""
    gaps = tuple(after - before for before, after in pairwise(truth.write_s))
    first_s, last_s = truth.write_s[0], truth.write_s[-1]
    return Noted(truth.arrival_s, first_s - truth.arrival_s, last_s - truth.arrival_s, gaps)


def values_of(requests: Sequence[Noted], name: str, *, has_mean_itl: bool) -> list[float]:
    """Gives one figure of all requests; of ITL each gap, or each request's mean."""
    if name == "ttft":
        return [one.ttft for one in requests]
    if name == "e2e":
        return [one.e2e for one in requests]
    if has_mean_itl:
        return [_mean(one.gaps) for one in requests if one.gaps]
    return [gap for one in requests for gap in one.gaps]


def compare(reading: Reading, truths: Sequence[Truth]) -> dict[str, Off]:
    """Gives for each figure that a tool has what it says and what was so."""
    true = [noted_of(truth) for truth in good_of(truths)]
    mean = reading.has_mean_itl
    if not reading.requests:
        found = {}
        for name, (p50, p99) in reading.printed.items():
            values = values_of(true, name, has_mean_itl=mean)
            found[name] = Off(p50, p99, percentile(values, 0.5), percentile(values, 0.99), None, None)
        return found
    pairs = paired(reading.requests, true)
    found = {}
    for name in NAMES:
        sides = [values_of(side, name, has_mean_itl=mean) for side in (reading.requests, true)]
        if not all(sides):
            continue
        both = [[values_of([one], name, has_mean_itl=True)[0] for one in pair] for pair in pairs]
        distances = [abs(noted - was) for noted, was in both]
        figures = [percentile(side, share) for side in sides for share in (0.5, 0.99)]
        near = (percentile(distances, 0.5), percentile(distances, 0.99)) if distances else (None, None)
        found[name] = Off(*figures, *near)
    return found


def paired(requests: Sequence[Noted], true: Sequence[Noted]) -> list[tuple[Noted, Noted]]:
    """Pairs requests in the order in which they started; none where a tool noted fewer or more than there were.

    Two that started within the same moment may arrive the other way round. Where the mock's answers say so, they are
    exchanged: that can only be in the tool's favour.
    """
    if len(requests) != len(true):
        return []
    ordered = sorted(requests, key=lambda one: one.started)
    for i in range(len(ordered) - 1):
        first, second = ordered[i], ordered[i + 1]
        kept = abs(first.e2e - true[i].e2e) + abs(second.e2e - true[i + 1].e2e)
        if abs(first.e2e - true[i + 1].e2e) + abs(second.e2e - true[i].e2e) < kept:
            ordered[i], ordered[i + 1] = second, first
    return list(zip(ordered, true, strict=True))


def cpu_s(readings: Sequence[Moment], start_s: float, end_s: float) -> float:
    """Gives the CPU seconds between two moments; between readings it is taken to rise evenly."""
    return _at(readings, end_s) - _at(readings, start_s)


def _at(readings: Sequence[Moment], moment_s: float) -> float:
    if not readings or moment_s <= readings[0][0]:
        return 0.0
    for (before_s, low), (after_s, high) in pairwise(readings):
        if before_s <= moment_s <= after_s:
            return low + (high - low) * (moment_s - before_s) / (after_s - before_s)
    return readings[-1][1]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
