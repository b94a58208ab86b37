"""Readings of the process that we are in, and of the worker's heartbeat, as gauges and counters."""

from __future__ import annotations

from headrace.base.recorder import Recorder
from headrace.protocol.frames import Status


class WorkerMeter:
    """Turns heartbeats into metrics; a restarted worker's counters start again, ours do not go back."""

    def __init__(self, recorder: Recorder, model: str) -> None:
        self._recorder = recorder
        self._model = model
        self._last: Status | None = None

    def note(self, status: Status | None, *, is_ready: bool) -> None:
        """Takes the present heartbeat, None while there is no link."""
        recorder, model = self._recorder, self._model
        recorder.gauge("headrace_worker_ready", float(is_ready), model=model)
        if status is None:
            self._last = None
            recorder.gauge("headrace_requests_running", 0, model=model)
            recorder.gauge("headrace_requests_waiting", 0, model=model)
            return
        used = status.total_blocks - status.free_blocks - status.evictable_blocks
        recorder.gauge("headrace_requests_running", status.num_running, model=model)
        recorder.gauge("headrace_requests_waiting", status.num_waiting, model=model)
        recorder.gauge("headrace_kv_blocks", status.free_blocks, state="free", model=model)
        recorder.gauge("headrace_kv_blocks", status.evictable_blocks, state="evictable", model=model)
        recorder.gauge("headrace_kv_blocks", used, state="used", model=model)
        recorder.gauge(
            "headrace_kv_usage_ratio", used / status.total_blocks if status.total_blocks else 0.0, model=model
        )
        recorder.gauge("headrace_model_load_ratio", status.progress_ratio, model=model)
        last = self._last
        for name, now, before in (
            ("headrace_engine_steps_total", status.num_steps, last.num_steps if last else 0),
            (
                "headrace_engine_step_seconds_total",
                status.step_seconds_total,
                last.step_seconds_total if last else 0.0,
            ),
            (
                "headrace_engine_turn_seconds_total",
                status.turn_seconds_total,
                last.turn_seconds_total if last else 0.0,
            ),
            (
                "headrace_engine_turn_wait_seconds_total",
                status.turn_wait_seconds_total,
                last.turn_wait_seconds_total if last else 0.0,
            ),
            ("headrace_preemptions_total", status.num_preemptions, last.num_preemptions if last else 0),
            (
                "headrace_prefix_cache_queries_total",
                status.prefix_queries_tokens,
                last.prefix_queries_tokens if last else 0,
            ),
            ("headrace_prefix_cache_hits_total", status.prefix_hits_tokens, last.prefix_hits_tokens if last else 0),
        ):
            recorder.count(name, now - before if now >= before else now, model=model)
        self._last = status


def note_process(recorder: Recorder) -> None:
    """Reads this process's memory and open descriptors. Cost: about 50 µs."""
    import psutil  # late: a scrape needs it, a start does not

    process = psutil.Process()
    recorder.gauge("headrace_process_resident_bytes", process.memory_info().rss)
    recorder.gauge("headrace_process_open_fds", process.num_fds())
    recorder.gauge("headrace_process_start_seconds", process.create_time())
