"""Runs whose every figure is known."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from headrace.bench.records import Environment, Exchange, Lag, Overhead, Run, RunEnd, RunStart, Settings


class Runs:
    """Makes runs and exchanges."""

    @staticmethod
    def run(exchanges: Sequence[Exchange], **end: object) -> Run:
        lag = Lag(p50_s=0.0001, p99_s=0.001, max_s=0.002)
        overhead = Overhead(processes=1, loop_lag=lag, send_lag=lag, cpu_s=1.0, busiest_ratio=0.1)
        start = RunStart(
            headrace_run=1,
            started_at_s=1.7e9,
            settings=Settings(url="http://127.0.0.1:8000", model="demo", concurrency=4, data="test"),
            environment=Environment(
                headrace="0.1.0", python="3.11", system="Linux", cpu="CPU", num_cpus=2, load_average=0.5
            ),
        )
        values = {
            "duration_s": max((exchange.ended_s for exchange in exchanges), default=0.0),
            "measured_from_s": 0.0,
            "is_partial": False,
            "num_exchanges": len(exchanges),
            "overhead": overhead,
            **end,
        }
        return Run(start, RunEnd(**values), list(exchanges))  # type: ignore[arg-type]

    @staticmethod
    def exchange(index: int = 0, **values: object) -> Exchange:
        """Due at 1 s, sent at 1.1 s, five tokens at 1.5, 1.6, 1.7, 1.8, 2.2 s, over at 2.3 s."""
        known = {
            "operation": "chat", "scheduled_s": 1.0, "sent_s": 1.1, "first_s": 1.5, "ended_s": 2.3,
            "chunk_s": (1.5, 1.6, 1.7, 1.8, 2.2), "prompt_tokens": 10, "output_tokens": 5, "status": 200,
            "finish_reason": "stop",
        }  # fmt: skip
        return Exchange(index=index, **{**known, **values})  # type: ignore[arg-type]


@pytest.fixture
def runs() -> type[Runs]:
    return Runs
