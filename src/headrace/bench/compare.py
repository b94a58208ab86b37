"""Says whether two servers, or two versions of one, differ, and by how much.

Figures are taken per **round**: some hundred requests, long enough to be a measurement, short enough to run many.
Rounds of two live servers alternate (A B, B A, A B, …) and send the same requests, so what the machine does meanwhile
meets both; they are compared pair by pair. Two recorded runs are cut into rounds of equally many requests and compared
as two groups; what changed between the runs cannot be told from a difference of the servers then, and the result says
so.

The verdict rests on four figures (TTFT, TPOT, E2E at the median, and output tokens or requests per second), tested
together so that equal servers are called different in at most 1 of 100 comparisons. "No difference" is said only where
a difference of the size looked for would have been seen; else the result is undecided.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from typing import Final

import msgspec
import numpy as np

from headrace.base.errors import ConfigError
from headrace.bench.gather import output_tokens, request_figures
from headrace.bench.ranks import MAX_VALUES, Floats, Shift, holm, memory_of, paired_shift, unpaired_shift
from headrace.bench.records import Exchange, Run
from headrace.bench.statistics import percentiles

SCHEMA: Final = 1
CONFIDENCE: Final = 0.99
FIND_RATIO: Final = 0.1
"""The difference that a comparison shall not miss."""
ROUNDS: Final = 20
ROUND_REQUESTS: Final = 200
"""20 × 200 requests a server: ``scripts/compare-power`` shows that with them a difference of 10 % is found, and equal
servers are called equal."""
RECORDED_ROUNDS: Final = 40
LEAST_ROUND_REQUESTS: Final = 50
LEAST_ROUNDS: Final = 10
"""Below these nothing could be found: of ten pairs all alike, p is 2/2¹⁰, and times four figures 0.8 %, under 1 %."""


class Figure(msgspec.Struct, frozen=True):
    """What is compared.

    Args:
        decides: the verdict rests on it; the others are shown with their intervals.
    """

    name: str
    is_higher_better: bool
    decides: bool


FIGURES: Final = (
    Figure("TTFT p50", False, True),
    Figure("TPOT p50", False, True),
    Figure("E2E p50", False, True),
    Figure("output tokens/s", True, True),
    Figure("requests/s", True, True),
    Figure("TTFT p95", False, False),
    Figure("E2E p95", False, False),
)


class Verdict(StrEnum):
    """What B is, beside A."""

    SAME = "no difference"
    BETTER = "better"
    WORSE = "worse"
    UNDECIDED = "undecided"


class FigureResult(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of both sides.

    Args:
        a, b: middle of the rounds; seconds, or per second.
        ratio: B ÷ A, with the ends of its 99 % interval; null where so few rounds cannot bound it.
        p: chance of a difference this clear between equal servers, made larger for being one of several.
    """

    name: str
    is_higher_better: bool
    decides: bool
    a: float
    b: float
    ratio: float
    ratio_low: float | None
    ratio_high: float | None
    p: float
    verdict: Verdict


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """The result.

    Args:
        headrace_comparison: number of this schema.
        is_paired: rounds alternated and were compared pair by pair.
        rounds, requests: of a side, as many as were compared.
        failed_a, failed_b: requests that failed.
        find_ratio: the difference that was looked for.
        figures_a, figures_b: by figure, one value a round.
    """

    headrace_comparison: int
    name_a: str
    name_b: str
    is_paired: bool
    rounds: int
    requests: int
    failed_a: int
    failed_b: int
    find_ratio: float
    verdict: Verdict
    results: tuple[FigureResult, ...]
    figures_a: dict[str, tuple[float, ...]]
    figures_b: dict[str, tuple[float, ...]]
    notes: tuple[str, ...]


class Round(msgspec.Struct, frozen=True):
    """What one round of one side came to.

    Args:
        values: by the name of ``FIGURES``; only what its answers have.
    """

    values: dict[str, float]
    num_good: int
    num_failed: int


