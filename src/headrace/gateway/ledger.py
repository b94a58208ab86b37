"""The ledger: every request ends here exactly once, as one counted outcome and one canonical log line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from headrace.base.clock import Clock
from headrace.base.errors import HeadraceError
from headrace.base.log import get_log
from headrace.base.recorder import Recorder

OK: Final = "ok"
CLIENT_GONE: Final = "client_gone"

_log = get_log(__name__)


@dataclass(slots=True)
class Record:
    """What is known of one request so far; moments are on the front's clock.

    Args:
        model: what the request calls the model.
        canonical: the model's first name; empty until it is found.
    """

    request_id: str
    endpoint: str
    received_at_s: float
    model: str = ""
    canonical: str = ""
    is_stream: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    started_at_s: float | None = None
    first_token_at_s: float | None = None
    last_token_at_s: float | None = None
    num_attempts: int = 0
    num_preemptions: int = 0
    outcome: str | None = None


class Ledger:
    """Settles requests."""

    def __init__(self, recorder: Recorder, clock: Clock) -> None:
        self._recorder = recorder
        self._clock = clock

    def open(self, request_id: str, endpoint: str) -> Record:
        """Starts the record of a request that has just been received."""
        return Record(request_id, endpoint, self._clock.now_s())

    def note_tokens(self, record: Record, num_tokens: int) -> None:
        """Notes that a step brought ``num_tokens`` tokens."""
        now_s = self._clock.now_s()
        if record.first_token_at_s is None:
            record.first_token_at_s = now_s
            self._recorder.observe(
                "headrace_time_to_first_token_seconds", now_s - record.received_at_s, model=record.canonical
            )
        elif record.last_token_at_s is not None and num_tokens:
            self._recorder.observe(
                "headrace_inter_token_latency_seconds",
                (now_s - record.last_token_at_s) / num_tokens,
                model=record.canonical,
            )
        record.last_token_at_s = now_s

    def settle(self, record: Record, status: int, outcome: str, error: HeadraceError | None = None) -> None:
        """Ends a record; a second end of the same request is our own bug."""
        assert record.outcome is None, f"{record.request_id} ended twice: {record.outcome}, {outcome}"
        record.outcome = outcome
        now_s = self._clock.now_s()
        recorder = self._recorder
        model = record.canonical
        recorder.count("headrace_requests_total", model=model, endpoint=record.endpoint, outcome=outcome)
        recorder.observe("headrace_request_latency_seconds", now_s - record.received_at_s, model=model)
        queue_s = prefill_s = decode_s = None
        if record.started_at_s is not None:
            queue_s = record.started_at_s - record.received_at_s
            recorder.observe("headrace_request_queue_seconds", queue_s, model=model)
            recorder.count("headrace_prompt_tokens_total", record.prompt_tokens, model=model)
            recorder.count("headrace_cached_prompt_tokens_total", record.cached_tokens, model=model)
            recorder.count("headrace_generation_tokens_total", record.output_tokens, model=model)
            recorder.observe("headrace_prompt_tokens", record.prompt_tokens, model=model)
            recorder.observe("headrace_generation_tokens", record.output_tokens, model=model)
            if record.first_token_at_s is not None and record.last_token_at_s is not None:
                prefill_s = max(record.first_token_at_s - record.started_at_s, 0.0)
                decode_s = record.last_token_at_s - record.first_token_at_s
                recorder.observe("headrace_request_prefill_seconds", prefill_s, model=model)
                recorder.observe("headrace_request_decode_seconds", decode_s, model=model)
        ttft_s = None if record.first_token_at_s is None else record.first_token_at_s - record.received_at_s
        line: dict[str, object] = {
            "request_id": record.request_id,
            "endpoint": record.endpoint,
            "outcome": outcome,
            "status": status,
            "model": record.model,
            "is_stream": record.is_stream,
            "prompt_tokens": record.prompt_tokens,
            "cached_tokens": record.cached_tokens,
            "output_tokens": record.output_tokens,
            "ttft_ms": _ms(ttft_s),
            "queue_ms": _ms(queue_s),
            "prefill_ms": _ms(prefill_s),
            "decode_ms": _ms(decode_s),
            "total_ms": _ms(now_s - record.received_at_s),
            "num_attempts": record.num_attempts,
        }
        if record.num_preemptions:
            line["num_preemptions"] = record.num_preemptions
        if error is not None and error.param is not None:
            line["param"] = error.param
        log = _log.warning if status >= 500 else _log.info
        log("request_finished", **line)


def _ms(duration_s: float | None) -> float | None:
    return None if duration_s is None else round(duration_s * 1000, 2)
