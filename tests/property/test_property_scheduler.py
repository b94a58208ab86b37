"""Random submits, aborts, deadlines and finishes: nothing leaks, nobody starves, and nobody's tokens ever change."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import msgspec
import numpy as np
import pytest

from headrace.engine.scheduler import SchedulerConfig
from headrace.protocol.frames import Failed, Finished, FinishReason, Sampling, Submit
from headrace.testing.fake_vm import FakeVm, next_token
from headrace.testing.machine import Machine

VOCAB = 50  # small, so that stop ids are met and prompts share their starts
BASE = SchedulerConfig(vocab_size=VOCAB, context_tokens=160, eos_token_ids=frozenset({3}), num_blocks=8)


def random_config(rng: random.Random) -> SchedulerConfig:
    max_sequences = rng.choice([1, 2, 5, 8])
    return replace(
        BASE,
        num_blocks=rng.choice([5, 6, 9, 20]),
        max_sequences=max_sequences,
        max_step_tokens=max_sequences + rng.choice([0, 1, 7, 64]),
        has_prefix_cache=rng.random() < 0.8,
        window_tokens=rng.choice([0, 0, 1, 20, 32, 45]),
    )


def random_submit(rng: random.Random, index: int) -> Submit:
    shared = [7] * rng.choice([0, 0, 32, 64, 70])
    prompt = (shared + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 60))])[:159]
    max_tokens = rng.randint(1, 90)
    return Submit(
        f"r{index}",
        prompt,
        max_tokens,
        Sampling(seed=rng.randrange(4)),
        min_tokens=rng.choice([0, 0, rng.randint(0, max_tokens)]),
        ignore_eos=rng.random() < 0.5,
        priority=rng.choice([0, 0, 0, -1, 2]),
        cache_salt=rng.choice(["", "", "other"]),
        echo_logprobs=rng.choice([None, None, None, 2]),
        timeout_s=rng.choice([600.0, 600.0, 600.0, 0.05]),
    )


def machine_of(config: SchedulerConfig) -> Machine:
    return Machine(config, FakeVm(config.num_blocks, config.vocab_size, window=config.window_tokens))


@cache
def _lone_tokens(
    prompt: tuple[int, ...], seed: int, max_tokens: int, min_tokens: int, ignore_eos: bool, window: int
) -> list[int]:
    tokens = list(prompt)
    eos = BASE.eos_token_ids if not ignore_eos else frozenset[int]()
    while len(tokens) < min(len(prompt) + max_tokens, BASE.context_tokens):
        banned = eos if len(tokens) - len(prompt) < min_tokens else frozenset[int]()
        token = next_token(np.array(tokens[-window:], np.int32), seed, VOCAB, banned)
        if token in eos:
            break
        tokens.append(token)
    return tokens[len(prompt) :]


def lone_tokens(submit: Submit, window: int = 0) -> list[int]:
    """What the request must say, by the fake model's definition and nothing else."""
    prompt = tuple(submit.prompt_ids)
    seed = submit.sampling.seed
    return _lone_tokens(prompt, seed, submit.max_tokens, submit.min_tokens, submit.ignore_eos, window)


@pytest.mark.parametrize("seed", range(40))
def test_random_life_leaks_nothing_and_changes_nobodys_tokens(seed: int) -> None:
    rng = random.Random(seed)
    machine = machine_of(random_config(rng))
    submits: dict[str, Submit] = {}
    steps_left = rng.randint(50, 150)
    while steps_left or machine.scheduler.has_work:
        if steps_left and rng.random() < 0.3:
            submit = random_submit(rng, len(submits))
            submits[submit.request_id] = submit
            machine.submit(submit)
        if submits and rng.random() < 0.03:
            machine.abort(rng.choice(list(submits)))
        machine.max_steps = rng.choice([1, 1, 2, 5, 8, 40])
        machine.step()
        machine.scheduler.check()
        steps_left = max(0, steps_left - 1)

    assert machine.scheduler.pool.num_used == 0
    for request_id, submit in submits.items():
        ending, heard = machine.ending(request_id), machine.tokens(request_id)
        said = lone_tokens(submit, machine.scheduler.config.window_tokens)
        if isinstance(ending, Finished) and ending.reason is not FinishReason.ABORTED:
            assert heard == said
        else:
            assert isinstance(ending, Finished) or ending.code == "generation_timeout"
            assert heard == said[: len(heard)]


