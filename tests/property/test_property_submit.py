"""No request can hurt the engine (promise P1): extreme but well-formed Submits on the real VM over a tiny model."""

from __future__ import annotations

import math
import random

import pytest

from headrace.protocol.frames import EchoLogprobs, Failed, Finished, Sampling, Submit, Tokens
from headrace.testing.determinism import make_machine
from headrace.testing.machine import Machine
from headrace.testing.tiny import write_tiny_llama

VOCAB = 320
EDGES = (0.0, -0.0, 1.0, -1.0, 0.5, 2.0, -2.0, 100.0, 1e-45, 1e-38, 1e-3, 1e3, 1e6, 1e38, 1e308)
ODD = (math.nan, math.inf, -math.inf)
INTEGERS = (0, 1, -1, 2, 20, 21, 256, 257, 2**31 - 1, 2**31, -(2**31), 2**63 - 1, -(2**63))


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    model = write_tiny_llama(tmp_path_factory.mktemp("submit") / "tiny", is_tied=False, vocab_size=VOCAB)
    return make_machine(model, threads=2, max_step_tokens=64, kv_cache_tokens=1024)


def random_submit(rng: random.Random, request_id: str, *, is_tame: bool) -> Submit:
    """Returns a request; a tame one stays inside every range, at its edges."""

    def real(low: float, high: float) -> float:
        values = [value for value in (*EDGES, low, high) if low <= value <= high]
        return rng.choice(values if is_tame or rng.random() < 0.8 else (*EDGES, *ODD))

    def integer(low: int, high: int) -> int:
        values = [value for value in (*INTEGERS, low, high) if low <= value <= high]
        return rng.choice(values if is_tame or rng.random() < 0.8 else INTEGERS)

    tokens = range(VOCAB)
    max_tokens = rng.choice([1, 3, 8, integer(1, 2**31 - 1)])
    return Submit(
        request_id,
        [rng.choice([0, VOCAB - 1, rng.randrange(VOCAB)]) for _ in range(rng.choice([1, 2, 31, 32, 33, 100, 505]))],
        max_tokens,
        Sampling(
            temperature=real(0.0, 1e6),
            top_k=integer(0, 2**31 - 1),
            top_p=real(1e-45, 1.0),
            min_p=real(0.0, 1.0),
            repetition_penalty=real(1e-3, 1e3),
            presence_penalty=real(-2.0, 2.0),
            frequency_penalty=real(-2.0, 2.0),
            seed=rng.choice(INTEGERS),
            logit_bias=rng.choice([{}, dict.fromkeys(tokens, -100.0), {rng.choice(tokens): real(-100.0, 100.0)}]),
            num_logprobs=rng.choice([None, integer(0, 20)]),
        ),
        min_tokens=min(integer(0, 8), max_tokens),
        stop_token_ids=rng.choice([[], list(tokens), [0, VOCAB - 1], [integer(0, VOCAB - 1)]]),
        ignore_eos=rng.random() < 0.5,
        timeout_s=real(1e-3, 1e3),
        priority=integer(-(2**31), 2**31),
        echo_logprobs=rng.choice([None, integer(0, 256)]),
    )


@pytest.mark.parametrize("is_tame", [True, False], ids=["at the edges", "beyond them"])
@pytest.mark.parametrize("seed", range(4))
def test_every_extreme_request_ends_once_and_harms_nobody(machine: Machine, seed: int, is_tame: bool) -> None:
    rng = random.Random(1000 * is_tame + seed)
    ids = [f"{is_tame} {seed} {index}" for index in range(60)]
    before, after = (
        Submit(f"{when} {is_tame} {seed}", [1, 2, 3], 6, Sampling(seed=5), ignore_eos=True)
        for when in ("before", "after")
    )
    machine.run(before)

    machine.run(*(random_submit(rng, request_id, is_tame=is_tame) for request_id in ids))

    endings = [machine.ending(request_id) for request_id in ids]
    codes = {ending.code for ending in endings if isinstance(ending, Failed)}
    assert codes <= {"invalid_value", "context_length_exceeded", "generation_timeout"}
    assert sum(isinstance(ending, Finished) for ending in endings) > (30 if is_tame else 5)
    for request_id in ids:
        for event in machine.events[request_id]:
            if isinstance(event, Tokens | EchoLogprobs):
                numbers = [number for entry in event.logprobs for number in (entry.logprob, *entry.top_logprobs)]
                assert all(number <= 1e-5 for number in numbers), "a log-probability is a number, and not above 0"
            if isinstance(event, Tokens):
                assert all(0 <= token < VOCAB for token in event.ids)
    machine.run(after)
    assert machine.tokens(after.request_id) == machine.tokens(before.request_id)
    assert machine.scheduler.pool.num_used == 0
    machine.scheduler.check()