def round_of(exchanges: Iterable[Exchange], duration_s: float | None = None) -> Round:
    """Gives the figures of one round; warm-up is left out.

    Args:
        duration_s: that rates are per; default: from the first request's due moment to the last answer.
    """
    measured = [exchange for exchange in exchanges if not exchange.is_warmup]
    good = [exchange for exchange in measured if exchange.error is None]
    if not good:
        return Round({}, 0, len(measured))
    if duration_s is None:
        duration_s = max(e.ended_s for e in measured) - min(e.scheduled_s for e in measured)
    figures = [request_figures(exchange) for exchange in good]
    values: dict[str, float] = {}
    for name, metric, quantiles in (
        ("TTFT", "ttft", (0.5, 0.95)),
        ("TPOT", "tpot", (0.5,)),
        ("E2E", "e2e", (0.5, 0.95)),
    ):
        found = np.array([figure[metric] for figure in figures if metric in figure])
        if len(found):
            for quantile, value in zip(quantiles, percentiles(found, quantiles), strict=True):
                values[f"{name} p{100 * quantile:g}"] = float(value)
    tokens = sum(output_tokens(exchange) for exchange in good)
    if tokens:
        values["output tokens/s"] = tokens / duration_s
    else:
        values["requests/s"] = len(good) / duration_s
    return Round({name: value for name, value in values.items() if value > 0}, len(good), len(measured) - len(good))


