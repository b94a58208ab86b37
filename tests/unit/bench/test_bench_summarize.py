from typing import Any

import msgspec
import numpy as np
import pytest

from headrace.bench.records import Lag, Overhead
from headrace.bench.slo import parse_slo
from headrace.bench.summarize import summarize


def test_every_latency_is_what_its_definition_says(runs: Any) -> None:
    found = summarize(runs.run([runs.exchange()]))

    assert {name: latency.at(0.5).value_s for name, latency in found.latency.items()} == pytest.approx(
        {
            "ttft": 0.5,  # 1.5 − 1.0
            "ttft_sent": 0.4,  # 1.5 − 1.1
            "itl": 0.1,  # the middle one of 0.1, 0.1, 0.1, 0.4
            "gap": 0.4,
            "tpot": 0.175,  # (2.2 − 1.5) ÷ 4
            "tpot_first": 0.26,  # 1.3 ÷ 5
            "e2e": 1.3,
        },
        rel=6e-4,
    )
    assert found.latency["itl"].num == 4
    assert set(found.definitions) == set(found.latency)


def test_rates_are_per_second_of_the_measured_time(runs: Any) -> None:
    exchanges = [
        runs.exchange(index, scheduled_s=5.0 + index, sent_s=5.0 + index, first_s=5.5 + index, ended_s=6.0 + index,
                      chunk_s=(5.5 + index, 6.0 + index), output_tokens=20)
        for index in range(10)
    ]  # fmt: skip

    found = summarize(runs.run(exchanges, measured_from_s=5.0), parse_slo("ttft=600ms,e2e=2s"))

    assert found.measured_s == pytest.approx(10.0)
    assert found.throughput.requests_per_s.value == pytest.approx(1.0)
    assert found.throughput.output_tokens_per_s is not None
    assert found.throughput.output_tokens_per_s.value == pytest.approx(20.0)
    assert found.throughput.prompt_tokens_per_s == pytest.approx(10.0)
    assert found.throughput.goodput_per_s is not None
    assert found.throughput.goodput_per_s.value == pytest.approx(1.0)
    assert sum(piece.num_good for piece in found.slices) == 10
    assert sum(piece.output_tokens_per_s for piece in found.slices) * found.slice_s == pytest.approx(200)
    assert {piece.in_flight for piece in found.slices} == {1}


def test_goodput_counts_requests_that_kept_every_objective(runs: Any) -> None:
    exchanges = [
        runs.exchange(0),
        runs.exchange(1, first_s=1.9, chunk_s=(1.9, 2.2)),  # too late
        runs.exchange(2, error="status", status=503, first_s=None, chunk_s=()),
        runs.exchange(3, chunk_s=(1.5,)),  # no gap, so none too long
    ]

    found = summarize(runs.run(exchanges), parse_slo("ttft=500ms,gap=401ms"))

    assert found.throughput.good_ratio == 0.5
    assert summarize(runs.run(exchanges)).throughput.good_ratio is None


def test_errors_are_counted_by_kind_with_an_example_and_leave_the_latencies(runs: Any) -> None:
    failed = {"error": "status", "first_s": None, "chunk_s": (), "ended_s": 9.0}
    exchanges = [
        runs.exchange(0),
        runs.exchange(1, **failed, status=503, detail="busy"),
        runs.exchange(2, **failed, status=503, detail="busier"),
        runs.exchange(3, **{**failed, "error": "timeout"}),
    ]

    found = summarize(runs.run(exchanges))

    assert [(count.kind, count.num, count.ratio, count.example) for count in found.errors] == [
        ("status 503", 2, 0.5, "busy"),
        ("timeout", 1, 0.25, ""),
    ]
    assert (found.num_good, found.num_failed, found.latency["e2e"].max_s) == (1, 3, pytest.approx(1.3))
    assert found.notes[0].startswith("3 of 4 requests failed (75.0%)")


