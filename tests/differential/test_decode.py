"""Decode steps in a row give what single steps give, to the bit, and end where they must."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from headrace.kernels.vm import Vm, available_isas
from headrace.program.interpret import StepInput
from headrace.program.opcodes import KvType
from headrace.testing.random_builder import Wanted, random_program
from headrace.testing.random_programs import Conversation, plain_outputs, random_weights

from .test_program_vs_vm import BLOCKS, LAYOUTS, Pair

SEQUENCES, STEPS = 3, 40
NO_STOPS = np.zeros(0, np.int32)


def pair(isa: str, seed: int, threads: int) -> Pair:
    random = np.random.default_rng(seed)
    program = random_program(random, Wanted(has_experts=False))
    return Pair(program, random_weights(random, program, LAYOUTS["mixed"]), KvType.BF16, isa, threads)


def begun(case: Pair, seed: int) -> StepInput:
    """Runs prompts of 5, 31 and 40 tokens; returns the first decode step, with the pages of 40 of them."""
    talk = Conversation(np.random.default_rng(seed), case.program.spec.vocab_size, BLOCKS)
    lengths = {0: 5, 1: 31, 2: 40}
    case.vm_step(talk.step(lengths))
    tables = talk.step(dict.fromkeys(lengths, STEPS)).block_tables
    positions = np.array(list(lengths.values()), np.int32)
    outputs = plain_outputs(range(SEQUENCES), positions)
    for output, temperature in zip(outputs, (0.0, 0.8, 1.3), strict=True):
        output["temperature"], output["seed"], output["top_k"] = temperature, 7, 9
    return replace(
        talk.step({0: 1}),
        tokens=np.array([1, 2, 3], np.int32),
        positions=positions,
        seq_starts=np.arange(SEQUENCES + 1, dtype=np.int32),
        block_tables=tables,
        outputs=outputs,
    )


def decode(vm: Vm, step: StepInput, num_steps: int = STEPS, **changes: Any) -> tuple[np.ndarray, ...]:
    arguments = {"stop_ids": NO_STOPS, "stop_starts": np.zeros(SEQUENCES + 1, np.int32)} | changes
    return vm.decode(
        step.tokens, step.positions, step.seq_starts, step.block_tables, step.outputs, num_steps=num_steps, **arguments
    )


def one_by_one(case: Pair, step: StepInput) -> tuple[np.ndarray, ...]:
    made = []
    for _ in range(STEPS):
        made.append(case.vm_step(step))
        outputs = step.outputs.copy()
        outputs["position"] += 1
        step = replace(step, tokens=made[-1][0]["token"].copy(), positions=step.positions + 1, outputs=outputs)
    return tuple(np.concatenate(parts) for parts in zip(*made, strict=True))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("isa", available_isas())
def test_steps_in_a_row_give_the_bits_of_single_ones(isa: str, seed: int) -> None:
    single, several = (pair(isa, seed, threads) for threads in (1, 2))
    first = begun(single, seed)
    begun(several, seed)

    wanted = one_by_one(single, first)
    found = decode(several.vm, first)

    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_stop_id_ends_the_steps_behind_it() -> None:
    case = pair("scalar", 0, 1)
    first = begun(case, 0)
    tokens = one_by_one(case, first)[0]["token"].reshape(STEPS, SEQUENCES)
    number = next(n for n in range(3, STEPS) if tokens[n, 1] not in tokens[:n, 1])
    stops = np.array([tokens[number, 1]], np.int32)

    # The id stops the second sequence alone.
    results, _, _ = decode(case.vm, first, stop_ids=stops, stop_starts=np.array([0, 0, 1, 1], np.int32))

    np.testing.assert_array_equal(results["token"].reshape(-1, SEQUENCES), tokens[: number + 1])


def test_something_to_read_ends_the_steps_after_one() -> None:
    case = pair("scalar", 0, 2)
    first = begun(case, 0)
    read_end, write_end = os.pipe()
    try:
        assert len(decode(case.vm, first, wake_fd=read_end)[0]) == STEPS * SEQUENCES
        os.write(write_end, b"x")
        assert len(decode(case.vm, first, wake_fd=read_end)[0]) == SEQUENCES
    finally:
        os.close(read_end)
        os.close(write_end)


def test_a_row_that_is_no_number_ends_the_steps() -> None:
    random = np.random.default_rng(0)
    program = random_program(random, Wanted(has_experts=False))
    weights = random_weights(random, program, LAYOUTS["f32"])
    case = Pair(program, weights, KvType.F32, "scalar", 1)
    first = begun(case, 0)
    tokens = one_by_one(case, first)[0]["token"].reshape(STEPS, SEQUENCES)
    number, token = next((n, t) for n, t in enumerate(tokens[:, 1]) if n > 1 and t not in tokens[:n])
    embed = weights[program.instructions[0].integer("table")]
    lanes = embed.data.view(np.float32).reshape(-1, embed.k, 16)
    lanes[token // 16, :, token % 16] = np.nan

    results, _, _ = decode(case.vm, first)

    statuses = results["status"].reshape(-1, SEQUENCES)
    assert len(statuses) == number + 2  # the step that chose the token, and the one that read it
    assert statuses[-1, 1] == 1
    assert not statuses[:-1].any()


BAD: list[tuple[str, dict[str, Any]]] = [
    ("steps is 0", {"num_steps": 0}),
    ("needs .* blocks", {"num_steps": 200}),
    ("rising ranges", {"stop_starts": np.array([0, 1, 0, 0], np.int32)}),
    ("rising ranges", {"stop_starts": np.zeros(2, np.int32)}),
    ("one row and one output", {"outputs": plain_outputs([0], [0])}),
    ("must choose the token behind row 0", {"outputs": plain_outputs([1, 0, 2], [5, 31, 40])}),
    ("one entry per row", {"positions": np.zeros(2, np.int32)}),
    ("mask", {"mask": 0}),
    ("dtype", {"stop_ids": np.zeros(0, np.int64)}),
]


@pytest.mark.parametrize(("words", "changes"), BAD, ids=[f"{i}-{w}" for i, (w, _) in enumerate(BAD)])
def test_wrong_steps_in_a_row_are_refused_before_they_run(words: str, changes: dict[str, Any]) -> None:
    case = pair("scalar", 0, 1)
    first = begun(case, 0)
    fields = {name: changes[name] for name in ("outputs", "positions") if name in changes}
    if "mask" in changes:
        fields["outputs"] = first.outputs.copy()
        fields["outputs"]["mask"] = 0
    others = {name: value for name, value in changes.items() if name not in ("outputs", "positions", "mask")}

    with pytest.raises(ValueError, match=words):
        decode(case.vm, replace(first, **fields), **{"num_steps": 4, **others})
