"""Raises the load step by step and finds where more of it stops paying: the knee.

The knee is the load at which throughput ÷ latency (median E2E) is largest: below it the server idles, above it requests
mostly wait. Source: Kleinrock, "Power and deterministic rules of thumb for probabilistic problems in computer
communications" (1979). With objectives, the highest load that keeps them is given as well; that one is for planning.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from headrace.bench.slo import Limit
from headrace.bench.summary import MAX_LAG_P99_S, Latency, Summary

SCHEMA: Final = 1
_LEAST_GAIN: Final = 1.03
"""Two steps in a row that each give less than 3 % more throughput end a sweep: the server is full."""
MAX_FAILED_RATIO: Final = 0.05
KEPT_RATIO: Final = 0.99
"""Objectives are kept by a load when so many of its requests keep them."""
_LEAST_FOLLOWED: Final = 0.9
"""An open loop's server that answers less than this share of what is sent is full."""


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One load and what came of it.

    Args:
        load: requests at once, or requests sent per second.
        throughput_per_s: output tokens, or requests where there are none.
        *_s: seconds; None where answers have no such thing.
        failed_ratio, good_ratio: shares of its requests; good ones kept every objective.
    """

    load: float
    num: int
    requests_per_s: float
    throughput_per_s: float
    throughput_low: float
    throughput_high: float
    e2e_p50_s: float
    e2e_p95_s: float
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    tpot_p50_s: float | None
    tpot_p95_s: float | None
    failed_ratio: float
    good_ratio: float | None


class Sweep(msgspec.Struct, frozen=True, kw_only=True):
    """A curve.

    Args:
        headrace_sweep: number of this schema.
        is_rate: loads are requests per second of an open loop, else requests at once of a closed one.
        unit: of throughput.
        points: in order of load.
        knee: the load at the knee; None without a point.
        kept: the highest load up to which all loads keep the objectives; None where none does or there are none.
        most_per_s: the largest throughput.
        is_full: the server gave no more before the loads ended; else it may have more to give.
    """

    headrace_sweep: int
    url: str
    model: str
    started_at_s: float
    is_rate: bool
    unit: str
    objectives: tuple[Limit, ...]
    points: tuple[Point, ...]
    knee: float | None
    kept: float | None
    most_per_s: float
    is_full: bool
    notes: tuple[str, ...]


Measure = Callable[[float], Summary]
"""Puts a load on the server and gives what came of it."""


def run_sweep(loads: Sequence[float], measure: Measure, *, is_rate: bool, can_refine: bool = True) -> Sweep | None:
    """Measures loads from the lowest up until the server is full, then between the knee and its neighbours.

    Args:
        loads: ascending, at least one.
        can_refine: measures the two loads in between as well.

    Returns:
        None when not a single request was answered.
    """
    found: dict[float, Summary] = {}
    is_full = was_cut = False
    for load in loads:
        found[load] = measure(load)
        was_cut = found[load].is_partial
        points = _points(found)
        if was_cut or not points:
            break
        if _is_full(points, is_rate=is_rate):
            is_full = True
            break
    if can_refine and not was_cut and (points := _points(found)):
        for load in between(points, is_rate=is_rate):
            found[load] = measure(load)
            if found[load].is_partial:
                was_cut = True
                break
    return build_sweep(found, is_rate=is_rate, is_full=is_full, was_cut=was_cut)


def build_sweep(found: dict[float, Summary], *, is_rate: bool, is_full: bool, was_cut: bool) -> Sweep | None:
    """Gives the curve of measured loads."""
    points = _points(found)
    if not points:
        return None
    first = next(iter(found.values()))
    notes = []
    if was_cut:
        notes.append("It was stopped early: the curve ends where it had come to.")
    elif not is_full:
        notes.append("The server was not full at the highest load: it may have more to give.")
    weak = [point.load for point in points if point.failed_ratio > MAX_FAILED_RATIO]
    if weak:
        notes.append(f"Over {MAX_FAILED_RATIO:.0%} of requests failed from a load of {weak[0]:g} on.")
    late = [load for load, summary in found.items() if summary.generator_lag_s > MAX_LAG_P99_S]
    if late:
        notes.append(f"At a load of {', '.join(f'{load:g}' for load in sorted(late))} the generator itself was late.")
    return Sweep(
        headrace_sweep=SCHEMA,
        url=first.settings.url,
        model=first.settings.model,
        started_at_s=first.started_at_s,
        is_rate=is_rate,
        unit="requests/s" if first.throughput.output_tokens_per_s is None else "output tokens/s",
        objectives=first.objectives,
        points=tuple(points),
        knee=find_knee(points),
        kept=_kept(points),
        most_per_s=max(point.throughput_per_s for point in points),
        is_full=is_full,
        notes=tuple(notes),
    )


def find_knee(points: Sequence[Point]) -> float | None:
    """Gives the load with the largest throughput per latency among those that hardly fail."""
    usable = [point for point in points if point.failed_ratio <= MAX_FAILED_RATIO]
    if not usable:
        return None
    return max(usable, key=lambda point: point.throughput_per_s / point.e2e_p50_s).load


def between(points: Sequence[Point], *, is_rate: bool) -> list[float]:
    """Gives the loads halfway (geometrically) from the knee to its neighbours, as far as there are any."""
    knee = find_knee(points)
    loads = [point.load for point in points]
    if knee is None:
        return []
    at = loads.index(knee)
    found = []
    for low, high in ((at - 1, at), (at, at + 1)):
        if low >= 0 and high < len(loads):
            middle = math.sqrt(loads[low] * loads[high])
            load = middle if is_rate else float(round(middle))
            if loads[low] < load < loads[high]:
                found.append(load)
    return found


def doubling(first: float, last: float) -> list[float]:
    """Gives loads from ``first``, doubling, with ``last`` at the end."""
    loads = []
    load = first
    while load < last:
        loads.append(load)
        load *= 2
    return [*loads, last]


def _is_full(points: Sequence[Point], *, is_rate: bool) -> bool:
    if points[-1].failed_ratio > MAX_FAILED_RATIO:
        return True
    if is_rate and points[-1].requests_per_s < _LEAST_FOLLOWED * points[-1].load:
        return True
    if len(points) < 3:
        return False
    gains = [points[at].throughput_per_s / points[at - 1].throughput_per_s for at in (-2, -1)]
    return max(gains) < _LEAST_GAIN


def _kept(points: Sequence[Point]) -> float | None:
    kept = None
    for point in points:
        if point.good_ratio is None or point.good_ratio < KEPT_RATIO:
            break
        kept = point.load
    return kept


def _points(found: dict[float, Summary]) -> list[Point]:
    points = []
    for load, summary in sorted(found.items()):
        if "e2e" not in summary.latency:
            continue
        rate = summary.throughput.output_tokens_per_s or summary.throughput.requests_per_s
        points.append(
            Point(
                load=load,
                num=summary.num_measured,
                requests_per_s=summary.throughput.requests_per_s.value,
                throughput_per_s=rate.value,
                throughput_low=rate.low,
                throughput_high=rate.high,
                e2e_p50_s=summary.latency["e2e"].at(0.5).value_s,
                e2e_p95_s=summary.latency["e2e"].at(0.95).value_s,
                ttft_p50_s=_at(summary.latency.get("ttft"), 0.5),
                ttft_p95_s=_at(summary.latency.get("ttft"), 0.95),
                tpot_p50_s=_at(summary.latency.get("tpot"), 0.5),
                tpot_p95_s=_at(summary.latency.get("tpot"), 0.95),
                failed_ratio=summary.num_failed / summary.num_measured,
                good_ratio=summary.throughput.good_ratio,
            )
        )
    return points


def _at(latency: Latency | None, quantile: float) -> float | None:
    return None if latency is None else latency.at(quantile).value_s