def test_warm_up_is_left_out(runs: Any) -> None:
    found = summarize(runs.run([runs.exchange(0, is_warmup=True), runs.exchange(1)]))

    assert (found.num_warmup, found.num_good) == (1, 1)


def test_token_counts_of_server_and_tokenizer_are_compared(runs: Any) -> None:
    exchanges = [
        runs.exchange(0, output_tokens_counted=5, prompt_tokens_counted=4, cached_tokens=8),
        runs.exchange(1, output_tokens=12, output_tokens_counted=10, prompt_tokens_counted=8),
        runs.exchange(2, output_tokens=None, output_tokens_counted=7),
        runs.exchange(3, output_tokens=None),
    ]

    tokens = summarize(runs.run(exchanges)).tokens

    assert tokens.output_source == "usage and tokenizer and chunks"
    assert (tokens.output_usage, tokens.output_counted, tokens.cached) == (17, 22, 8)
    assert (tokens.num_compared, tokens.num_output_different) == (2, 1)
    assert tokens.output_difference_ratio == pytest.approx(2 / 15)
    assert tokens.prompt_difference_mean == pytest.approx(4)


def test_answers_without_chunks_have_no_token_latencies(runs: Any) -> None:
    plain = {"operation": "embeddings", "chunk_s": (), "output_tokens": None, "finish_reason": None}

    found = summarize(runs.run([runs.exchange(0, **plain)]))

    assert list(found.latency) == ["e2e"]
    assert found.throughput.output_tokens_per_s is None
    assert found.throughput.prompt_tokens_per_s is not None


def test_percentiles_of_few_requests_are_called_indicative(runs: Any) -> None:
    found = summarize(runs.run([runs.exchange(index) for index in range(150)]))

    assert [(piece.quantile, piece.is_indicative) for piece in found.latency["e2e"].percentiles] == [
        (0.5, False), (0.75, False), (0.9, False), (0.95, True), (0.99, True), (0.999, True)
    ]  # fmt: skip
    assert "p99 takes 1,000" in found.notes[0]


def test_a_generator_that_was_late_or_busy_is_told(runs: Any) -> None:
    late = Overhead(processes=1, loop_lag=Lag(0, 0.02, 0.1), send_lag=Lag(0, 0.001, 0.1), cpu_s=5.0, busiest_ratio=0.97)

    found = summarize(runs.run([runs.exchange(index) for index in range(20)], overhead=late))

    assert [note for note in found.notes if "up to 20.0 ms late" in note]
    assert [note for note in found.notes if "97% of a core" in note]


@pytest.mark.parametrize("num_failed", [0, 3])
def test_runs_without_a_good_request_have_a_summary(runs: Any, num_failed: int) -> None:
    failed = [runs.exchange(index, error="connect", first_s=None, chunk_s=()) for index in range(num_failed)]

    found = summarize(runs.run(failed))
    killed = summarize(without_end(runs.run(failed)))

    assert (found.latency, found.num_failed) == ({}, num_failed)
    assert found.throughput.requests_per_s.value == 0
    assert killed.is_partial


def without_end(run: Any) -> Any:
    return type(run)(run.start, None, run.exchanges)


def test_a_summary_survives_its_json_form(runs: Any) -> None:
    random = np.random.default_rng(0)
    exchanges = [runs.exchange(index, ended_s=2.3 + random.exponential()) for index in range(50)]

    found = summarize(runs.run(exchanges), parse_slo("e2e=3s"))

    assert msgspec.json.decode(msgspec.json.encode(found), type=type(found)) == found


@pytest.mark.parametrize(("num", "slices"), [(1, 8), (400, 50), (3000, 120)])
def test_slices_of_a_run_hold_enough_requests_for_a_percentile(runs: Any, num: int, slices: int) -> None:
    exchanges = [runs.exchange(index, scheduled_s=index * 0.1, ended_s=index * 0.1 + 2.3) for index in range(num)]

    assert len(summarize(runs.run(exchanges)).slices) == slices
