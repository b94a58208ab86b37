from pathlib import Path

import pytest

from headrace.base.config import Config, load_config
from headrace.base.errors import ConfigError
from headrace.fleet.launch import ModelFacts, front_launch, model_launch, resolve, worker_launch
from headrace.protocol.launch import Kind

FULL = ModelFacts("decoder-only", 8192, None)
WINDOWED = ModelFacts("decoder-only", 8192, 4096)
FRAGMENT = """\
inference_engine:
  model_path: "/data/models/decoder-only-llm"
  architecture: "decoder-only"     # or encoder-only, encoder-decoder; checked against the model itself
  tensor_parallel_size: 2
  kv_cache_ratio: 0.9
  max_batch_size: 32
  quantization: "none"             # int8, int4
kernel_config:
  max_sequence_length: 2048
  batch_size: 64
  dtype: bf16
  attention_window: 1024
  kv_cache_size: 4096
"""


def settings(**flags: object) -> Config:
    return load_config(None, {}, {key.replace("__", "."): value for key, value in flags.items()})


def test_runbook_fragment_means_what_the_table_says(tmp_path: Path) -> None:
    file = tmp_path / "headrace.yaml"
    file.write_text(FRAGMENT)
    config = load_config(file, {}, {})

    resolved = resolve(config, FULL, num_cpus=2)
    launch = worker_launch(config, resolved, model_path=Path("/m"), name="m", socket_fd=7)

    assert [key for key, _ in resolved.warnings] == ["kernel_config.batch_size", "kernel_config.attention_window"]
    assert (launch.max_sequences, launch.max_context_tokens, launch.kv_cache_tokens) == (32, 2048, 4096)
    assert (launch.attention_window, launch.dtype, launch.kv_cache_ratio) == (None, "bf16", 0.9)
    assert (launch.architecture, launch.quantization, launch.threads) == ("decoder-only", "none", 2)


def test_wrong_architecture_names_the_truth_and_the_origin() -> None:
    config = settings(inference_engine__architecture="encoder-only")

    with pytest.raises(ConfigError, match=r"flag --architecture: .*'encoder-only', but the model is decoder-only"):
        resolve(config, FULL, num_cpus=2)


def test_more_shards_than_threads_names_the_other_engine() -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel_size is 4.*2 threads.*--engine vllm"):
        resolve(settings(inference_engine__tensor_parallel_size=4), FULL, num_cpus=2)


def test_engine_of_another_release_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'vllm' is not in this release"):
        resolve(settings(inference_engine__engine="vllm"), FULL, num_cpus=2)


@pytest.mark.parametrize(
    ("first", "second", "expected", "num_warnings"),
    [(None, None, 32, 0), (8, None, 8, 0), (None, 8, 8, 0), (8, 8, 8, 0), (8, 16, 8, 1), (64, 16, 16, 1)],
)
def test_smaller_batch_size_wins_with_a_warning(
    first: int | None, second: int | None, expected: int, num_warnings: int
) -> None:
    config = settings(inference_engine__max_batch_size=first, kernel_config__batch_size=second)

    resolved = resolve(config, FULL, num_cpus=2)

    assert (resolved.max_sequences, len(resolved.warnings)) == (expected, num_warnings)


@pytest.mark.parametrize(
    ("facts", "window", "is_forced", "expected", "num_warnings"),
    [
        pytest.param(FULL, None, False, None, 0, id="full and none"),
        pytest.param(FULL, 1024, False, None, 1, id="full ignores it"),
        pytest.param(FULL, 1024, True, 1024, 1, id="full forced"),
        pytest.param(WINDOWED, None, False, None, 0, id="windowed keeps its own"),
        pytest.param(WINDOWED, 4096, False, 4096, 0, id="windowed and equal"),
        pytest.param(WINDOWED, 1024, False, 1024, 1, id="windowed narrower"),
    ],
)
def test_attention_window_is_used_where_the_model_has_one(
    facts: ModelFacts, window: int | None, is_forced: bool, expected: int | None, num_warnings: int
) -> None:
    config = settings(kernel_config__attention_window=window, kernel_config__attention_window_override=is_forced)

    resolved = resolve(config, facts, num_cpus=2)

    assert (resolved.attention_window, len(resolved.warnings)) == (expected, num_warnings)


def test_sequence_length_over_the_context_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match="max_sequence_length is 9000, but the model's context is 8192"):
        resolve(settings(kernel_config__max_sequence_length=9000), FULL, num_cpus=2)


def test_kv_cache_smaller_than_the_context_bounds_a_request() -> None:
    resolved = resolve(settings(kernel_config__kv_cache_size=1000), FULL, num_cpus=2)

    assert resolved.max_context_tokens == 1000
    assert len(resolved.warnings) == 1


def test_step_rows_grow_with_the_batch_unless_given() -> None:
    assert resolve(settings(kernel_config__batch_size=1024), FULL, num_cpus=2).max_step_tokens == 1024
    with pytest.raises(ConfigError, match=r"max_step_tokens is 64, but a step may hold 100"):
        resolve(settings(kernel_config__batch_size=100, inference_engine__max_step_tokens=64), FULL, num_cpus=2)


def test_more_threads_than_cores_are_warned_about() -> None:
    resolved = resolve(settings(inference_engine__threads=8), FULL, num_cpus=2)

    assert resolved.threads == 8
    assert [key for key, _ in resolved.warnings] == ["inference_engine.threads"]


def test_every_setting_of_server_and_limits_reaches_the_front() -> None:
    config = settings(server__queue_timeout_s=1.5, limits__max_body_bytes=99, server__max_queued_requests=0)

    model = model_launch(
        config,
        resolve(config, FULL, num_cpus=1),
        model_path=Path("/m"),
        served_names=["a", "b"],
        kind=Kind.EMBED,
        worker_socket_path=Path("/s"),
    )
    launch = front_launch(config, [model], listen_fds=[4], admin_fd=None, is_loopback=True, index=1)

    assert (model.queue_timeout_s, launch.max_body_bytes, model.max_queued_requests) == (1.5, 99, 0)
    assert (launch.models, launch.listen_fds, launch.index) == ([model], [4], 1)
    assert (model.served_names, model.kind, model.worker_socket_path) == (["a", "b"], "embed", "/s")
