"""What the VM refuses: at construction whatever a record could do wrong, at a step whatever an input could."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from headrace.base.errors import MachineError, ModelFormatError
from headrace.kernels import vm
from headrace.program.opcodes import Epilogue, KvType, Layout, Norm, Opcode, Pooling
from headrace.program.records import OUTPUT_DTYPE
from headrace.testing.lone_op import plain_record

from .conftest import Weight, floats, matrix

VOCAB, WIDTH, ROWS, ARENA = 40, 64, 8, 1 << 16
KV = vm.KvConfig(KvType.BF16, 1, 1, 32, 4)

EMBED: dict[str, Any] = {"table": 0, "out": 0, "width": WIDTH, "scale": 1.0}
LINEAR: dict[str, Any] = {
    "weight": 1, "bias": -1, "input": 0, "out": 4096, "k": WIDTH, "n": 96, "norm": Norm.RMS, "norm_weight": 2,
    "norm_eps": 1e-5, "epilogue": Epilogue.STORE,
}  # fmt: skip
QKV: dict[str, Any] = {
    "weight": 3, "bias": -1, "input": 0, "q_out": 8192, "k": WIDTH, "heads": 1, "kv_heads": 1, "head_size": 32,
    "rope": 4, "rotary_size": 32,
}  # fmt: skip
ATTENTION: dict[str, Any] = {
    "q": 8192, "out": 16384, "heads": 1, "kv_heads": 1, "head_size": 32, "layer": 0, "scale": 1.0, "window": 0,
    "softcap": 0.0,
}  # fmt: skip
HEAD: dict[str, Any] = {
    "weight": 0, "input": 0, "k": WIDTH, "vocab": VOCAB, "norm": Norm.RMS, "norm_weight": 2, "norm_eps": 1e-5,
    "scale": 1.0, "softcap": 0.0,
}  # fmt: skip
NORM: dict[str, Any] = {"input": 0, "out": 4096, "k": WIDTH, "norm": Norm.LAYER}
MOE: dict[str, Any] = {
    "input": 0, "out": 0, "router": 5, "gate_up": 6, "down": 7, "k": WIDTH, "hidden": 32, "experts": 3, "top_k": 2,
    "is_renormalised": 1,
}  # fmt: skip
POOL: dict[str, Any] = {"input": 0, "out": 4096, "k": WIDTH, "pooling": Pooling.MEAN}
PREPARE: dict[str, Any] = {"weight": 1, "input": 0, "out": 20480, "k": WIDTH}
ROTATE: dict[str, Any] = {
    "q": 4096, "keys": 0, "values": 0, "q_out": 8192, "heads": 1, "kv_heads": 1, "head_size": 32, "rope": 4,
    "rotary_size": 32,
}  # fmt: skip
GATE: dict[str, Any] = {"gate": 0, "up": 4096, "out": 8192, "width": WIDTH}
PICK: dict[str, Any] = {"input": 0, "out": 4096, "k": WIDTH}
FIELDS = {
    Opcode.EMBED: EMBED,
    Opcode.LINEAR: LINEAR,
    Opcode.QKV: QKV,
    Opcode.ATTENTION: ATTENTION,
    Opcode.HEAD: HEAD,
    Opcode.NORM: NORM,
    Opcode.MOE: MOE,
    Opcode.POOL: POOL,
    Opcode.PREPARE: PREPARE,
    Opcode.ROTATE: ROTATE,
    Opcode.GATE: GATE,
    Opcode.PICK: PICK,
}


def _weights() -> list[Weight]:
    zeros = np.zeros
    return [
        matrix(zeros((VOCAB, WIDTH), np.float32), Layout.F32),
        matrix(zeros((96, WIDTH), np.float32), Layout.Q8),
        floats(zeros(WIDTH, np.float32)),
        matrix(zeros((96, WIDTH), np.float32), Layout.BF16),
        floats(zeros((100, 32), np.float32), Layout.ROPE_F32),
        matrix(zeros((3, WIDTH), np.float32), Layout.BF16),
        matrix(zeros((3 * 64, WIDTH), np.float32), Layout.Q8),
        matrix(zeros((3 * WIDTH, 32), np.float32), Layout.Q8),
    ]


def _make(program: bytes, weights: list[Weight] | None = None, **changes: Any) -> vm.Vm:
    options: dict[str, Any] = {
        "threads": 1,
        "max_rows": ROWS,
        "kv": KV,
        "isa": "scalar",
        "max_top": 4,
        "max_sequences": 4,
    }
    options |= changes
    return vm.Vm(program, options.pop("arena_bytes", ARENA), _weights() if weights is None else weights, **options)


def _program(changed: Opcode | None = None, **changes: Any) -> bytes:
    return b"".join(
        plain_record(opcode, phase, **(fields | (changes if opcode is changed else {})))
        for phase, (opcode, fields) in enumerate(FIELDS.items())
    )


def test_the_unchanged_program_is_accepted() -> None:
    machine = _make(_program())

    assert machine.max_positions == 100
    assert machine.kv_bytes == 4 * 2 * 32 * 32 * 2
    assert machine.scratch_bytes > 0


BAD_RECORDS = [
    (Opcode.EMBED, {"table": 15}, "weight 15"),
    (Opcode.EMBED, {"positions": 2}, "not a matrix"),
    (Opcode.EMBED, {"positions": 99}, "positions"),
    (Opcode.EMBED, {"positions": 1, "position_offset": 96}, "position_offset"),
    (Opcode.EMBED, {"positions": 1, "position_offset": -1}, "position_offset"),
    (Opcode.EMBED, {"table": -1}, "weight -1"),
    (Opcode.EMBED, {"table": 2, "width": 0}, "not a matrix"),
    (Opcode.EMBED, {"width": 96}, "40 x 64"),
    (Opcode.EMBED, {"out": 4}, "multiple of 64"),
    (Opcode.EMBED, {"out": -64}, "multiple of 64"),
    (Opcode.EMBED, {"out": ARENA - 64}, "outside the arena"),
    (Opcode.EMBED, {"out": 2**62}, "outside the arena"),
    (Opcode.LINEAR, {"n": 97}, "96 x 64"),
    (Opcode.LINEAR, {"k": 32}, "96 x 64"),
    (Opcode.LINEAR, {"bias": 2}, "64 elements"),
    (Opcode.LINEAR, {"bias": 1}, "not a vector"),
    (Opcode.LINEAR, {"norm": 7}, "norm 7"),
    (Opcode.LINEAR, {"norm_weight": 99}, "99"),
    (Opcode.LINEAR, {"norm_eps": float("nan")}, "norm_eps"),
    (Opcode.LINEAR, {"epilogue": 9}, "epilogue 9"),
    (Opcode.LINEAR, {"activation": 6}, "activation 6"),
    (Opcode.LINEAR, {"norm_bias": 2}, "norm_bias"),
    (Opcode.LINEAR, {"out": ARENA - 96 * 4 * ROWS + 64}, "outside the arena"),
    (Opcode.QKV, {"heads": 2}, "128 x 64"),
    (Opcode.QKV, {"heads": 0}, "positive"),
    (Opcode.QKV, {"kv_heads": 3}, "kv_heads"),
    (Opcode.QKV, {"head_size": 64}, "head_size"),
    (Opcode.QKV, {"rope": 2}, "rotation"),
    (Opcode.QKV, {"rope": 50}, "rope"),
    (Opcode.QKV, {"rotary_size": 30}, "30 elements"),
    (Opcode.QKV, {"q_norm": 2}, "64 elements"),
    (Opcode.QKV, {"k_norm": 1}, "not a vector"),
    (Opcode.QKV, {"k_norm": 4, "qk_norm_eps": -1.0}, "vector"),
    (Opcode.QKV, {"qk_norm_eps": -1.0}, "qk_norm_eps"),
    (Opcode.QKV, {"layer": 1}, "layer 1"),
    (Opcode.QKV, {"layer": -2}, "layer -2"),
    (Opcode.ATTENTION, {"window": -1}, "window"),
    (Opcode.ATTENTION, {"scale": float("inf")}, "scale"),
    (Opcode.ATTENTION, {"out": ARENA}, "outside the arena"),
    (Opcode.HEAD, {"vocab": VOCAB + 1}, "40 x 64"),
    (Opcode.HEAD, {"softcap": -1.0}, "softcap"),
    (Opcode.NORM, {"out": 0}, "out is the input"),
    (Opcode.NORM, {"k": 48}, "multiple of 32"),
    (Opcode.NORM, {"epilogue": Epilogue.GLU}, "epilogue 2"),
    (Opcode.NORM, {"norm": 4}, "norm 4"),
    (Opcode.NORM, {"norm": Norm.PREPARED}, "for LINEAR only"),
    (Opcode.LINEAR, {"norm": Norm.PREPARED, "norm_weight": -1}, "not been prepared"),
    (Opcode.HEAD, {"weight": -1}, "without a weight"),
    (Opcode.HEAD, {"weight": -1, "k": VOCAB}, "no norm"),
    (Opcode.MOE, {"top_k": 4}, "3 experts"),
    (Opcode.MOE, {"top_k": 0}, "top_k"),
    (Opcode.MOE, {"experts": 4}, "3 x 64"),
    (Opcode.MOE, {"hidden": 64}, "192 x 64"),
    (Opcode.MOE, {"down": 6}, "192 x 64"),
    (Opcode.MOE, {"router": 2}, "not a matrix"),
    (Opcode.MOE, {"out": ARENA}, "outside the arena"),
    (Opcode.MOE, {"activation": -1}, "activation"),
    (Opcode.POOL, {"pooling": 3}, "pooling 3"),
    (Opcode.POOL, {"out": 0}, "out is the input"),
    (Opcode.POOL, {"k": 16}, "multiple of 32"),
    (Opcode.ATTENTION, {"is_bidirectional": 1}, "is_bidirectional"),
    (Opcode.EMBED, {"types": 2}, "not a matrix"),
    (Opcode.LINEAR, {"domain": 3}, "domain 3"),
    (Opcode.PREPARE, {"weight": 2}, "not a matrix"),
    (Opcode.PREPARE, {"k": 32}, "96 x 64"),
    (Opcode.PREPARE, {"out": 0}, "out is the input"),
    (Opcode.PREPARE, {"out": ARENA - (2 * WIDTH + 128) * 4 * ROWS + 64}, "outside the arena"),
    (Opcode.PREPARE, {"domain": 3}, "domain 3"),
    (Opcode.ROTATE, {"values": -1}, "both"),
    (Opcode.ROTATE, {"keys": ARENA}, "outside the arena"),
    (Opcode.ROTATE, {"q_out": 4096}, "q_out is q"),
    (Opcode.ROTATE, {"kv_heads": 3}, "kv_heads"),
    (Opcode.ROTATE, {"rotary_size": 30}, "30 elements"),
    (Opcode.ROTATE, {"layer": 1}, "layer 1"),
    (Opcode.GATE, {"width": 8}, "multiple of 16"),
    (Opcode.GATE, {"up": ARENA}, "outside the arena"),
    (Opcode.GATE, {"activation": 6}, "activation 6"),
    (Opcode.PICK, {"out": 0}, "out is the input"),
    (Opcode.PICK, {"k": 0}, "positive"),
]


@pytest.mark.parametrize(("opcode", "changes", "words"), BAD_RECORDS, ids=[f"{o.name}-{c}" for o, c, _ in BAD_RECORDS])
def test_a_wrong_record_is_refused_by_name(opcode: Opcode, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelFormatError, match=rf"record {list(FIELDS).index(opcode)} .*{words}"):
        _make(_program(opcode, **changes))


def _unknown_opcode() -> bytes:
    return (77).to_bytes(4, "little").ljust(128, b"\0")


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (b"", "no records"),
        (b"\0" * 127, "128-byte"),
        (_unknown_opcode(), "opcode 77"),
        (plain_record(Opcode.EMBED, 1, **EMBED) + plain_record(Opcode.EMBED, 0, **EMBED), "phases"),
    ],
    ids=["empty", "torn", "opcode", "phases"],
)
def test_a_wrong_program_is_refused(program: bytes, words: str) -> None:
    with pytest.raises(ModelFormatError, match=words):
        _make(program)


def test_a_gated_product_needs_whole_pairs_of_tiles() -> None:
    weights = [*_weights(), matrix(np.zeros((48, WIDTH), np.float32), Layout.F32)]

    with pytest.raises(ModelFormatError, match="n in 32s"):
        _make(plain_record(Opcode.LINEAR, 0, **(LINEAR | {"weight": 8, "n": 48, "epilogue": Epilogue.GLU})), weights)


@pytest.mark.parametrize(
    "changes",
    [
        {"threads": 0},
        {"threads": 10_000},
        {"max_rows": 0},
        {"max_sequences": ROWS + 1},
        {"max_outputs": 0},
        {"max_top": 257},
        {"arena_bytes": -1},
        {"arena_bytes": 1 << 50},
        {"kv": vm.KvConfig(KvType.BF16, 1, 1, 48, 4)},
        {"kv": vm.KvConfig(KvType.BF16, 1, 0, 32, 4)},
        {"kv": vm.KvConfig(KvType.BF16, 1, 1, 32, -4)},
        {"kv": vm.KvConfig(KvType.BF16, 65536, 1, 4096, 1 << 25)},
    ],
    ids=str,
)
def test_a_limit_out_of_range_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ModelFormatError):
        _make(plain_record(Opcode.EMBED, 0, **EMBED), **changes)


@pytest.mark.parametrize(
    "weight",
    [
        Weight(Layout.F32, VOCAB, WIDTH, vm.aligned_empty(100)),
        Weight(Layout.F32, -1, WIDTH, vm.aligned_empty(0)),
        Weight(Layout.F32, 2**40, WIDTH, vm.aligned_empty(0)),
        Weight(Layout.Q8, 16, 33, vm.aligned_empty(544)),
        Weight(Layout.VECTOR_F32, 16, 0, vm.aligned_empty(128)[4:68]),
    ],
    ids=["short", "negative", "huge", "k", "misaligned"],
)
def test_a_wrong_weight_is_refused(weight: Weight) -> None:
    with pytest.raises(ModelFormatError, match="weight 8"):
        _make(_program(), [*_weights(), weight])


def test_an_unknown_instruction_set_is_named() -> None:
    with pytest.raises(MachineError, match="sse2"):
        _make(_program(), isa="sse2")


def _i32(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def _output(**changes: Any) -> np.ndarray:
    row = np.zeros(1, dtype=OUTPUT_DTYPE)
    row["top_p"], row["repetition"], row["num_logprobs"], row["target"], row["mask"] = 1, 1, -1, -1, -1
    for name, value in changes.items():
        row[name] = value
    return row


def _step() -> dict[str, Any]:
    """Two sequences: positions 31..32 over a page border, and a first token."""
    return {
        "tokens": _i32(1, 2, 3),
        "positions": _i32(31, 32, 0),
        "seq_starts": _i32(0, 2, 3),
        "block_tables": np.array([[0, 1], [2, -1]], dtype=np.int32),
        "outputs": _output(row=1, position=33),
    }


@pytest.fixture(scope="module")
def machine() -> vm.Vm:
    """The small program with every opcode."""
    return _make(_program())


def test_a_good_step_runs(machine: vm.Vm) -> None:
    results, top_ids, top_logprobs = machine.step(**_step())

    assert results["status"].tolist() == [0]
    assert top_ids.shape == top_logprobs.shape == (1, 4)


BAD_STEPS: list[tuple[str, dict[str, Any]]] = [
    ("token id -1", {"tokens": _i32(1, -1, 3)}),
    ("token_types", {"token_types": _i32(0)}),
    ("token type 1", {"token_types": _i32(0, 1, 0)}),
    ("token id 40", {"tokens": _i32(1, 40, 3)}),
    ("rows", {"tokens": _i32(), "positions": _i32(), "seq_starts": _i32(0, 0)}),
    ("9 rows", {"tokens": _i32(*[0] * 9), "positions": _i32(*range(9)), "seq_starts": _i32(0, 9)}),
    ("positions", {"positions": _i32(31, 32)}),
    ("rise by one", {"positions": _i32(31, 33, 0)}),
    ("negative", {"positions": _i32(31, 32, -1)}),
    ("limit is 100", {"positions": _i32(99, 100, 0), "block_tables": np.zeros((2, 4), np.int32)}),
    ("seq_starts", {"seq_starts": _i32(0)}),
    ("seq_starts", {"seq_starts": _i32(0, 2, 4)}),
    ("seq_starts", {"seq_starts": _i32(1, 2, 3)}),
    ("rows 0 to 0", {"seq_starts": _i32(0, 0, 3)}),
    ("rows", {"seq_starts": _i32(0, 5, 3)}),
    ("block -1", {"block_tables": np.array([[0, -1], [2, 0]], np.int32)}),
    ("block 4", {"block_tables": np.array([[0, 4], [2, 0]], np.int32)}),
    ("its table has 1", {"block_tables": np.array([[0], [2]], np.int32)}),
    ("block_tables", {"block_tables": np.array([[0, 1]], np.int32)}),
    ("dtype", {"tokens": np.array([1, 2, 3], np.int64)}),
    ("OUTPUT_DTYPE", {"outputs": np.zeros(1, np.int32)}),
    ("outputs", {"outputs": np.repeat(_output(), 9)}),
    ("masks", {"masks": np.zeros((1, 1), np.uint32)}),
    ("counts", {"count_ids": _i32(1)}),
    ("bias_values", {"bias_ids": _i32(1)}),
    ("num_records", {"num_records": len(FIELDS) + 1}),
    ("num_records", {"num_records": -2}),
    ("row", {"outputs": _output(row=3)}),
    ("row", {"outputs": _output(row=-1)}),
    ("top_k", {"outputs": _output(top_k=-1)}),
    ("temperature", {"outputs": _output(temperature=-1)}),
    ("temperature", {"outputs": _output(temperature=np.nan)}),
    ("top_p", {"outputs": _output(top_p=0)}),
    ("top_p", {"outputs": _output(top_p=1.5)}),
    ("min_p", {"outputs": _output(min_p=2)}),
    ("repetition", {"outputs": _output(repetition=0)}),
    ("presence", {"outputs": _output(presence=np.inf)}),
    ("frequency", {"outputs": _output(frequency=np.nan)}),
    ("num_logprobs", {"outputs": _output(num_logprobs=5)}),
    ("target", {"outputs": _output(target=40)}),
    ("mask", {"outputs": _output(mask=0)}),
    ("count_ids", {"outputs": _output(counts_len=1)}),
    ("count_ids", {"outputs": _output(counts_start=2**31 - 1, counts_len=2**31 - 1)}),
    ("rise", {"outputs": _output(counts_len=2), "count_ids": _i32(3, 3), "counts": _i32(1, 1)}),
    ("below 40", {"outputs": _output(bias_len=1), "bias_ids": _i32(40), "bias_values": np.ones(1, np.float32)}),
]


@pytest.mark.parametrize(("words", "changes"), BAD_STEPS, ids=[f"{i}-{w}" for i, (w, _) in enumerate(BAD_STEPS)])
def test_a_wrong_step_is_refused_before_it_runs(machine: vm.Vm, words: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=words):
        machine.step(**(_step() | changes))


def test_reads_outside_the_arena_are_refused(machine: vm.Vm) -> None:
    reads: list[Callable[[], object]] = [
        lambda: machine.read_buffer(ARENA, 1, 1),
        lambda: machine.read_buffer(-4, 1, 1),
        lambda: machine.read_keys(0, 4, 0),
        lambda: machine.read_values(0, 0, 1),
    ]

    for read in reads:
        with pytest.raises(ValueError, match=r"outside|no such"):
            read()
