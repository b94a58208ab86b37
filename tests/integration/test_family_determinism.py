"""The determinism contract for every family, on tiny random models with the real VM."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from headrace.base.clock import SystemClock
from headrace.engine.loader import inspect, load
from headrace.protocol.frames import Submit
from headrace.protocol.launch import WorkerLaunch
from headrace.testing.determinism import make_machine, make_requests, run_alone, run_together
from headrace.testing.machine import Machine
from headrace.testing.tiny_families import CASES, VOCAB, write_tiny_family

CONTEXT_TOKENS = 128  # GPT-2's


@pytest.fixture(scope="module")
def requests() -> list[Submit]:
    return make_requests(8, vocab_size=VOCAB, longest_prompt=100, max_tokens=20)


@pytest.mark.parametrize("case", CASES)
def test_a_family_keeps_the_contract(tmp_path: Path, requests: list[Submit], case: str) -> None:
    model = write_tiny_family(tmp_path / case, case)

    def machine(**options: object) -> Machine:
        return make_machine(model, max_context_tokens=CONTEXT_TOKENS, **options)

    alone = run_alone(machine(prefix_cache=False), requests)
    assert len({str(value) for value in alone.values()}) == len(requests), "the requests tell nothing apart"

    assert run_together(machine(threads=2, max_step_tokens=37), requests) == alone

    warm = machine()
    warm.run(*(msgspec.structs.replace(request, request_id=f"warm {request.request_id}") for request in requests))
    before = warm.scheduler.totals.prefix_hits_tokens
    assert run_together(warm, requests) == alone
    assert warm.scheduler.totals.prefix_hits_tokens > before

    tight = machine(kv_cache_tokens=CONTEXT_TOKENS)
    crowd = [
        msgspec.structs.replace(request, prompt_ids=request.prompt_ids[:30], max_tokens=60) for request in requests
    ]
    expected = run_alone(machine(prefix_cache=False), crowd)
    assert run_together(tight, crowd) == expected
    # Where pages behind the window are given back, nobody may be in anybody's way.
    assert tight.scheduler.totals.preemptions > 0 or tight.scheduler.config.window_tokens


def test_giving_back_pages_behind_the_window_changes_nothing(tmp_path: Path, requests: list[Submit]) -> None:
    launch = WorkerLaunch(
        model_path=str(write_tiny_family(tmp_path / "mistral", "mistral")),
        served_name="windows",
        socket_fd=-1,
        threads=1,
        max_context_tokens=CONTEXT_TOKENS,
        kv_cache_tokens=8 * CONTEXT_TOKENS,
        prefix_cache=False,
    )
    inspection = inspect(launch)
    config = inspection.scheduler_config
    assert config.window_tokens == 24

    giving = Machine(config, load(inspection, SystemClock()).vm)
    keeping = Machine(replace(config, window_tokens=0), load(inspection, SystemClock()).vm)

    assert run_together(giving, requests) == run_together(keeping, requests)


def test_a_model_with_a_layer_that_sees_everything_keeps_its_pages(tmp_path: Path) -> None:
    path = str(write_tiny_family(tmp_path / "gemma2", "gemma2"))

    assert inspect(WorkerLaunch(path, "mixed", -1)).scheduler_config.window_tokens == 0


@pytest.mark.parametrize(("case", "windows"), [("gemma2", [16, 0, 16]), ("mistral", [16, 16]), ("qwen3", [16, 16])])
def test_another_window_goes_to_the_layers_that_have_one_or_to_all(
    tmp_path: Path, case: str, windows: list[int]
) -> None:
    path = str(write_tiny_family(tmp_path / case, case))

    inspection = inspect(WorkerLaunch(path, "windows", -1, attention_window=16))

    assert [inspection.spec.layer(index).window for index in range(inspection.spec.layers)] == windows
    assert inspection.scheduler_config.window_tokens == (16 if all(windows) else 0)
