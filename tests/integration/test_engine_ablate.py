"""The ablation on a tiny model: all stages choose the same tokens, and the figures hang together."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from headrace.base.clock import SystemClock
from headrace.base.errors import ConfigError
from headrace.engine.ablate import AblateReport, OneStage, ablation_head, ablation_table, run_ablation
from headrace.program.unfuse import STAGES
from headrace.protocol.launch import WorkerLaunch
from headrace.testing.tiny import write_tiny_llama
from headrace.testing.tiny_bert import write_tiny_bert


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> AblateReport:
    model = write_tiny_llama(tmp_path_factory.mktemp("ablate") / "tiny")
    launch = WorkerLaunch(str(model), "tiny", -1, kv_cache_tokens=4096, max_step_tokens=128)
    # Raises EngineError where one stage chooses another token than the rest.
    return run_ablation(
        launch, SystemClock(), decode_batches=(1, 3), prefill_lengths=(150, 2048), decode_rounds=3, prefill_rounds=2
    )


def test_stages_come_from_one_operation_a_barrier_to_the_program_that_ships(report: AblateReport) -> None:
    assert [stage.name for stage in report.stages][:2] == ["op by op", "+ quantising in the product"]
    assert len(report.stages) == STAGES
    counts = [stage.instructions for stage in report.stages]
    assert counts == sorted(counts, reverse=True)
    assert len({stage.program_digest for stage in report.stages}) == STAGES


def test_figures_hang_together(report: AblateReport) -> None:
    assert report.rounds == {"decode c=1": 3, "decode c=3": 3, "prefill 150": 2}
    for stage in report.stages:
        assert [time.shape for time in stage.times] == list(report.rounds)
        for time in stage.times:
            assert 0 < time.token_low_s <= time.token_s <= time.token_high_s
            assert time.bandwidth_ratio > 0
    assert all(time.gain == time.total == 1.0 for time in report.stages[0].times)
    assert [time.gain for time in report.stages[1].times] == [time.total for time in report.stages[1].times]


def test_report_renders_as_table_and_json(report: AblateReport) -> None:
    columns, rows = ablation_table(report)

    assert len(rows) == STAGES + 1
    assert all(len(row) == len(columns) for row in rows)
    assert "the same tokens in all stages" in ablation_head(report)
    assert msgspec.json.decode(msgspec.json.encode(report))["stages"][0]["name"] == "op by op"


def test_a_model_that_makes_vectors_is_refused(tmp_path: Path) -> None:
    write_tiny_bert(tmp_path)

    with pytest.raises(ConfigError, match="makes vectors"):
        run_ablation(WorkerLaunch(str(tmp_path), "tiny", -1), SystemClock())


def test_one_stage_alone_decodes_and_prefills(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "tiny")
    launch = WorkerLaunch(str(model), "tiny", -1, kv_cache_tokens=4096, max_step_tokens=128)

    stage = OneStage(launch, SystemClock(), 0)

    assert stage.prefill_s(list(range(100))) > 0
    assert stage.decode_s(list(range(20)), 5) > 0
