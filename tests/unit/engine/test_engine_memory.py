"""What fits, what does not, and what the refusal says."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.base.errors import ModelTooLargeError
from headrace.engine.memory import MemoryNeeds, PoolPlan, plan_pool, read_available_bytes

MIB = 2**20
NEEDS = MemoryNeeds(
    weight_bytes=100 * MIB, scratch_bytes=10 * MIB, kv_token_bytes=1024, narrower_bytes=lambda: {"int8": 54 * MIB}
)


def plan(available_mib: float, **changes: object) -> PoolPlan:
    values: dict[str, object] = {
        "available_bytes": int(available_mib * MIB),
        "kv_cache_ratio": 0.5,
        "kv_cache_tokens": None,
        "context_tokens": 8192,
        "max_sequences": 32,
        **changes,
    }
    return plan_pool(NEEDS, **values)  # type: ignore[arg-type]  # a test table of keyword values


def test_pool_takes_its_ratio_of_what_weights_and_scratch_leave() -> None:
    pool = plan(210, max_sequences=1000)

    assert pool.num_blocks * 32 * 1024 == 50 * MIB
    assert pool.context_tokens == 8192


def test_pool_is_no_larger_than_all_sequences_could_use() -> None:
    assert plan(10_000).num_blocks == 32 * 8192 // 32


def test_pool_is_no_larger_than_asked_and_a_partial_block_counts_whole() -> None:
    pool = plan(10_000, kv_cache_tokens=4097, context_tokens=4097)

    assert pool.num_blocks == 129
    assert pool.context_tokens == 4097


def test_pool_below_the_context_shortens_the_context() -> None:
    pool = plan(10_000, kv_cache_tokens=4096)

    assert pool.context_tokens == 4096


def test_model_that_cannot_fit_is_refused_with_the_arithmetic_and_what_would_fit() -> None:
    with pytest.raises(ModelTooLargeError) as refusal:
        plan(120)

    message = refusal.value.message
    for figure in ("100.0 MiB × 1.5", "1024 bytes per token", "120.0 MiB available", "int8 would fit", "54.0 MiB"):
        assert figure in message


def test_model_that_no_quantization_saves_names_the_machine_that_it_needs() -> None:
    with pytest.raises(ModelTooLargeError, match=r"needs a machine with 91\.0 MiB available"):
        plan(50)


def test_pool_too_small_to_be_useful_is_refused() -> None:
    with pytest.raises(ModelTooLargeError, match="2048 tokens"):
        plan(161, kv_cache_ratio=0.01)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    write(tmp_path / "proc" / "meminfo", "MemTotal: 9000 kB\nMemAvailable: 8000 kB\n")
    return tmp_path


def read(folder: Path) -> int:
    return read_available_bytes(folder / "proc", folder / "cgroup")


def test_without_a_limit_the_machine_decides(machine: Path) -> None:
    assert read(machine) == 8000 * 1024


def test_container_limit_counts_without_the_file_cache(machine: Path) -> None:
    write(machine / "proc" / "self" / "cgroup", "0::/app\n")
    write(machine / "cgroup" / "app" / "memory.max", "4096000\n")
    write(machine / "cgroup" / "app" / "memory.current", "3000000\n")
    write(machine / "cgroup" / "app" / "memory.stat", "anon 1\ninactive_file 500000\n")

    assert read(machine) == 1_596_000


def test_version_one_limits_and_limits_of_parents_count(machine: Path) -> None:
    write(machine / "proc" / "self" / "cgroup", "5:cpu:/x\n4:memory:/outer/inner\n")
    write(machine / "cgroup" / "memory" / "outer" / "memory.limit_in_bytes", "2000000\n")
    write(machine / "cgroup" / "memory" / "outer" / "memory.usage_in_bytes", "500000\n")
    write(machine / "cgroup" / "memory" / "outer" / "memory.stat", "total_inactive_file 0\n")

    assert read(machine) == 1_500_000


def test_limit_max_means_none(machine: Path) -> None:
    write(machine / "proc" / "self" / "cgroup", "0::/\n")
    write(machine / "cgroup" / "memory.max", "max\n")

    assert read(machine) == 8000 * 1024
