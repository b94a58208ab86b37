"""Computes a ``Summary`` of a ``Run``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from headrace.bench import statistics as stats
from headrace.bench.gather import Gathered, gather
from headrace.bench.records import Run
from headrace.bench.slo import Limit
from headrace.bench.statistics import Counts, Floats, Histogram
from headrace.bench.summary import (
    DEFINITIONS,
    MAX_BUSY_RATIO,
    MAX_LAG_P99_S,
    SCHEMA,
    ErrorCount,
    Latency,
    Percentile,
    Rate,
    Slice,
    Summary,
    Throughput,
)

_MAX_SLICES: Final = 120
_LEAST_SLICES: Final = 8
_SLICE_REQUESTS: Final = 8
"""A slice of the run has about so many requests at least, else its percentiles are one request each."""
_CDF: Final = np.linspace(0, 1, 201)


def summarize(run: Run, objectives: tuple[Limit, ...] = (), *, seed: int = 0) -> Summary:
    """Computes the figures of a run.

    Args:
        objectives: what a request must keep to count into goodput.
        seed: of the bootstrap.
    """
    gathered = gather(run, objectives)
    end = run.end
    start_s = end.measured_from_s if end else gathered.first_scheduled_s
    stop_s = max(gathered.last_ended_s, start_s)
    measured_s = stop_s - start_s
    num_measured = gathered.num_good + gathered.num_failed
    num_slices = min(_MAX_SLICES, max(_LEAST_SLICES, num_measured // _SLICE_REQUESTS))
    slice_s = measured_s / num_slices if measured_s > 0 else 1.0
    latency = _latencies(gathered, seed)
    overhead = end.overhead if end else None
    return Summary(
        headrace_report=SCHEMA,
        started_at_s=run.start.started_at_s,
        settings=run.settings,
        environment=run.start.environment,
        overhead=overhead,
        objectives=objectives,
        measured_s=measured_s,
        is_partial=run.is_partial,
        num_warmup=gathered.num_warmup,
        num_good=gathered.num_good,
        num_failed=gathered.num_failed,
        latency=latency,
        definitions={name: DEFINITIONS[name] for name in latency},
        throughput=_throughput(gathered, objectives, start_s, measured_s, seed),
        tokens=gathered.tokens.result(),
        errors=_errors(gathered),
        finish_reasons=dict(gathered.finish_reasons.most_common()),
        slice_s=slice_s,
        slices=_slices(gathered, start_s, slice_s, num_slices),
        notes=(*_notes(run, gathered, latency), *(end.notes if end else ())),
    )


def _latencies(gathered: Gathered, seed: int) -> dict[str, Latency]:
    found: dict[str, Latency] = {}
    for name in DEFINITIONS:
        if name == "itl":
            if gathered.gaps.num:
                found[name] = _latency_of_gaps(gathered.gaps, seed)
        elif name in gathered.values:
            found[name] = _latency(np.asarray(gathered.values[name], np.float64), seed)
    return found


def _latency(values: Floats, seed: int) -> Latency:
    low, high = stats.mean_interval(values, seed=seed)
    return Latency(
        num=len(values),
        mean_s=float(values.mean()),
        mean_low_s=low,
        mean_high_s=high,
        min_s=float(values.min()),
        max_s=float(values.max()),
        percentiles=_percentiles(
            stats.percentiles(values), stats.percentile_intervals(values, seed=seed), num_independent=len(values)
        ),
        cdf_s=tuple(map(float, stats.percentiles(values, _CDF.tolist()))),
    )


def _latency_of_gaps(gaps: Histogram, seed: int) -> Latency:
    low, high = gaps.mean_interval(seed=seed)
    return Latency(
        num=gaps.num,
        mean_s=gaps.mean_s,
        mean_low_s=low,
        mean_high_s=high,
        min_s=float(gaps.extremes[0]),
        max_s=float(gaps.extremes[1]),
        percentiles=_percentiles(gaps.percentiles(), gaps.percentile_intervals(seed=seed), num_independent=gaps.num),
        cdf_s=tuple(map(float, gaps.percentiles(_CDF.tolist()))),
    )


def _percentiles(values: Floats, ends: Floats, *, num_independent: int) -> tuple[Percentile, ...]:
    return tuple(
        Percentile(quantile, float(value), float(low), float(high), stats.is_indicative(quantile, num_independent))
        for quantile, value, (low, high) in zip(stats.QUANTILES, values, ends, strict=True)
    )


def _throughput(
    gathered: Gathered, objectives: tuple[Limit, ...], start_s: float, measured_s: float, seed: int
) -> Throughput:
    ended = np.asarray(gathered.ended_s, np.float64)
    kept = np.asarray(gathered.is_kept, np.float64)
    has_tokens = gathered.tokens.result().output_source != "none"
    num_measured = gathered.num_good + gathered.num_failed
    return Throughput(
        requests_per_s=_rate(ended, np.ones(len(ended)), start_s, measured_s, seed),
        output_tokens_per_s=_rate(*gathered.token_times(), start_s, measured_s, seed) if has_tokens else None,
        prompt_tokens_per_s=gathered.prompt_tokens / measured_s if gathered.has_prompt_tokens and measured_s else None,
        goodput_per_s=_rate(ended, kept, start_s, measured_s, seed) if objectives else None,
        good_ratio=float(kept.sum()) / num_measured if objectives and num_measured else None,
    )


def _rate(moments_s: Floats, amounts: Floats, start_s: float, measured_s: float, seed: int) -> Rate:
    """Gives an amount per second, its interval by resampling stretches of the run."""
    if measured_s <= 0:
        return Rate(0.0, 0.0, 0.0)
    num_blocks = max(1, min(stats.NUM_BLOCKS, len(moments_s)))
    at = np.clip((moments_s - start_s) / measured_s * num_blocks, 0, num_blocks - 1).astype(np.int64)
    per_block = np.bincount(at, weights=amounts, minlength=num_blocks).astype(np.float64)
    low, high = stats.mean_interval(per_block, seed=seed)
    return Rate(float(amounts.sum()) / measured_s, low * num_blocks / measured_s, high * num_blocks / measured_s)


def _errors(gathered: Gathered) -> tuple[ErrorCount, ...]:
    num_measured = gathered.num_good + gathered.num_failed
    return tuple(
        ErrorCount(kind, num, num / num_measured, gathered.examples[kind])
        for kind, num in gathered.errors.most_common()
    )


def _slices(gathered: Gathered, start_s: float, slice_s: float, num_slices: int) -> tuple[Slice, ...]:
    def place(moments_s: Floats) -> Counts:
        return np.clip((moments_s - start_s) / slice_s, 0, num_slices - 1).astype(np.int64)

    ended = np.asarray(gathered.ended_s, np.float64)
    at = place(ended)
    e2e = np.asarray(gathered.values.get("e2e", ()), np.float64)
    ttft = np.asarray(gathered.ttft_s, np.float64)
    failed = np.bincount(place(np.asarray(gathered.failed_s, np.float64)), minlength=num_slices)
    token_s, tokens = gathered.token_times()
    tokens_at = np.bincount(place(token_s), weights=tokens, minlength=num_slices)
    spans = np.asarray(gathered.spans_s, np.float64).reshape(-1, 2)
    begun, over = np.sort(spans[:, 0]), np.sort(spans[:, 1])
    found = []
    for index in range(num_slices):
        here = at == index
        middle_s = start_s + (index + 0.5) * slice_s
        times = [_middle_and_tail(values[here]) for values in (ttft, e2e)]
        found.append(
            Slice(
                start_s=start_s + index * slice_s,
                num_good=int(here.sum()),
                num_failed=int(failed[index]),
                in_flight=int(np.searchsorted(begun, middle_s) - np.searchsorted(over, middle_s)),
                output_tokens_per_s=float(tokens_at[index]) / slice_s,
                ttft_p50_s=times[0][0],
                ttft_p95_s=times[0][1],
                e2e_p50_s=times[1][0],
                e2e_p95_s=times[1][1],
            )
        )
    return tuple(found)


def _middle_and_tail(values: Floats) -> tuple[float | None, float | None]:
    known = values[~np.isnan(values)]
    if not len(known):
        return None, None
    middle, tail = stats.percentiles(known, (0.5, 0.95))
    return float(middle), float(tail)


def _notes(run: Run, gathered: Gathered, latency: Mapping[str, Latency]) -> list[str]:
    notes = []
    if run.is_partial:
        notes.append("The run was stopped before its end: these are the figures until then.")
    if gathered.num_failed:
        total = gathered.num_good + gathered.num_failed
        notes.append(
            f"{gathered.num_failed:,} of {total:,} requests failed ({gathered.num_failed / total:.1%}); "
            "latencies are of those that did not."
        )
    weak = [found.quantile for found in latency["e2e"].percentiles if found.is_indicative] if "e2e" in latency else []
    if weak:
        needed = ", ".join(f"p{100 * quantile:g} takes {stats.needed_requests(quantile):,}" for quantile in weak)
        notes.append(f"Percentiles marked ~ are indicative, {latency['e2e'].num:,} good requests are few: {needed}.")
    overhead = run.end.overhead if run.end else None
    if overhead is not None:
        lag_s = max(overhead.loop_lag.p99_s, overhead.send_lag.p99_s)
        if lag_s > MAX_LAG_P99_S:
            notes.append(
                f"The load generator itself was up to {lag_s * 1e3:.1f} ms late (p99): latencies near that are partly "
                "its own. Give it a quieter machine or more processes."
            )
        if overhead.busiest_ratio > MAX_BUSY_RATIO:
            notes.append(
                f"A sending process used {overhead.busiest_ratio:.0%} of a core: the generator may have been the "
                "limit. Use more processes."
            )
    return notes