def recorded_rounds(run: Run) -> list[Round]:
    """Cuts a recorded run into 40 rounds, or fewer where these would have less than 50 requests each.

    Raises:
        ConfigError: it has too few requests for any comparison.
    """
    num = len(run.exchanges)
    rounds = min(RECORDED_ROUNDS, num // LEAST_ROUND_REQUESTS)
    if rounds < LEAST_ROUNDS:
        raise ConfigError(
            f"the run has {num} requests: a comparison takes {LEAST_ROUNDS * LEAST_ROUND_REQUESTS} of each side"
        )
    return list(cut_rounds(run.exchanges, num, rounds))


def cut_rounds(exchanges: Iterable[Exchange], num_exchanges: int, rounds: int) -> Iterator[Round]:
    """Cuts a run into ``rounds`` rounds of equally many requests, in order of ending.

    Each round's rates are per the time between the last answer before it and its own last answer.
    """
    measured: list[Exchange] = []
    last_s: float | None = None
    given = seen = 0
    for exchange in exchanges:
        seen += 1
        if exchange.is_warmup:
            last_s = exchange.ended_s
            continue
        measured.append(exchange)
        if seen * rounds >= (given + 1) * num_exchanges:
            ended_s = max(one.ended_s for one in measured)
            start_s = min(one.scheduled_s for one in measured) if last_s is None else last_s
            yield round_of(measured, max(ended_s - start_s, 1e-9))
            last_s, measured, given = ended_s, [], given + 1


def compare_rounds(
    a: Sequence[Round],
    b: Sequence[Round],
    *,
    is_paired: bool,
    names: tuple[str, str] = ("A", "B"),
    find_ratio: float = FIND_RATIO,
    notes: Sequence[str] = (),
) -> Comparison:
    """Compares two sides.

    Args:
        a, b: rounds; where paired, the ones at one place ran next to each other.

    Raises:
        ConfigError: too few or too many rounds, or sides without a figure in common.
    """
    for name, rounds in zip(names, (a, b), strict=True):
        if not LEAST_ROUNDS <= len(rounds) <= MAX_VALUES:
            raise ConfigError(
                f"{name} has {len(rounds)} rounds: from {LEAST_ROUNDS} to {MAX_VALUES} are needed to tell a difference"
            )
    tested = [(figure, *values) for figure in FIGURES if (values := _values(a, b, figure.name, is_paired=is_paired))]
    if not any(figure.decides for figure, _, _ in tested):
        raise ConfigError(f"{names[0]} and {names[1]} have no figure in common: were any requests answered?")
    shifts = [_shift(first, second, is_paired=is_paired) for _, first, second in tested]
    p_values = _adjusted([figure for figure, _, _ in tested], shifts)
    results = tuple(
        _result(figure, first, second, shift, p, find_ratio)
        for (figure, first, second), shift, p in zip(tested, shifts, p_values, strict=True)
    )
    failed = sum(one.num_failed for one in a), sum(one.num_failed for one in b)
    totals = tuple(sum(one.num_good + one.num_failed for one in side) for side in (a, b))
    verdict = _overall([result.verdict for result in results if result.decides])
    all_notes = list(notes)
    failure_p = fisher(failed[0], totals[0], failed[1], totals[1])
    if failure_p < 1 - CONFIDENCE:
        is_worse = failed[1] / totals[1] > failed[0] / totals[0]
        more, fewer = (names[1], names[0]) if is_worse else names
        all_notes.insert(
            0, f"{more} failed more often than {fewer}: {failed[0]} of {totals[0]}, {failed[1]} of {totals[1]}."
        )
        if is_worse:
            verdict = Verdict.WORSE
    return Comparison(
        headrace_comparison=SCHEMA,
        name_a=names[0],
        name_b=names[1],
        is_paired=is_paired,
        rounds=min(len(a), len(b)),
        requests=min(totals),
        failed_a=failed[0],
        failed_b=failed[1],
        find_ratio=find_ratio,
        verdict=verdict,
        results=results,
        figures_a=_series(a),
        figures_b=_series(b),
        notes=tuple(all_notes),
    )


def _values(a: Sequence[Round], b: Sequence[Round], name: str, *, is_paired: bool) -> tuple[Floats, Floats] | None:
    if is_paired:
        pairs = [
            (x.values[name], y.values[name]) for x, y in zip(a, b, strict=True) if name in x.values and name in y.values
        ]
        first, second = np.array([x for x, _ in pairs]), np.array([y for _, y in pairs])
    else:
        first, second = (np.array([one.values[name] for one in side if name in one.values]) for side in (a, b))
    return (np.log(first), np.log(second)) if len(first) and len(second) else None


def _shift(first: Floats, second: Floats, *, is_paired: bool) -> Shift:
    if is_paired:
        return paired_shift(first, second, CONFIDENCE)
    return unpaired_shift(first, second, CONFIDENCE, memory=memory_of(first, second))


def _adjusted(figures: Sequence[Figure], shifts: Sequence[Shift]) -> list[float]:
    """Those that decide are tested together; the others stand for themselves."""
    deciding = [index for index, figure in enumerate(figures) if figure.decides]
    found = [shift.p for shift in shifts]
    for index, p in zip(deciding, holm(np.array([found[index] for index in deciding])), strict=True):
        found[index] = float(p)
    return found


def _result(figure: Figure, first: Floats, second: Floats, shift: Shift, p: float, find_ratio: float) -> FigureResult:
    if p < 1 - CONFIDENCE:
        verdict = Verdict.BETTER if (shift.estimate > 0) == figure.is_higher_better else Verdict.WORSE
    elif shift.low >= math.log(1 - find_ratio) and shift.high <= math.log(1 + find_ratio):
        verdict = Verdict.SAME
    else:
        verdict = Verdict.UNDECIDED
    return FigureResult(
        name=figure.name,
        is_higher_better=figure.is_higher_better,
        decides=figure.decides,
        a=float(np.exp(np.median(first))),
        b=float(np.exp(np.median(second))),
        ratio=math.exp(shift.estimate),
        ratio_low=math.exp(shift.low) if math.isfinite(shift.low) else None,
        ratio_high=math.exp(shift.high) if math.isfinite(shift.high) else None,
        p=p,
        verdict=verdict,
    )


def _overall(verdicts: Sequence[Verdict]) -> Verdict:
    """Worse in one figure is worse; better in one and worse in none is better."""
    return next(
        verdict for verdict in (Verdict.WORSE, Verdict.BETTER, Verdict.UNDECIDED, Verdict.SAME) if verdict in verdicts
    )


def _series(rounds: Sequence[Round]) -> dict[str, tuple[float, ...]]:
    names = dict.fromkeys(name for one in rounds for name in one.values)
    return {name: tuple(one.values[name] for one in rounds if name in one.values) for name in names}


def fisher(failed_a: int, total_a: int, failed_b: int, total_b: int) -> float:
    """Gives the chance that equal failure rates show numbers of failures this uneven. Source: Fisher's exact test."""
    failed, total = failed_a + failed_b, total_a + total_b
    if failed in (0, total):
        return 1.0

    def log_chance(in_a: int) -> float:
        return _log_choose(total_a, in_a) + _log_choose(total_b, failed - in_a) - _log_choose(total, failed)

    seen = log_chance(failed_a)
    possible = range(max(0, failed - total_b), min(failed, total_a) + 1)
    chances = [chance for chance in map(log_chance, possible) if chance <= seen + 1e-9]
    return min(1.0, math.fsum(map(math.exp, chances)))


def _log_choose(num: int, chosen: int) -> float:
    return math.lgamma(num + 1) - math.lgamma(chosen + 1) - math.lgamma(num - chosen + 1)
