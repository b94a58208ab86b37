"""A recorder's snapshot as Prometheus text, with the aliases that routers and dashboards of vLLM look for.

Data flow: ``base.recorder.Snapshot`` → text. Names and help come from the catalogue; an alias repeats the series of its
source under the other name, so it cannot drift.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from headrace.base.catalogue import METRICS, Metric
from headrace.base.recorder import HistogramValue, Labels, Snapshot

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

ALIASES: Final[dict[str, str]] = {
    "vllm:num_requests_running": "headrace_requests_running",
    "vllm:num_requests_waiting": "headrace_requests_waiting",
    "vllm:kv_cache_usage_perc": "headrace_kv_usage_ratio",
    "vllm:prefix_cache_queries_total": "headrace_prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total": "headrace_prefix_cache_hits_total",
    "vllm:prompt_tokens_total": "headrace_prompt_tokens_total",
    "vllm:generation_tokens_total": "headrace_generation_tokens_total",
    "vllm:time_to_first_token_seconds": "headrace_time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds": "headrace_inter_token_latency_seconds",
    "vllm:e2e_request_latency_seconds": "headrace_request_latency_seconds",
    "vllm:request_queue_time_seconds": "headrace_request_queue_seconds",
    "vllm:request_prefill_time_seconds": "headrace_request_prefill_seconds",
    "vllm:request_decode_time_seconds": "headrace_request_decode_seconds",
}
"""vLLM's name → ours."""


def expose(snapshot: Snapshot, *, model: str | None = None) -> str:
    """Gives the text exposition of every metric of the catalogue; without labels, what never happened is 0.

    Args:
        model: value of the ``model_name`` label of the aliases.
    """
    lines: list[str] = []
    for metric in METRICS.values():
        _expose(lines, metric.name, metric, snapshot, {})
    alias_labels = {} if model is None else {"model_name": model}
    for alias, name in ALIASES.items():
        _expose(lines, alias, METRICS[name], snapshot, alias_labels)
    return "\n".join(lines) + "\n"


def _expose(lines: list[str], name: str, metric: Metric, snapshot: Snapshot, extra: Mapping[str, str]) -> None:
    lines.append(f"# HELP {name} {metric.help}")
    lines.append(f"# TYPE {name} {metric.kind}")
    if metric.kind == "histogram":
        histograms = snapshot.histograms.get(metric.name, {})
        if not histograms and not metric.labels:
            histograms = {(): HistogramValue((0,) * (len(metric.buckets) + 1), 0.0)}
        for key, histogram in sorted(histograms.items()):
            _expose_histogram(lines, name, metric, key, histogram, extra)
        return
    series = (snapshot.counters if metric.kind == "counter" else snapshot.gauges).get(metric.name, {})
    if not series and not metric.labels:
        series = {(): 0.0}
    for key, value in sorted(series.items()):
        lines.append(f"{name}{_labels(metric.labels, key, extra)} {_number(value)}")


def _expose_histogram(
    lines: list[str], name: str, metric: Metric, key: Labels, value: HistogramValue, extra: Mapping[str, str]
) -> None:
    total = 0
    for bound, count in zip((*metric.buckets, math.inf), value.counts, strict=True):
        total += count
        lines.append(f"{name}_bucket{_labels(metric.labels, key, {**extra, 'le': _number(bound)})} {total}")
    labels = _labels(metric.labels, key, extra)
    lines.append(f"{name}_sum{labels} {_number(value.sum)}")
    lines.append(f"{name}_count{labels} {total}")


def _labels(names: tuple[str, ...], values: Labels, extra: Mapping[str, str]) -> str:
    pairs = [*zip(names, values, strict=True), *extra.items()]
    if not pairs:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in pairs) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if value == math.inf:
        return "+Inf"
    return str(int(value)) if value.is_integer() and abs(value) < 2**53 else repr(value)
