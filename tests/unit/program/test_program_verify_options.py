"""The verifier's rules for what Llama does not use: experts, lone norms, learned positions, normed heads."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from headrace.program.builder import Builder
from headrace.program.domains import RowLimits
from headrace.program.encode import encode
from headrace.program.ir import NONE, Instruction, Part, Program, result, seal
from headrace.program.model import Architecture, ModelSpec, RopeSpec
from headrace.program.opcodes import LANES, Activation, Domain, Epilogue, Norm, Opcode, Pooling
from headrace.program.unfuse import STAGES, unfuse
from headrace.program.verify import faults, verify
from headrace.program.verify_lowered import encoded_faults, verify_encoded
from headrace.testing.random_builder import Wanted, random_program

SPEC = ModelSpec(
    family="drawn",
    architecture=Architecture.DECODER_ONLY,
    layers=1,
    width=64,
    heads=2,
    kv_heads=1,
    head_size=64,
    hidden=96,
    vocab_size=50,
    context_tokens=100,
    norm_eps=1e-5,
    rope=None,
    is_tied=False,
)
EXPERTS = 3


def program() -> Program:
    b = Builder(SPEC)

    def matrix(name: str, n: int, k: int) -> int:
        return b.matrix(name, k, Part(name, n))

    def vector(name: str, n: int) -> int:
        return b.vector(name, Part(name, n))

    x = b.embed("x", matrix("embed", 50, 64), positions=matrix("positions", 102, 64), position_offset=2)
    q = b.qkv(
        "q",
        x,
        b.matrix("qkv", 64, Part("q", 128), Part("k", 64), Part("v", 64)),
        layer=0,
        rope=b.rope("rope", 100, 48, RopeSpec(1e4)),
        norm=Norm.LAYER,
        norm_weight=vector("norm", 64),
        norm_bias=vector("norm_bias", 64),
        q_norm=vector("q_norm", 64),
        k_norm=vector("k_norm", 64),
    )
    alone = b.linear("o", b.attention("mixed", q, layer=0), matrix("o", 64, 128), activation=Activation.RELU)
    b.norm("sandwich", alone, norm_weight=vector("sandwich", 64), epilogue=Epilogue.ADD, add_to=x)
    parts = [Part(f"{name}.{e}", 32) for e in range(EXPERTS) for name in ("gate", "up")]
    b.moe(
        x,
        router=matrix("router", EXPERTS, 64),
        gate_up=b.matrix("gate_up", 64, *parts, interleave=LANES),
        down=b.matrix("down", 32, *[Part(f"down.{e}", 64) for e in range(EXPERTS)]),
        top_k=2,
        is_renormalised=True,
        add_to=x,
    )
    b.head(x, matrix("head", 50, 64))
    return b.program()


PROGRAM = program()
NUMBERS = {item.opcode: number for number, item in enumerate(PROGRAM.instructions)}
WEIGHTS = {weight.name: weight.index for weight in PROGRAM.weights}


def changed(opcode: Opcode, **values: float) -> Program:
    items = list(PROGRAM.instructions)
    item = items[NUMBERS[opcode]]
    items[NUMBERS[opcode]] = Instruction(item.opcode, item.phase, {**item.values, **values})
    return seal(replace(PROGRAM, instructions=tuple(items)))


def with_weight(name: str, **changes: object) -> Program:
    weights = [replace(weight, **changes) if weight.name == name else weight for weight in PROGRAM.weights]
    return seal(replace(PROGRAM, weights=tuple(weights)))


X = PROGRAM.instructions[0].integer("out")
MUTANTS: dict[str, tuple[str, Callable[[], Program]]] = {
    "rotary table without frequencies": ("table", lambda: with_weight("rope", rope=None)),
    "matrix with frequencies": ("table", lambda: with_weight("o", rope=RopeSpec(1e4))),
    "rotary table of odd width": ("table", lambda: with_weight("rope", k=47)),
    "interleaved parts that are no pairs": (
        "table",
        lambda: with_weight("gate_up", n=160, parts=tuple(Part(str(e), 32) for e in range(5))),
    ),
    "unknown activation": ("range", lambda: changed(Opcode.LINEAR, activation=6)),
    "negative offset": ("range", lambda: changed(Opcode.EMBED, position_offset=-1)),
    "no experts of a row": ("range", lambda: changed(Opcode.MOE, top_k=0)),
    "renormalised twice": ("range", lambda: changed(Opcode.MOE, is_renormalised=2)),
    "head epsilon of zero": ("range", lambda: changed(Opcode.QKV, qk_norm_eps=0.0)),
    "positions of another width": ("shape", lambda: changed(Opcode.EMBED, positions=WEIGHTS["o"])),
    "positions too few": ("shape", lambda: with_weight("positions", n=101, parts=(Part("positions", 101),))),
    "offset without positions": ("shape", lambda: changed(Opcode.EMBED, positions=NONE)),
    "norm bias of RMS": ("shape", lambda: changed(Opcode.QKV, norm=Norm.RMS)),
    "norm of no kind": (
        "shape",
        lambda: changed(Opcode.NORM, norm=Norm.NONE, norm_weight=NONE, epilogue=Epilogue.STORE),
    ),
    "gated norm": ("shape", lambda: changed(Opcode.NORM, epilogue=Epilogue.GLU)),
    "head norm of another size": ("shape", lambda: with_weight("q_norm", n=32, parts=(Part("q_norm", 32),))),
    "more turn than the table has": ("shape", lambda: changed(Opcode.QKV, rotary_size=64)),
    "a table that turns nothing": ("shape", lambda: changed(Opcode.QKV, rotary_size=0)),
    "more turn than there are": ("shape", lambda: with_weight("rope", k=66)),
    "more experts than there are": ("shape", lambda: changed(Opcode.MOE, top_k=4)),
    "experts without pairs": ("shape", lambda: with_weight("gate_up", interleave=0)),
    "experts of fewer parts": (
        "shape",
        lambda: with_weight("gate_up", parts=(Part("gate", 96), Part("up", 96))),
    ),
    "router of another model": ("shape", lambda: changed(Opcode.MOE, experts=2)),
    "experts of another width": ("shape", lambda: changed(Opcode.MOE, hidden=64)),
    "norm onto its input": ("phase", lambda: changed(Opcode.NORM, out=PROGRAM.instructions[3].integer("out"))),
}


def encoder() -> Program:
    spec = replace(SPEC, architecture=Architecture.ENCODER_ONLY, layers=2)
    b = Builder(spec)

    def matrix(name: str, n: int, k: int) -> int:
        return b.matrix(name, k, Part(name, n))

    x = b.embed("x", matrix("embed", 50, 64), types=matrix("types", 2, 64))
    for layer in range(2):
        q = b.qkv(f"q{layer}", x, matrix(f"qkv{layer}", 4 * 64, 64), layer=layer)
        mixed = b.attention(f"mixed{layer}", q, layer=layer)
        b.linear(f"o{layer}", mixed, matrix(f"o{layer}", 64, 128), epilogue=Epilogue.ADD, add_to=x)
    pooled = b.pool("pooled", x, pooling=Pooling.MEAN, is_normalised=True)
    b.linear("dense", pooled, matrix("dense", 64, 64), activation=Activation.TANH, domain=Domain.SEQUENCES)
    return b.program()


ENCODER = encoder()


def changed_encoder(number: int, *, phase: int | None = None, **values: float) -> Program:
    items = list(ENCODER.instructions)
    item = items[number]
    items[number] = Instruction(item.opcode, item.phase if phase is None else phase, {**item.values, **values})
    return seal(replace(ENCODER, instructions=tuple(items)))


# Instructions: 0 EMBED; per layer QKV, ATTENTION, o; 7 POOL, 8 dense.
ENCODER_MUTANTS: dict[str, tuple[str, Callable[[], Program]]] = {
    "unknown pooling": ("range", lambda: changed_encoder(7, pooling=3)),
    "unknown domain": ("range", lambda: changed_encoder(8, domain=3)),
    "layer below the step's pages": ("range", lambda: changed_encoder(1, layer=-2)),
    "both ways over kept pages": ("shape", lambda: changed_encoder(2, layer=0)),
    "types of another width": ("shape", lambda: changed_encoder(0, types=ENCODER.instructions[3].integer("weight"))),
    "one row of each sequence taken for all": ("shape", lambda: changed_encoder(8, domain=Domain.ROWS)),
    "all rows taken for one of each sequence": ("shape", lambda: changed_encoder(3, domain=Domain.SEQUENCES)),
    "pages written twice before they are read": ("kv", lambda: changed_encoder(2, layer=0, is_bidirectional=0)),
    "pages written while they are read": (
        "kv",
        lambda: changed_encoder(4, phase=ENCODER.instructions[2].phase),
    ),
    "queries of another layer": (
        "kv",
        lambda: changed_encoder(5, q=ENCODER.instructions[1].integer("q_out")),
    ),
}


def test_encoder_is_sound_and_leaves_its_result() -> None:
    assert faults(ENCODER) == []
    assert result(ENCODER) == ENCODER.instructions[8].integer("out")
    verify_encoded(ENCODER, encode(ENCODER, 7))


def test_an_encoder_reserves_rows_for_its_sequences_only_where_it_has_no_more() -> None:
    encoded = encode(ENCODER, RowLimits(rows=70, sequences=3, outputs=1))

    pooled = encoded.buffer(ENCODER.buffers[ENCODER.instructions[8].integer("out")].name)

    assert pooled.size_bytes == -(-3 * pooled.width * 4 // 64) * 64
    assert pooled.size_bytes < encode(ENCODER, 70).buffer(pooled.name).size_bytes
    verify_encoded(ENCODER, encoded)
    lying = replace(encoded, limits=RowLimits(rows=70, sequences=7000, outputs=1))
    assert "arena" in {fault.rule for fault in encoded_faults(ENCODER, lying)}


@pytest.mark.parametrize("name", sorted(ENCODER_MUTANTS))
def test_mutant_encoder_is_caught_by_its_rule(name: str) -> None:
    rule, mutate = ENCODER_MUTANTS[name]

    found = faults(mutate())

    assert rule in {fault.rule for fault in found}, [str(fault) for fault in found]


def test_program_with_every_option_is_sound() -> None:
    assert faults(PROGRAM) == []
    verify_encoded(PROGRAM, encode(PROGRAM, 7))


def test_experts_may_read_what_they_add_to() -> None:
    item = PROGRAM.instructions[NUMBERS[Opcode.MOE]]

    assert item.values["input"] == item.values["out"] == X


# Instructions of the program taken apart, by opcode: the first of each.
APART = unfuse(PROGRAM, 0).program
FIRST = {
    opcode: [item.opcode for item in APART.instructions].index(opcode)
    for opcode in {item.opcode for item in APART.instructions}
}


def changed_apart(opcode: Opcode, offset: int = 0, **values: float) -> Program:
    items = list(APART.instructions)
    number = FIRST[opcode] + offset
    items[number] = Instruction(items[number].opcode, items[number].phase, {**items[number].values, **values})
    return seal(replace(APART, instructions=tuple(items)))


APART_MUTANTS: dict[str, tuple[str, Callable[[], Program]]] = {
    "plain rows taken for prepared ones": (
        "shape",
        lambda: changed_apart(Opcode.LINEAR, input=APART.instructions[FIRST[Opcode.NORM]].integer("out")),
    ),
    "prepared rows taken for plain ones": ("shape", lambda: changed_apart(Opcode.LINEAR, norm=Norm.NONE)),
    "prepared where a head reads": ("shape", lambda: changed_apart(Opcode.HEAD, norm=Norm.PREPARED)),
    "logits of another width": ("shape", lambda: changed_apart(Opcode.HEAD, k=64)),
    "logits with a norm": ("shape", lambda: changed_apart(Opcode.HEAD, norm=Norm.RMS)),
    "keys without values": ("shape", lambda: changed_apart(Opcode.ROTATE, values=NONE)),
    "queries that hold too little": ("shape", lambda: changed_apart(Opcode.ROTATE, keys=NONE, values=NONE)),
    "turned in place": (
        "phase",
        lambda: changed_apart(Opcode.ROTATE, q_out=APART.instructions[FIRST[Opcode.ROTATE]].integer("q")),
    ),
    "gated by another width": ("shape", lambda: changed_apart(Opcode.GATE, width=32)),
    "all rows picked": ("shape", lambda: changed_apart(Opcode.PICK, 1, domain=Domain.ROWS)),
    "a copy that nobody asked for": ("shape", lambda: changed_apart(Opcode.NORM, norm=Norm.NONE, norm_weight=NONE)),
}


@pytest.mark.parametrize("name", sorted(APART_MUTANTS))
def test_mutant_of_a_program_apart_is_caught_by_its_rule(name: str) -> None:
    rule, mutate = APART_MUTANTS[name]

    found = faults(mutate())

    assert rule in {fault.rule for fault in found}, [str(fault) for fault in found]


@pytest.mark.parametrize("stage", range(STAGES))
def test_every_stage_is_sound_and_lowers_soundly(stage: int) -> None:
    for whole in (PROGRAM, random_program(np.random.default_rng(stage))):
        apart = unfuse(whole, stage).program

        assert faults(apart) == []
        verify_encoded(apart, encode(apart, 7))


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_mutant_is_caught_by_its_rule(name: str) -> None:
    rule, mutate = MUTANTS[name]

    found = faults(mutate())

    assert rule in {fault.rule for fault in found}, [str(fault) for fault in found]


@pytest.mark.parametrize("seed", range(40))
def test_drawn_programs_are_sound(seed: int) -> None:
    drawn = random_program(np.random.default_rng(seed))

    verify(drawn)
    verify_encoded(drawn, encode(drawn, 9))


@pytest.mark.parametrize("seed", range(20))
def test_drawn_encoders_are_sound(seed: int) -> None:
    drawn = random_program(np.random.default_rng(seed), Wanted(is_encoder=True))

    verify(drawn)
    verify_encoded(drawn, encode(drawn, 9))
