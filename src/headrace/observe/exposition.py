"""A recorder's snapshot as Prometheus text, with the aliases that routers and dashboards of vLLM look for.

Data flow: ``base.recorder.Snapshot`` → text. Names and help come from the catalogue; an alias repeats the series of its
source under the other name, so it cannot drift.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from headrace.base.catalogue import METRICS, MODEL, Metric
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


def expose(snapshot: Snapshot, *, models: Sequence[str] = ()) -> str:
    """Gives the text exposition of every metric of the catalogue; what never happened is 0.

    Args:
        models: canonical names; series of each model alone are there from the start. In the aliases their label is
            ``model_name``.
    """
    lines: list[str] = []
    for metric in METRICS.values():
        _expose(lines, metric.name, metric, snapshot, metric.labels, models)
    for alias, name in ALIASES.items():
        metric = METRICS[name]
        labels = tuple("model_name" if label == "model" else label for label in metric.labels)
        _expose(lines, alias, metric, snapshot, labels, models)
    return "\n".join(lines) + "\n"


def _expose(
    lines: list[str], name: str, metric: Metric, snapshot: Snapshot, labels: Labels, models: Sequence[str]
) -> None:
    lines.append(f"# HELP {name} {metric.help}")
    lines.append(f"# TYPE {name} {metric.kind}")
    initial = _initial(metric, models)
    if metric.kind == "histogram":
        empty = HistogramValue((0,) * (len(metric.buckets) + 1), 0.0)
        histograms = dict.fromkeys(initial, empty) | snapshot.histograms.get(metric.name, {})
        for key, histogram in sorted(histograms.items()):
            _expose_histogram(lines, name, metric, labels, key, histogram)
        return
    found = (snapshot.counters if metric.kind == "counter" else snapshot.gauges).get(metric.name, {})
    for key, value in sorted((dict.fromkeys(initial, 0.0) | found).items()):
        lines.append(f"{name}{_labels(labels, key)} {_number(value)}")


def _initial(metric: Metric, models: Sequence[str]) -> list[Labels]:
    """Gives the series that are there before anything happened."""
    if metric.labels == MODEL:
        return [(model,) for model in models]
    return [] if metric.labels else [()]


def _expose_histogram(
    lines: list[str], name: str, metric: Metric, labels: Labels, key: Labels, value: HistogramValue
) -> None:
    total = 0
    for bound, count in zip((*metric.buckets, math.inf), value.counts, strict=True):
        total += count
        lines.append(f"{name}_bucket{_labels((*labels, 'le'), (*key, _number(bound)))} {total}")
    shown = _labels(labels, key)
    lines.append(f"{name}_sum{shown} {_number(value.sum)}")
    lines.append(f"{name}_count{shown} {total}")


def _labels(names: Labels, values: Labels) -> str:
    if not names:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in zip(names, values, strict=True)) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if value == math.inf:
        return "+Inf"
    return str(int(value)) if value.is_integer() and abs(value) < 2**53 else repr(value)
