"""The engine's own measurement, on a tiny model: the figures hang together and render."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from headrace.base.clock import SystemClock
from headrace.engine.bench import BenchReport, report_head, report_table, run_bench
from headrace.protocol.launch import WorkerLaunch
from headrace.testing.tiny import write_tiny_llama
from headrace.testing.tiny_bert import write_tiny_bert


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> BenchReport:
    model = write_tiny_llama(tmp_path_factory.mktemp("bench") / "tiny")
    launch = WorkerLaunch(str(model), "tiny", -1, kv_cache_tokens=4096, max_step_tokens=128)
    return run_bench(launch, SystemClock(), decode_batches=(1, 4), prefill_lengths=(300, 2048), decode_steps=16)


def test_report_has_each_measure_that_the_context_holds(report: BenchReport) -> None:
    assert [row.name for row in report.measures] == ["decode c=1", "decode c=4", "prefill 300"]


def test_figures_hang_together(report: BenchReport) -> None:
    for row, tokens in zip(report.measures, (1, 4, 300), strict=True):
        assert row.tokens_per_s == pytest.approx(tokens / row.step_s)
        assert row.step_low_s <= row.step_s <= row.step_high_s
        assert 0.0 < row.overhead_s < row.step_s
        bandwidth = (report.bandwidth_before + report.bandwidth_after) / 2
        assert row.bandwidth_ratio == pytest.approx(row.bytes_moved / row.step_s / bandwidth)
    # A decode step reads every weight once, and little else on so short a context.
    assert report.measures[0].bytes_moved > 0.5 * report.weight_bytes


def test_report_renders_as_table_and_json(report: BenchReport) -> None:
    columns, rows = report_table(report)

    assert all(len(row) == len(columns) for row in rows)
    assert "GB/s before" in report_head(report)
    assert msgspec.json.decode(msgspec.json.encode(report))["measures"][0]["name"] == "decode c=1"


def test_a_model_that_makes_vectors_is_measured_by_its_texts(tmp_path: Path) -> None:
    write_tiny_bert(tmp_path)

    report = run_bench(WorkerLaunch(str(tmp_path), "tiny", -1), SystemClock())

    assert [row.name for row in report.measures] == ["encode 1×32", "encode 32×32"]
    for row, tokens in zip(report.measures, (32, 32 * 32), strict=True):
        assert row.tokens_per_s == pytest.approx(tokens / row.step_s)
    assert report.measures[1].bytes_moved > report.measures[0].bytes_moved
