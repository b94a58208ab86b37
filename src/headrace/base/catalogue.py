"""The catalogue of metrics and log events: the only place where their names are made.

Dashboards, alert rules, the reference page and ``Recorder`` are driven by it. Add an entry in one line, keep the order
by area. Counters end in ``_total``; units are in names; labels are few and bounded.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

# Seconds, from a fast token on a small model to the request time-out (600 s).
LATENCY_BUCKETS_S: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0,
)  # fmt: skip
# Tokens, powers of two up to the longest contexts in use.
TOKEN_BUCKETS: Final = tuple(float(2**power) for power in range(18))

# Canonical name of a model of the configuration; empty where a request named none that is served.
MODEL: Final = ("model",)


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Args:
        name: exposition name, ``headrace_…``.
        kind: what it is.
        labels: names of its labels, in order.
        help: one sentence for the exposition and the reference page.
        buckets: upper bounds of a histogram, ascending, without infinity; empty for the other kinds.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    help: str
    buckets: tuple[float, ...] = ()


def _index(metrics: Iterable[Metric]) -> dict[str, Metric]:
    index: dict[str, Metric] = {}
    for metric in metrics:
        assert metric.name not in index, f"{metric.name} stands twice"
        assert metric.name.startswith("headrace_"), metric.name
        assert (metric.kind == "counter") == metric.name.endswith("_total"), metric.name
        assert (metric.kind == "histogram") == bool(metric.buckets), metric.name
        index[metric.name] = metric
    return index


METRICS: Final[dict[str, Metric]] = _index(
    [
        # Front: requests
        Metric(
            "headrace_requests_total", "counter", ("model", "endpoint", "outcome"), "Requests ended, by how they ended."
        ),
        Metric("headrace_http_responses_total", "counter", ("route", "status"), "HTTP answers, by route and status."),
        Metric("headrace_requests_running", "gauge", MODEL, "Requests that a worker runs now."),
        Metric("headrace_requests_waiting", "gauge", MODEL, "Requests that wait for a worker now."),
        Metric("headrace_requests_admitted", "gauge", MODEL, "Requests inside this front now."),
        Metric("headrace_connections_open", "gauge", (), "Client connections open now."),
        Metric("headrace_prompt_tokens_total", "counter", MODEL, "Prompt tokens of requests that were run."),
        Metric("headrace_generation_tokens_total", "counter", MODEL, "Tokens generated and delivered."),
        Metric("headrace_cached_prompt_tokens_total", "counter", MODEL, "Prompt tokens that the prefix cache spared."),
        Metric("headrace_ignored_fields_total", "counter", ("endpoint",), "Unknown request fields that were ignored."),
        Metric(
            "headrace_time_to_first_token_seconds", "histogram", MODEL, "Receipt to first token.", LATENCY_BUCKETS_S
        ),
        Metric("headrace_inter_token_latency_seconds", "histogram", MODEL, "Token to token.", LATENCY_BUCKETS_S),
        Metric("headrace_request_latency_seconds", "histogram", MODEL, "Receipt to end.", LATENCY_BUCKETS_S),
        Metric("headrace_request_queue_seconds", "histogram", MODEL, "Receipt to start in worker.", LATENCY_BUCKETS_S),
        Metric("headrace_request_prefill_seconds", "histogram", MODEL, "Start to first token.", LATENCY_BUCKETS_S),
        Metric("headrace_request_decode_seconds", "histogram", MODEL, "First token to last.", LATENCY_BUCKETS_S),
        Metric("headrace_prompt_tokens", "histogram", MODEL, "Prompt tokens per request.", TOKEN_BUCKETS),
        Metric("headrace_generation_tokens", "histogram", MODEL, "Generated tokens per request.", TOKEN_BUCKETS),
        Metric(
            "headrace_event_loop_lag_seconds", "histogram", (), "Lateness of the front's timers.", LATENCY_BUCKETS_S
        ),
        # Worker: engine
        Metric("headrace_worker_ready", "gauge", MODEL, "1 when the worker is ready and has stepped lately."),
        Metric("headrace_worker_lost_total", "counter", MODEL, "Times that this front lost its worker's link."),
        Metric("headrace_engine_steps_total", "counter", MODEL, "Engine steps done."),
        Metric("headrace_engine_step_seconds_total", "counter", MODEL, "Time spent in engine steps."),
        Metric("headrace_engine_turn_seconds_total", "counter", MODEL, "Time of its turns on threads that are shared."),
        Metric("headrace_engine_turn_wait_seconds_total", "counter", MODEL, "Time spent waiting for its turns."),
        Metric("headrace_preemptions_total", "counter", MODEL, "Sequences that were displaced and recomputed."),
        Metric("headrace_kv_blocks", "gauge", ("model", "state"), "KV pages by state: free, evictable, used."),
        Metric("headrace_kv_usage_ratio", "gauge", MODEL, "Share of the KV pages in use."),
        Metric("headrace_prefix_cache_queries_total", "counter", MODEL, "Prompt tokens looked up in the prefix cache."),
        Metric("headrace_prefix_cache_hits_total", "counter", MODEL, "Prompt tokens found in the prefix cache."),
        Metric("headrace_model_load_ratio", "gauge", MODEL, "Progress of loading the model."),
        # Process
        Metric("headrace_build_info", "gauge", ("version", "model"), "Always 1; says what runs."),
        Metric("headrace_process_start_seconds", "gauge", (), "When this process started, seconds since 1970."),
        Metric("headrace_process_resident_bytes", "gauge", (), "Resident memory of this process."),
        Metric("headrace_process_open_fds", "gauge", (), "Open file descriptors of this process."),
    ]
)

EVENTS: Final[dict[str, str]] = {
    # Requests
    "request_finished": "one canonical line per request: outcome, times, token counts",
    "request_failed": "a request ended in an error; code and whether it had started",
    "request_fields_ignored": "a request carried unknown fields; names them, once per set of names",
    # Front
    "front_started": "a front accepts connections",
    "front_stopped": "a front has ended",
    "drain_started": "a process was told to end and finishes what runs",
    "drain_ended": "what ran is finished or was cut",
    "worker_connected": "the link to the worker stands",
    "worker_lost": "the link to the worker broke; running requests fail",
    "worker_not_ready": "the worker does not answer or has made no step in time",
    "endpoint_error": "a bug in an endpoint; the request was answered 500",
    # Worker
    "worker_started": "a worker listens for its fronts",
    "model_loading": "stage and progress of loading",
    "model_loaded": "the model can be used; sizes and times",
    "packed_weights_read": "the packed weights came from the cache on disk",
    "packed_weights_stay_mapped": "no memory with huge pages for weights that were read; decode is slower, says why",
    "packed_weights_saved": "the packed weights were saved; the next start reads them",
    "packed_weights_not_saved": "the packed weights could not be saved, says why; the next start packs again",
    "packed_weights_damaged": "an entry of the cache of packed weights was damaged and removed; they are packed anew",
    "packed_weights_evicted": "an entry of the cache of packed weights had to make room",
    "worker_stopped": "a worker has ended",
    "peer_connected": "a front or supervisor connected to the worker",
    "peer_lost": "a front or supervisor went away; its requests are aborted",
    "engine_error": "a bug in the engine loop",
    "parent_gone": "the supervisor has died; this process ends",
    # Supervisor
    "supervisor_started": "listening sockets are open and children are being started",
    "supervisor_stopped": "all children have ended",
    "child_started": "a front or worker was started",
    "child_exited": "a front or worker ended; code or signal",
    "child_restarting": "a dead child is started again after a pause",
    "child_crash_loop": "a child died too often; it is retried at the longest pause",
    "child_killed": "a child was killed because it hung or did not end in time",
    # Models and configuration
    "config_warning": "a setting was adjusted or ignored; says which and why",
    "model_pulled": "a model was fetched into the cache",
    "history_failed": "the run could not be written to the database; serving goes on",
}
