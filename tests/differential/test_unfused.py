"""Programs taken apart: every stage gives the reference's bits at each instruction, and the fused program's results."""

import numpy as np
import pytest

from headrace.kernels.vm import available_isas
from headrace.program.ir import effect
from headrace.program.opcodes import KvType, Opcode
from headrace.program.unfuse import STAGES, Cutter, unfuse
from headrace.testing.random_builder import Wanted, random_program
from headrace.testing.random_programs import Packed, random_outputs, random_weights

from .test_program_vs_vm import LAYOUTS, Pair, conversation

ISAS = available_isas()


def drawn(seed: int, layouts: str) -> tuple[object, list[Packed]]:
    random = np.random.default_rng(seed)
    program = random_program(random, Wanted(has_experts=seed % 4 == 3))
    return program, random_weights(random, program, LAYOUTS[layouts])


def taken_apart(seed: int, layouts: str, stage: int, kv_type: KvType, isa: str, threads: int) -> Pair:
    program, weights = drawn(seed, layouts)
    unfused = unfuse(program, stage)
    return Pair(unfused.program, Cutter(weights).weights_of(unfused), kv_type, isa, threads)


@pytest.mark.parametrize("stage", range(STAGES - 1))
@pytest.mark.parametrize("isa", ISAS)
def test_every_instruction_of_a_stage_gives_the_same_bits(isa: str, stage: int) -> None:
    for layouts, kv_type in (("f32", KvType.F32), ("mixed", KvType.BF16)):
        case = taken_apart(stage, layouts, stage, kv_type, isa, threads=1 + stage % 2)
        talk = conversation(case, stage)

        for rows in ({0: 33, 1: 1}, {0: 1, 1: 9, 2: 2}):
            step = talk.step(rows)
            case.compare(step, skip=Opcode.PREPARE)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("isa", ISAS)
def test_all_stages_choose_alike(isa: str, seed: int) -> None:
    layouts, kv_type = ("f32", KvType.F32) if seed % 3 == 0 else ("mixed", KvType.BF16)
    cases = [taken_apart(seed, layouts, stage, kv_type, isa, threads=1 + stage % 3) for stage in range(STAGES)]
    talk = conversation(cases[0], seed)
    vocab_size = cases[0].program.spec.vocab_size

    for rows in ({0: 40, 1: 20, 2: 1}, {0: 1, 1: 1, 2: 1}, {1: 1}):
        step = random_outputs(np.random.default_rng(seed), talk.step(rows), vocab_size)
        wanted, *rest = [case.vm_step(step) for case in cases]

        for found in rest:
            for ours, theirs in zip(found, wanted, strict=True):
                np.testing.assert_array_equal(ours, theirs)


def test_the_last_stage_is_the_program_itself_and_each_one_before_it_is_longer() -> None:
    program, _ = drawn(0, "f32")

    stages = [unfuse(program, stage).program for stage in range(STAGES)]

    assert stages[-1] is program
    lengths = [len(stage.instructions) for stage in stages]
    assert lengths == sorted(lengths, reverse=True)
    assert len(set(lengths)) == STAGES


def test_an_unfused_program_has_one_operation_in_each_phase() -> None:
    program, _ = drawn(1, "f32")

    apart = unfuse(program, 0).program

    assert [item.phase for item in apart.instructions] == list(range(len(apart.instructions)))
    kinds = {item.opcode for item in apart.instructions}
    assert kinds >= {Opcode.PREPARE, Opcode.ROTATE, Opcode.PICK, Opcode.NORM}
    assert Opcode.QKV not in kinds
    assert all(len((*effect(item).writes, *effect(item).updates)) <= 1 for item in apart.instructions)