@pytest.mark.parametrize("max_step_tokens", [5, 6, 9, 33, 512])
def test_chunk_size_never_shows_in_the_tokens(max_step_tokens: int) -> None:
    rng = random.Random(1)
    submits = [msgspec.structs.replace(random_submit(rng, index), timeout_s=600.0) for index in range(40)]
    machine = Machine(replace(BASE, num_blocks=12, max_sequences=5, max_step_tokens=max_step_tokens))

    machine.run(*submits)

    for submit in submits:
        assert machine.tokens(submit.request_id) == lone_tokens(submit)


@pytest.mark.parametrize("window", [1, 31, 32, 33, 64])
def test_a_sequence_holds_no_more_blocks_than_its_window_touches(window: int) -> None:
    machine = machine_of(replace(BASE, window_tokens=window, has_prefix_cache=False))
    submit = Submit("r", [7] * 40, 110, Sampling(seed=1), ignore_eos=True)
    machine.submit(submit)
    most_held = 0
    while machine.scheduler.has_work:
        machine.step()
        machine.scheduler.check()
        if len(machine.tokens("r")) > window:
            most_held = max(most_held, machine.scheduler.pool.num_used)

    assert machine.tokens("r") == lone_tokens(submit, window)
    assert 1 <= most_held <= (window + 30) // 32 + 1


def test_blocks_behind_the_window_let_more_sequences_run() -> None:
    def peak(window: int) -> int:
        machine = machine_of(replace(BASE, num_blocks=8, max_sequences=8, window_tokens=window, has_prefix_cache=False))
        # Each grows to five blocks: three of them do not fit beside each other unless old ones are given back.
        submits = [Submit(f"r{index}", [7] * 30, 120, Sampling(seed=index), ignore_eos=True) for index in range(4)]
        machine.run(*submits)
        for submit in submits:
            assert machine.tokens(submit.request_id) == lone_tokens(submit, window)
        return machine.scheduler.totals.preemptions

    assert peak(0) > 0
    assert peak(32) == 0


def test_published_blocks_behind_the_window_are_found_by_others() -> None:
    machine = machine_of(replace(BASE, num_blocks=20, max_step_tokens=512, window_tokens=32))
    prompt = [token % VOCAB for token in range(129)]
    machine.run(Submit("first", prompt, 20, ignore_eos=True))

    machine.run(Submit("second", prompt, 20, ignore_eos=True))

    assert machine.scheduler.totals.prefix_hits_tokens == 128
    assert machine.tokens("second") == machine.tokens("first")


def test_one_long_request_and_a_stream_of_short_ones_all_end() -> None:
    machine = Machine(replace(BASE, num_blocks=6, max_sequences=4, max_step_tokens=40))
    long = Submit("long", [7] * 100, 60, ignore_eos=True)
    machine.submit(long)
    for index in range(300):
        machine.submit(Submit(f"short{index}", [index % VOCAB] * 20, 5, ignore_eos=True))
        machine.step()
    machine.run()

    assert machine.tokens("long") == lone_tokens(long)
    endings = [machine.ending(request_id) for request_id in machine.events]
    assert not any(isinstance(ending, Failed) for ending in endings)
    first = machine.ending("short0")
    last = machine.ending("short299")
    assert isinstance(first, Finished)
    assert isinstance(last, Finished)


def test_requests_whose_blocks_are_all_shared_still_make_progress() -> None:
    machine = Machine(replace(BASE, num_blocks=5, max_sequences=5, max_step_tokens=160))
    prompt = [7] * 127
    submits = [Submit(f"r{index}", prompt, 30, Sampling(seed=index), ignore_eos=True) for index in range(5)]

    machine.run(*submits, max_steps=5000)

    for submit in submits:
        assert machine.tokens(submit.request_id) == lone_tokens(submit)
