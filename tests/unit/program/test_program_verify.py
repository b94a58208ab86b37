"""Every rule of the verifier against a program that breaks it; and random damage, which must never pass unseen."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from headrace.program.encode import Encoded, encode
from headrace.program.ir import NONE, Instruction, Part, Program, effect, seal
from headrace.program.opcodes import FIELDS, RECORD_BYTES, Epilogue, Norm, Opcode
from headrace.program.records import pack_record, unpack_record
from headrace.program.spec import build_program, spec_from_config
from headrace.program.verify import ProgramError, faults, verify
from headrace.program.verify_lowered import encoded_faults, verify_encoded

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "attention_bias": True,
    "mlp_bias": True,
}
PROGRAM = build_program(spec_from_config(CONFIG))
# Instructions: 0 EMBED; per layer QKV, ATTENTION, o, gate_up, down; 11 HEAD.
QKV, ATTENTION, OUT, GATE_UP, DOWN, HEAD = 1, 2, 3, 4, 5, 11


def with_values(number: int, **values: float) -> Program:
    item = PROGRAM.instructions[number]
    return with_item(number, Instruction(item.opcode, item.phase, {**item.values, **values}))


def with_item(number: int, item: Instruction) -> Program:
    items = list(PROGRAM.instructions)
    items[number] = item
    return seal(replace(PROGRAM, instructions=tuple(items)))


def with_phase(number: int, phase: int) -> Program:
    return with_item(number, replace(PROGRAM.instructions[number], phase=phase))


def reordered(*order: int) -> Program:
    phases = [item.phase for item in PROGRAM.instructions]
    items = [replace(PROGRAM.instructions[source], phase=phases[at]) for at, source in enumerate(order)]
    return seal(replace(PROGRAM, instructions=tuple(items)))


def with_weight(number: int, **changes: object) -> Program:
    weights = list(PROGRAM.weights)
    weights[number] = replace(weights[number], **changes)
    return seal(replace(PROGRAM, weights=tuple(weights)))


def with_buffer(number: int, **changes: object) -> Program:
    buffers = list(PROGRAM.buffers)
    buffers[number] = replace(buffers[number], **changes)
    return seal(replace(PROGRAM, buffers=tuple(buffers)))


def index_of(name: str) -> int:
    return next(weight.index for weight in PROGRAM.weights if weight.name == name)


GATE_UP_WEIGHT = index_of("layers.0.gate_up")
Q0 = PROGRAM.instructions[QKV].integer("q_out")
Q1 = PROGRAM.instructions[QKV + 5].integer("q_out")
MIXED0 = PROGRAM.instructions[ATTENTION].integer("out")
GATED0 = PROGRAM.instructions[GATE_UP].integer("out")
X = PROGRAM.instructions[0].integer("out")


def without_field() -> Program:
    item = PROGRAM.instructions[OUT]
    return with_item(OUT, replace(item, values={k: v for k, v in item.values.items() if k != "bias"}))


MUTANTS: dict[str, tuple[str, Callable[[], Program]]] = {
    "weight at another index": ("table", lambda: with_weight(3, index=4)),
    "unknown weight kind": ("table", lambda: with_weight(3, kind="tensor")),
    "weight without rows": ("table", lambda: with_weight(0, n=0)),
    "odd inputs": ("table", lambda: with_weight(0, k=65)),
    "vector of two columns": ("table", lambda: with_weight(index_of("final_norm"), k=2)),
    "parts that do not add up": ("table", lambda: with_weight(0, parts=(Part("embed", 319),))),
    "part without rows": ("table", lambda: with_weight(0, parts=(Part("embed", 320), Part("none", 0)))),
    "rotary table with parts": ("table", lambda: with_weight(1, parts=(Part("rope", 512),))),
    "unknown interleave": ("table", lambda: with_weight(GATE_UP_WEIGHT, interleave=8)),
    "uneven interleaved parts": (
        "table",
        lambda: with_weight(GATE_UP_WEIGHT, parts=(Part("layers.0.gate", 80), Part("layers.0.up", 112))),
    ),
    "role twice": ("table", lambda: with_weight(index_of("final_norm"), parts=(Part("layers.0.mlp_norm", 64),))),
    "weight name twice": ("table", lambda: with_weight(1, name="embed")),
    "buffer at another index": ("table", lambda: with_buffer(0, index=1)),
    "buffer of odd width": ("table", lambda: with_buffer(0, width=65)),
    "buffer name twice": ("table", lambda: with_buffer(1, name="x")),
    "missing field": ("arity", without_field),
    "extra field": ("arity", lambda: with_values(OUT, layer=0)),
    "unknown opcode": ("arity", lambda: with_item(OUT, replace(PROGRAM.instructions[OUT], opcode=99))),
    "negative phase": ("range", lambda: with_phase(0, -1)),
    "weight out of table": ("range", lambda: with_values(OUT, weight=len(PROGRAM.weights))),
    "weight left out": ("range", lambda: with_values(OUT, weight=NONE)),
    "buffer out of table": ("range", lambda: with_values(OUT, input=len(PROGRAM.buffers))),
    "buffer left out": ("range", lambda: with_values(OUT, input=NONE)),
    "no heads": ("range", lambda: with_values(ATTENTION, heads=0)),
    "layer of another model": ("range", lambda: with_values(ATTENTION, layer=2)),
    "negative window": ("range", lambda: with_values(ATTENTION, window=-1)),
    "unknown norm": ("range", lambda: with_values(QKV, norm=4)),
    "unknown epilogue": ("range", lambda: with_values(OUT, epilogue=3)),
    "epsilon of zero": ("range", lambda: with_values(QKV, norm_eps=0.0)),
    "scale that is no number": ("range", lambda: with_values(ATTENTION, scale=float("nan"))),
    "fractional count": ("range", lambda: with_values(OUT, k=64.0)),
    "count of 33 bits": ("range", lambda: with_values(OUT, k=2**32)),
    "weight of another shape": ("shape", lambda: with_values(OUT, weight=index_of("layers.0.down"))),
    "vector as matrix": ("shape", lambda: with_values(OUT, weight=index_of("final_norm"))),
    "bias of another product": ("shape", lambda: with_values(OUT, bias=index_of("layers.0.qkv_bias"))),
    "buffer of another width": ("shape", lambda: with_values(OUT, input=GATED0)),
    "norm weight without norm": ("shape", lambda: with_values(QKV, norm=Norm.NONE)),
    "gate without interleave": ("shape", lambda: with_weight(GATE_UP_WEIGHT, interleave=0)),
    "wide store of gate and up": ("shape", lambda: with_values(GATE_UP, epilogue=Epilogue.STORE)),
    "rotary table as matrix": ("shape", lambda: with_values(QKV, rope=index_of("layers.0.qkv"))),
    "rotary table of another head": ("shape", lambda: with_weight(1, k=64)),
    "heads that do not divide": ("shape", lambda: with_values(ATTENTION, kv_heads=3)),
    "vocabulary of another model": ("shape", lambda: with_values(HEAD, vocab=304)),
    "falling phases": ("order", lambda: with_phase(ATTENTION, 0)),
    "no head": ("order", lambda: seal(replace(PROGRAM, instructions=PROGRAM.instructions[:-1]))),
    "head before the end": ("order", lambda: reordered(*range(10), 11, 10)),
    "no instructions": ("order", lambda: seal(replace(PROGRAM, instructions=()))),
    "unused weight": ("order", lambda: with_values(OUT, bias=NONE)),
    "result that nobody reads": ("order", lambda: with_values(OUT + 5, input=MIXED0)),
    "read before write": ("read", lambda: reordered(0, 1, 3, 2, *range(4, 12))),
    "read of the next layer's result": ("read", lambda: with_values(OUT, input=Q1)),
    "two in one phase": ("phase", lambda: with_phase(OUT, PROGRAM.instructions[GATE_UP].phase)),
    "reader in its writer's phase": ("phase", lambda: with_phase(ATTENTION, PROGRAM.instructions[QKV].phase)),
    "input is the output": ("phase", lambda: with_values(ATTENTION, out=Q0)),
    "two updates in one phase": ("phase", lambda: with_phase(DOWN, PROGRAM.instructions[QKV + 5].phase)),
    "layer appended twice": ("kv", lambda: with_values(QKV + 5, layer=0)),
    "layer read before it is appended": ("kv", lambda: with_values(ATTENTION, layer=1)),
    "layer read in the phase that appends it": (
        "kv",
        lambda: with_phase(ATTENTION, PROGRAM.instructions[QKV].phase),
    ),
    "layer read in another shape": ("kv", lambda: with_values(ATTENTION, kv_heads=4)),
    "queries of another layer": ("kv", lambda: with_values(ATTENTION + 5, q=Q0)),
    "digest of other content": ("digest", lambda: replace(PROGRAM, digest="0" * 64)),
}


def test_program_of_the_family_is_sound() -> None:
    assert faults(PROGRAM) == []
    verify(PROGRAM)


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_mutant_is_caught_by_its_rule(name: str) -> None:
    rule, mutate = MUTANTS[name]

    found = faults(mutate())

    assert rule in {fault.rule for fault in found}, [str(fault) for fault in found]


def test_every_rule_has_a_mutant() -> None:
    rules = {"table", "arity", "range", "shape", "order", "read", "phase", "kv", "digest"}

    assert {rule for rule, _ in MUTANTS.values()} == rules


def test_verify_raises_with_rule_place_and_reason() -> None:
    with pytest.raises(ProgramError, match=r"kv: instruction 2 \(ATTENTION\): layer 1") as caught:
        verify(with_values(ATTENTION, layer=1))

    assert caught.value.fault.rule == "kv"


def touched(item: Instruction) -> set[int]:
    seen = effect(item)
    return {*seen.reads, *seen.updates, *seen.writes}


@given(data=st.data())
@settings(max_examples=400, deadline=None)
def test_changed_field_is_never_unseen(data: st.DataObject) -> None:
    number = data.draw(st.integers(0, len(PROGRAM.instructions) - 1))
    item = PROGRAM.instructions[number]
    # A scale, an epsilon, a cap and a window are free to be other numbers; all else is tied to something.
    free = {"scale", "norm_eps", "qk_norm_eps", "softcap", "window"}
    name = data.draw(st.sampled_from([field.name for field in FIELDS[item.opcode] if field.name not in free]))
    value = data.draw(st.integers(-3, 40) | st.sampled_from([64, 96, 128, 192, 256, 320, 2**31, -(2**31)]))
    assume(value != item.values[name])

    found = faults(with_values(number, **{name: value}))

    if not found:
        # What is left are programs of the same shape that compute something else: they must touch the same memory.
        changed = with_values(number, **{name: value}).instructions[number]
        assert touched(changed) == touched(item)
        assert name in {"norm", "norm_weight", "epilogue", "activation", "rope", "domain", "types"} or name.endswith(
            "weight"
        )


@given(st.permutations(range(len(PROGRAM.instructions))))
@settings(max_examples=200, deadline=None)
def test_reordered_program_is_caught(order: list[int]) -> None:
    assume(list(order) != sorted(order))

    assert faults(reordered(*order))


@given(st.lists(st.integers(0, 12), min_size=12, max_size=12))
@settings(max_examples=200, deadline=None)
def test_phases_that_join_a_chain_are_caught(phases: list[int]) -> None:
    phases = sorted(phases)
    assume(len(set(phases)) < len(phases))
    items = tuple(replace(item, phase=phase) for item, phase in zip(PROGRAM.instructions, phases, strict=True))

    # Each instruction of a Llama program needs the one before it, so no two may share a phase.
    assert faults(seal(replace(PROGRAM, instructions=items)))


# The lowered form

ENCODED = encode(PROGRAM, 7)


def with_record(number: int, **values: float) -> Encoded:
    start = number * RECORD_BYTES
    opcode, phase, fields = unpack_record(ENCODED.records[start : start + RECORD_BYTES])
    record = pack_record(opcode, phase, **{**fields, **values})
    return replace(ENCODED, records=ENCODED.records[:start] + record + ENCODED.records[start + RECORD_BYTES :])


def moved(buffer: int, offset: int) -> Encoded:
    """The lowering with one buffer at another place, consistently in all records."""
    encoded = ENCODED
    for number, item in enumerate(PROGRAM.instructions):
        start = number * RECORD_BYTES
        opcode, phase, fields = unpack_record(encoded.records[start : start + RECORD_BYTES])
        for field in FIELDS[opcode]:
            if field.type == "buffer" and item.integer(field.name) == buffer:
                fields[field.name] = offset
        record = pack_record(opcode, phase, **fields)
        records = encoded.records[:start] + record + encoded.records[start + RECORD_BYTES :]
        encoded = replace(encoded, records=records)
    return encoded


def offset_of(buffer: int) -> int:
    return ENCODED.buffer(PROGRAM.buffers[buffer].name).offset


def test_lowering_is_sound_for_any_number_of_rows() -> None:
    for rows in (1, 2, 7, 64, 513):
        verify_encoded(PROGRAM, encode(PROGRAM, rows))


def test_buffers_of_later_layers_reuse_memory() -> None:
    deep = build_program(spec_from_config({**CONFIG, "num_hidden_layers": 40}))

    assert encode(deep, 16).arena_bytes == encode(PROGRAM, 16).arena_bytes


def test_lowered_records_read_back_as_the_program() -> None:
    for number, item in enumerate(PROGRAM.instructions):
        opcode, phase, fields = unpack_record(ENCODED.records[number * RECORD_BYTES : (number + 1) * RECORD_BYTES])

        assert (opcode, phase) == (item.opcode, item.phase)
        for field in FIELDS[opcode]:
            if field.type in ("i32", "weight"):
                assert fields[field.name] == item.values[field.name]


@pytest.mark.parametrize(
    ("rule", "encoded"),
    [
        pytest.param("arena", replace(ENCODED, records=ENCODED.records[:-RECORD_BYTES]), id="a record short"),
        pytest.param("arena", replace(ENCODED, arena_bytes=ENCODED.arena_bytes - 64), id="arena too small"),
        pytest.param("arena", with_record(OUT, weight=0), id="another weight"),
        pytest.param("arena", with_record(ATTENTION, scale=0.5), id="another scale"),
        pytest.param("arena", with_record(OUT, input=offset_of(Q0)), id="buffer in two places"),
        pytest.param("arena", moved(GATED0, offset_of(GATED0) + 32), id="unaligned"),
        pytest.param("arena", moved(GATED0, -64), id="before the arena"),
        pytest.param("aliasing", moved(GATED0, offset_of(X)), id="gate over the residual"),
        pytest.param("aliasing", moved(MIXED0, offset_of(Q0)), id="output over its input"),
        pytest.param("aliasing", moved(MIXED0, offset_of(Q0) + 64), id="output a little over its input"),
    ],
)
def test_unsound_lowering_is_caught_by_its_rule(rule: str, encoded: Encoded) -> None:
    assert rule in {fault.rule for fault in encoded_faults(PROGRAM, encoded)}


@given(buffer=st.integers(0, len(PROGRAM.buffers) - 1), line=st.integers(-2, ENCODED.arena_bytes // 64 + 2))
@settings(max_examples=300, deadline=None)
def test_moved_buffer_passes_only_where_it_disturbs_nothing(buffer: int, line: int) -> None:
    encoded = moved(buffer, line * 64)

    found = encoded_faults(PROGRAM, encoded)

    def extent(index: int, offset: int) -> range:
        return range(offset, offset + 7 * PROGRAM.buffers[index].width * 4)

    def phases(index: int) -> range:
        touching = [item.phase for item in PROGRAM.instructions if index in touched(item)]
        return range(min(touching), max(touching) + 1)

    mine = extent(buffer, line * 64)
    clashes = [
        other
        for other in range(len(PROGRAM.buffers))
        if other != buffer
        and max(mine.start, extent(other, offset_of(other)).start)
        < min(mine.stop, extent(other, offset_of(other)).stop)
        and max(phases(buffer).start, phases(other).start) < min(phases(buffer).stop, phases(other).stop)
    ]
    is_inside = mine.start >= 0 and mine.stop <= ENCODED.arena_bytes
    assert bool(found) == (bool(clashes) or not is_inside)


def test_opcode_numbers_are_stable() -> None:
    assert {opcode.name: int(opcode) for opcode in Opcode} == {
        "EMBED": 1,
        "LINEAR": 2,
        "QKV": 3,
        "ATTENTION": 4,
        "HEAD": 5,
        "NORM": 6,
        "MOE": 7,
        "POOL": 8,
        "PREPARE": 9,
        "ROTATE": 10,
        "GATE": 11,
        "PICK": 12,
    }
