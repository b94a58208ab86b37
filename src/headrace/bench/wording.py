"""A summary's figures as words and tables, the same on the terminal, in Markdown and on the page."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

from headrace.base.units import format_duration
from headrace.bench.records import Settings
from headrace.bench.statistics import QUANTILES
from headrace.bench.summary import Latency, Percentile, Rate, Summary

Row = tuple[str, ...]
NAMES: Final[dict[str, str]] = {
    "ttft": "TTFT",
    "ttft_sent": "TTFT from sending",
    "itl": "ITL",
    "gap": "longest gap",
    "tpot": "TPOT",
    "tpot_first": "TPOT with first",
    "e2e": "E2E",
}
LATENCY_COLUMNS: Final = ("", "mean", *(f"p{100 * quantile:g}" for quantile in QUANTILES), "max")


def duration(value_s: float) -> str:
    """Gives a latency with three digits: ``41.2 ms``, ``1.52 s``."""
    if value_s >= 60:
        return format_duration(value_s)
    value, unit = (value_s, "s") if value_s >= 0.9995 else (value_s * 1e3, "ms")
    if unit == "ms" and value < 0.9995:
        return f"{value * 1e3:.0f} µs"
    return f"{value:.2f} {unit}" if value < 9.995 else f"{value:.1f} {unit}" if value < 99.95 else f"{value:.0f} {unit}"


def span(low_s: float, high_s: float) -> str:
    """Gives an interval of latencies: ``40.1–42.7 ms``."""
    low, high = duration(low_s), duration(high_s)
    (low_value, _, low_unit), (_, _, high_unit) = low.rpartition(" "), high.rpartition(" ")
    return f"{low_value}–{high}" if low_unit == high_unit else f"{low}–{high}"


def amount(value: float) -> str:
    """Gives a rate with three digits or all whole ones: ``0.512``, ``12.4``, ``1,873``."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}"


def rate(found: Rate) -> str:
    """Gives a rate with its interval: ``12.4 (12.1–12.8)``."""
    return f"{amount(found.value)} ({amount(found.low)}–{amount(found.high)})"


def percentile(found: Percentile) -> str:
    """Gives a percentile, ``~`` before one that is indicative only."""
    return ("~" if found.is_indicative else "") + duration(found.value_s)


def moment(at_s: float) -> str:
    """Gives a date and time, UTC."""
    return f"{datetime.fromtimestamp(at_s, UTC):%Y-%m-%d %H:%M} UTC"


def latency_rows(summary: Summary) -> list[tuple[str, Latency]]:
    """Gives what was measured, by the name people read."""
    return [(NAMES[name], found) for name, found in summary.latency.items()]


def load_words(settings: Settings) -> str:
    """Gives how the load was made, in words."""
    if settings.concurrency is not None:
        return f"closed loop, {settings.concurrency} at once"
    if settings.arrivals == "trace":
        speed = "" if settings.trace_speed == 1 else f", {settings.trace_speed:g} times as fast"
        return f"open loop, as the trace says{speed}"
    if settings.arrivals == "ramp":
        return f"open loop, {settings.rate_per_s:g} rising to {settings.ramp_to_per_s:g} requests/s"
    return f"open loop, {settings.rate_per_s:g} requests/s, {settings.arrivals} arrivals"


def throughput_rows(summary: Summary) -> list[Row]:
    """Gives name and figure of what was done per second."""
    found = summary.throughput
    rows: list[Row] = [("good requests/s", rate(found.requests_per_s))]
    if found.output_tokens_per_s is not None:
        rows.append(("output tokens/s", rate(found.output_tokens_per_s)))
    if found.prompt_tokens_per_s is not None:
        rows.append(("prompt tokens/s", amount(found.prompt_tokens_per_s)))
    if found.goodput_per_s is not None:
        kept = "" if found.good_ratio is None else f", {found.good_ratio:.1%} of all requests"
        rows.append((f"goodput/s ({', '.join(map(str, summary.objectives))})", f"{rate(found.goodput_per_s)}{kept}"))
    return rows


def token_rows(summary: Summary) -> list[Row]:
    """Gives what is known of tokens: by usage, by our tokenizer, and how they differ."""
    found = summary.tokens
    rows: list[Row] = []
    for name, usage, counted in (
        ("prompt tokens", found.prompt_usage, found.prompt_counted),
        ("output tokens", found.output_usage, found.output_counted),
    ):
        rows.append((name, _count(usage), _count(counted)))
    rows.append(("cached prompt tokens", _count(found.cached), "–"))
    return rows


def token_words(summary: Summary) -> str:
    """Gives how the counts differ, in a sentence, and which one the figures rest on."""
    found = summary.tokens
    words = f"Output tokens are counted by {found.output_source}."
    if found.output_difference_ratio is not None:
        words += (
            f" Of {found.num_compared:,} requests with both counts {found.num_output_different:,} differ; usage is "
            f"{found.output_difference_ratio:+.2%} off the tokenizer."
        )
    if found.prompt_difference_mean is not None:
        words += f" Usage counts {found.prompt_difference_mean:+.1f} tokens a prompt (a chat template has its own)."
    return words


def _count(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"


def error_rows(summary: Summary) -> list[Row]:
    """Gives kind, number, share and example of failures."""
    return [(found.kind, f"{found.num:,}", f"{found.ratio:.2%}", found.example or "–") for found in summary.errors]


def setting_rows(summary: Summary) -> list[Row]:
    """Gives what was asked for and where the load came from."""
    settings, environment, overhead = summary.settings, summary.environment, summary.overhead
    rows: list[Row] = [
        ("server", settings.url),
        ("model", settings.model),
        ("load", load_words(settings)),
        ("data", settings.data or "–"),
        ("streamed", "yes" if settings.is_streamed else "no"),
        ("started", moment(summary.started_at_s)),
        ("seed", str(settings.seed)),
        ("from", f"{environment.cpu}, {environment.num_cpus} CPUs, load average {environment.load_average:.2f}"),
        ("with", f"headrace {environment.headrace}, Python {environment.python}, {environment.system}"),
    ]
    if overhead is not None:
        rows.append(("generator", overhead_words(summary)))
    return rows


def overhead_words(summary: Summary) -> str:
    """Gives what the generator itself cost, in a sentence."""
    found = summary.overhead
    if found is None:
        return "not known: the run was killed"
    plural = "process" if found.processes == 1 else "processes"
    return (
        f"{found.processes} {plural}, {found.cpu_s:.1f} CPU seconds, {found.busiest_ratio:.0%} of a core at most; "
        f"event loop late by {duration(found.loop_lag.p50_s)} (p50), {duration(found.loop_lag.p99_s)} (p99), "
        f"sending late by {duration(found.send_lag.p50_s)} (p50), {duration(found.send_lag.p99_s)} (p99)"
    )
