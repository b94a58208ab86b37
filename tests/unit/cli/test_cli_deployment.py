"""Models that share a machine: their parts of its memory, or the refusal with the arithmetic."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from headrace.base.config import load_config
from headrace.base.errors import ConfigError, ModelTooLargeError
from headrace.cli.deployment import agree, models_of, share_memory
from headrace.engine.loader import inspect
from headrace.fleet.launch import worker_launch
from headrace.fleet.server import Model
from headrace.testing.tiny import write_tiny_llama
from headrace.testing.tiny_bert import write_tiny_bert

MIB = 2**20


@pytest.fixture
def models(tmp_path: Path) -> list[Model]:
    write_tiny_llama(tmp_path / "llama", context_tokens=2048)
    write_tiny_bert(tmp_path / "bert")
    sources = {
        "small": {"inference_engine.model_path": str(tmp_path / "llama"), "inference_engine.memory_share": 1},
        "large": {"inference_engine.model_path": str(tmp_path / "llama"), "inference_engine.memory_share": 3},
        "bert": {"inference_engine.model_path": str(tmp_path / "bert")},
    }
    config = load_config(None, {}, {}, sources)
    return [agree(own, Path(str(own.inference_engine.model_path)), name) for name, own in config.models.items()]


def pool_tokens(model: Model) -> int:
    launch = worker_launch(
        model.config,
        model.resolved,
        model_path=model.path,
        name=model.names[0],
        socket_fd=-1,
        memory_bytes=model.memory_bytes,
    )
    return inspect(launch).pool.num_blocks * 32


def test_pools_of_models_follow_their_shares(models: list[Model]) -> None:
    least = share_memory(models, 2**40)
    tight = share_memory(models, 230 * MIB)

    full = 32 * 2048  # all sequences at full length
    assert [pool_tokens(model) for model in least[:2]] == [full, full]
    small, large = (pool_tokens(model) for model in tight[:2])
    assert 2048 <= small < large < full
    assert sum(model.memory_bytes or 0 for model in tight) <= 230 * MIB


def test_models_that_do_not_fit_together_are_refused_with_the_arithmetic(models: list[Model]) -> None:
    with pytest.raises(ModelTooLargeError) as refusal:
        share_memory(models, 100 * MIB)

    message = refusal.value.message
    for name in ("small", "large", "bert"):
        assert re.search(rf"{name}: weights [\d.]+ MiB × 1.5 while loading, scratch [\d.]+ MiB, KV \d+ bytes", message)
    assert "in all, this machine has 100.0 MiB available: leave one out" in message


def test_sources_of_the_command_line_get_names_of_their_own() -> None:
    found = models_of(["demo", "/data/minilm"])

    assert found == {
        "smollm2-135m-instruct": {"inference_engine.model_path": "demo", "inference_engine.served_name": "demo"},
        "minilm": {"inference_engine.model_path": "/data/minilm"},
    }
    with pytest.raises(ConfigError, match="/other/minilm would have the name minilm too"):
        models_of(["/data/minilm", "/other/minilm"])
