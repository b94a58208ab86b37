"""The determinism contract, on a tiny random model with the real VM: who else is there never shows in the tokens."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from headrace.kernels.vm import available_isas
from headrace.protocol.frames import Submit
from headrace.testing.determinism import make_machine, make_requests, run_alone, run_together
from headrace.testing.tiny import write_tiny_llama

VOCAB = 320
NUM_REQUESTS = 50


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Untied: a tied random model repeats its last token, which hides differences.
    return write_tiny_llama(tmp_path_factory.mktemp("determinism") / "tiny", is_tied=False, vocab_size=VOCAB)


@pytest.fixture(scope="module")
def requests() -> list[Submit]:
    return make_requests(NUM_REQUESTS, vocab_size=VOCAB, longest_prompt=200, max_tokens=24)


@pytest.fixture(scope="module")
def alone(model: Path, requests: list[Submit]) -> dict[str, list[object]]:
    heard = run_alone(make_machine(model, prefix_cache=False), requests)
    assert len({str(value) for value in heard.values()}) == NUM_REQUESTS, "the requests tell nothing apart"
    return heard


def test_tokens_are_the_same_among_31_others(
    model: Path, requests: list[Submit], alone: dict[str, list[object]]
) -> None:
    machine = make_machine(model, prefix_cache=False)

    assert run_together(machine, requests) == alone
    assert machine.peak_running == 32


@pytest.mark.parametrize("max_step_tokens", [32, 45, 300])
def test_tokens_are_the_same_with_other_prefill_chunks(
    model: Path, requests: list[Submit], alone: dict[str, list[object]], max_step_tokens: int
) -> None:
    assert run_together(make_machine(model, max_step_tokens=max_step_tokens), requests) == alone


def test_tokens_are_the_same_with_a_warm_prefix_cache(
    model: Path, requests: list[Submit], alone: dict[str, list[object]]
) -> None:
    machine = make_machine(model)
    machine.run(*(msgspec.structs.replace(request, request_id=f"warm {request.request_id}") for request in requests))
    before = machine.scheduler.totals.prefix_hits_tokens

    assert run_together(machine, requests) == alone
    assert machine.scheduler.totals.prefix_hits_tokens - before > 3000


def test_tokens_are_the_same_after_forced_preemptions(model: Path) -> None:
    # Short prompts and long outputs: many are let in, and then outgrow a pool of 16 blocks.
    requests = make_requests(NUM_REQUESTS, vocab_size=VOCAB, longest_prompt=60, max_tokens=100)
    alone = run_alone(make_machine(model, prefix_cache=False), requests)
    machine = make_machine(model, kv_cache_tokens=512)

    assert run_together(machine, requests) == alone
    assert machine.scheduler.totals.preemptions >= 10


def test_tokens_are_the_same_with_two_threads(
    model: Path, requests: list[Submit], alone: dict[str, list[object]]
) -> None:
    assert run_together(make_machine(model, threads=2), requests) == alone


@pytest.mark.parametrize("max_steps", [2, 3, 8])
def test_steps_in_a_row_never_show(
    model: Path, requests: list[Submit], alone: dict[str, list[object]], max_steps: int
) -> None:
    machine = make_machine(model)
    machine.max_steps = max_steps
    assert run_together(machine, requests) == alone


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize(
    ("dtype", "quantization"), [("fp32", "none"), ("bf16", "none"), ("bf16", "int8"), ("bf16", "int4")], ids=str
)
def test_every_kernel_path_keeps_the_contract(model: Path, isa: str, dtype: str, quantization: str) -> None:
    requests = make_requests(12, vocab_size=VOCAB, longest_prompt=80, max_tokens=12)
    path = {"isa": isa, "dtype": dtype, "quantization": quantization}

    alone = run_alone(make_machine(model, **path), requests)

    assert run_together(make_machine(model, threads=2, max_step_tokens=37, **path), requests) == alone


@pytest.mark.slow
@pytest.mark.timeout(1800)  # minutes on a quiet machine, more where it is shared
@pytest.mark.model
def test_the_demo_model_keeps_the_contract(demo_model: Path) -> None:
    requests = make_requests(NUM_REQUESTS, vocab_size=49152, longest_prompt=300, max_tokens=24)
    alone = run_alone(make_machine(demo_model, threads=2, prefix_cache=False), requests)

    assert run_together(make_machine(demo_model, threads=2), requests) == alone
    assert run_together(make_machine(demo_model, threads=1, max_step_tokens=77), requests) == alone
    warm = make_machine(demo_model, threads=2)
    warm.run(*(msgspec.structs.replace(request, request_id=f"warm {request.request_id}") for request in requests))
    assert run_together(warm, requests) == alone
    assert warm.scheduler.totals.prefix_hits_tokens > 3000


@pytest.mark.slow
@pytest.mark.timeout(1800)  # minutes on a quiet machine, more where it is shared
@pytest.mark.model
def test_the_demo_model_keeps_the_contract_through_preemptions(demo_model: Path) -> None:
    requests = make_requests(NUM_REQUESTS, vocab_size=49152, longest_prompt=60, max_tokens=100)
    tight = make_machine(demo_model, threads=2, kv_cache_tokens=512)

    assert run_together(tight, requests) == run_alone(make_machine(demo_model, threads=2), requests)
    assert tight.scheduler.totals.preemptions >= 10
