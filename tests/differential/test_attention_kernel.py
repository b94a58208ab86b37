"""ATTENTION against a float64 softmax, and the promise that a row's bits depend on nothing but the row."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.kernels.vm import available_isas, best_isa
from headrace.program.opcodes import BLOCK_TOKENS, KvType
from headrace.testing.lone_op import F32, LoneAttention, Rows

SLICE_TOKENS = 512


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    head_size: int

    @property
    def width(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_size


def random_table(shape: Shape, tokens: int, seed: int = 0) -> F32:
    return np.random.default_rng(seed).standard_normal((tokens, shape.width)).astype(np.float32)


def bf16(values: F32) -> F32:
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


def expected(
    shape: Shape,
    table: F32,
    tokens: range,
    first: int,
    *,
    is_bf16: bool,
    window: int = 0,
    softcap: float = 0.0,
    scale: float | None = None,
) -> NDArray[np.float64]:
    """Returns attention of positions first … of a sequence, [rows, H, D], in float64 from the stored numbers."""
    numbers = table[np.asarray(tokens)].reshape(len(tokens), -1, shape.head_size)
    numbers = (bf16(np.ascontiguousarray(numbers)) if is_bf16 else numbers).astype(np.float64)
    q, k, v = np.split(numbers, [shape.heads, shape.heads + shape.kv_heads], axis=1)
    group = shape.heads // shape.kv_heads
    scores = np.einsum("rhd,thd->hrt", q[first:], np.repeat(k, group, axis=1))
    scores = scores * (shape.head_size**-0.5 if scale is None else scale)
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    row, token = np.arange(first, len(tokens))[:, None], np.arange(len(tokens))
    hidden = (token > row) | ((token <= row - window) if window else False)
    scores = np.where(hidden, -np.inf, scores)
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    weights /= weights.sum(axis=2, keepdims=True)
    result: NDArray[np.float64] = np.einsum("hrt,thd->rhd", weights, np.repeat(v, group, axis=1))
    return result


def blocks_for(tokens: int, first: int = 0) -> range:
    return range(first, first + -(-tokens // BLOCK_TOKENS))


SHAPES = [
    pytest.param(Shape(heads, kv_heads, size), id=f"{heads}q{kv_heads}kv{size}")
    for heads, kv_heads, size in [
        (1, 1, 32),
        (3, 3, 64),
        (4, 2, 32),
        (9, 3, 64),
        (4, 1, 96),
        (5, 1, 64),
        (6, 1, 32),
        (7, 1, 128),
        (8, 1, 64),
        (2, 1, 256),
    ]
]
# f32: scores of unit-variance numbers, D ≤ 256 sums of rounding 2^-24 each; a few 1e-6. bf16: weights are rounded to
# 2^-9 relative, so a mean of values of size 4 is off by at most 4 · 2^-9.
TOLERANCE = {KvType.F32: 2e-5, KvType.BF16: 4 * 2**-9}


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("kv_type", list(KvType), ids=lambda kind: kind.name)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_ragged_batch_agrees_with_a_float64_softmax(shape: Shape, kv_type: KvType, isa: str) -> None:
    lengths = [1, 31, 32, 33, 65]
    table = random_table(shape, sum(lengths))
    vm = LoneAttention(
        table, heads=shape.heads, kv_heads=shape.kv_heads, head_size=shape.head_size, kv_type=kv_type, isa=isa
    )
    starts = np.cumsum([0, *lengths])
    batch = [Rows(range(starts[i], starts[i + 1]), 0, blocks_for(n, 8 * i)) for i, n in enumerate(lengths)]

    got = vm.step(batch)

    for rows, result in zip(batch, got, strict=True):
        tokens = range(rows.tokens[0], rows.tokens[-1] + 1)
        want = expected(shape, table, tokens, 0, is_bf16=kv_type is KvType.BF16)
        assert np.abs(result - want).max() < TOLERANCE[kv_type]


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("kv_type", list(KvType), ids=lambda kind: kind.name)
@pytest.mark.parametrize(("window", "softcap", "scale"), [(40, 0.0, 0.1), (0, 3.0, None), (7, 50.0, 1 / 12)])
@pytest.mark.parametrize("shape", [Shape(4, 2, 96), Shape(2, 1, 160), Shape(4, 1, 256), Shape(8, 2, 128)], ids=str)
def test_windows_caps_and_scales_hold_for_every_head_size(
    shape: Shape, window: int, softcap: float, scale: float | None, kv_type: KvType, isa: str
) -> None:
    table = random_table(shape, 96)
    options = {"window": window, "softcap": softcap, "scale": scale}
    vm = LoneAttention(
        table, heads=shape.heads, kv_heads=shape.kv_heads, head_size=shape.head_size, kv_type=kv_type, isa=isa,
        **options,
    )  # fmt: skip

    parts = [vm.step([Rows(range(at, stop), at, blocks_for(96))])[0] for at, stop in ((0, 60), (60, 61), (61, 96))]

    want = expected(shape, table, range(96), 0, is_bf16=kv_type is KvType.BF16, **options)
    assert np.abs(np.concatenate(parts) - want).max() < TOLERANCE[kv_type]


@pytest.mark.parametrize("kv_type", list(KvType), ids=lambda kind: kind.name)
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (1, 0.0), (32, 0.0), (513, 0.0), (100, 2.0)])
def test_long_contexts_windows_and_caps_agree_with_a_float64_softmax(
    window: int, softcap: float, kv_type: KvType
) -> None:
    shape = Shape(3, 1, 64)
    table = random_table(shape, 2000)
    vm = LoneAttention(
        table, heads=3, kv_heads=1, head_size=64, kv_type=kv_type, window=window, softcap=softcap, blocks=80,
        isa=best_isa(), max_rows=400, threads=2,
    )  # fmt: skip

    parts = [vm.step([Rows(range(at, at + 400), at, blocks_for(2000))])[0] for at in range(0, 2000, 400)]

    is_bf16 = kv_type is KvType.BF16
    want = expected(shape, table, range(2000), 0, is_bf16=is_bf16, window=window, softcap=softcap)
    assert np.abs(np.concatenate(parts) - want).max() < TOLERANCE[kv_type]


def run_in_chunks(
    table: F32, shape: Shape, cuts: list[int], *, threads: int, kv_type: KvType, isa: str, window: int = 0
) -> F32:
    vm = LoneAttention(
        table, heads=shape.heads, kv_heads=shape.kv_heads, head_size=shape.head_size, kv_type=kv_type, isa=isa,
        threads=threads, blocks=64, max_rows=1100, window=window,
    )  # fmt: skip
    blocks = blocks_for(cuts[-1])
    return np.concatenate([vm.step([Rows(range(a, b), a, blocks)])[0] for a, b in itertools.pairwise(cuts)])


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("window", [0, 70])
@pytest.mark.parametrize("kv_type", list(KvType), ids=lambda kind: kind.name)
def test_chunking_and_threads_leave_every_bit_alone(kv_type: KvType, window: int, isa: str) -> None:
    shape = Shape(6, 2, 32)
    is_slow = isa == "scalar"
    length = 560 if is_slow else 1100
    table = random_table(shape, length)
    chunkings = [[0, length], [0, 1, 2, 35, 64, 511, 512, 513, length], [*range(0, length, 97), length]]

    runs = [
        run_in_chunks(table, shape, cuts, threads=threads, kv_type=kv_type, isa=isa, window=window)
        for cuts in chunkings
        for threads in ((1, 2) if is_slow else (1, 2, 3))
    ]

    for run in runs[1:]:
        np.testing.assert_array_equal(run, runs[0])


@pytest.mark.parametrize("kv_type", list(KvType), ids=lambda kind: kind.name)
def test_a_lone_long_decode_row_divided_between_threads_keeps_its_bits(kv_type: KvType) -> None:
    shape = Shape(9, 3, 64)
    table = random_table(shape, 2048)
    outcomes = []
    for threads in (1, 2, 3, 5, 8):
        vm = LoneAttention(
            table, heads=9, kv_heads=3, head_size=64, kv_type=kv_type, isa=best_isa(), threads=threads, blocks=64,
            max_rows=2047,
        )  # fmt: skip
        vm.step([Rows(range(2047), 0, range(64))])
        outcomes.append(vm.step([Rows([2047], 2047, range(64))])[0])

    for outcome in outcomes[1:]:
        np.testing.assert_array_equal(outcome, outcomes[0])


def test_batch_mates_leave_every_bit_alone() -> None:
    shape = Shape(6, 2, 64)
    table = random_table(shape, 1400)

    def decode(batch: list[Rows], threads: int) -> list[F32]:
        vm = LoneAttention(
            table, heads=6, kv_heads=2, head_size=64, kv_type=KvType.BF16, isa=best_isa(), threads=threads,
            blocks=128, max_rows=700,
        )  # fmt: skip
        for rows in batch:
            vm.step([Rows(range(rows.tokens[0] - rows.start, rows.tokens[0]), 0, rows.blocks)])
        return vm.step(batch)

    long = Rows([650], 650, blocks_for(660))
    mates = [Rows([670 + i], i + 1, blocks_for(10, 30 + i)) for i in range(7)]
    chunk = Rows(range(1200, 1330), 500, blocks_for(630, 60))

    alone = decode([long], 1)[0]
    together = decode([mates[0], long, *mates[1:], chunk], 2)[1]
    last = decode([chunk, *mates, long], 3)[-1]

    np.testing.assert_array_equal(together, alone)
    np.testing.assert_array_equal(last, alone)


@pytest.mark.parametrize("kv_type", list(KvType), ids=lambda kind: kind.name)
@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("length", [1, 2, 31, 33, 47, 64])
def test_what_an_earlier_owner_left_in_a_page_is_never_seen(length: int, isa: str, kv_type: KvType) -> None:
    shape = Shape(4, 2, 32)
    table = random_table(shape, 129)
    table[128] = np.nan

    def run(is_dirty: bool) -> F32:
        vm = LoneAttention(table, heads=4, kv_heads=2, head_size=32, kv_type=kv_type, isa=isa, blocks=4)
        if is_dirty:
            vm.step([Rows([128] * 96, 0, [0, 1, 2])])
        prompt = vm.step([Rows(range(length), 0, [1, 2, 0])])[0]
        return np.concatenate([prompt, vm.step([Rows([100, 101, 102], length, [1, 2, 0])])[0]])

    dirty, clean = run(True), run(False)

    assert np.isfinite(clean).all()
    np.testing.assert_array_equal(dirty, clean)


def test_positions_behind_the_window_are_never_seen_even_when_not_a_number() -> None:
    shape = Shape(2, 1, 32)
    table = random_table(shape, 101)
    table[100] = np.nan
    vm = LoneAttention(table, heads=2, kv_heads=1, head_size=32, kv_type=KvType.BF16, window=20, isa=best_isa())

    vm.step([Rows([100] * 41, 0, [0, 1, 2])])
    got = vm.step([Rows(range(41, 90), 41, [0, 1, 2])])[0]

    assert np.isnan(got[0]).all()  # position 41 sees 22 … 40
    assert np.isfinite(got[19:]).all()  # position 60 sees 41 … 60
    want = expected(shape, table, range(41, 90), 19, is_bf16=True, window=20)
    assert np.abs(got[19:] - want).max() < TOLERANCE[KvType.BF16]


@pytest.mark.parametrize("kv_type", list(KvType), ids=lambda kind: kind.name)
def test_a_row_that_is_not_a_number_spoils_no_earlier_row_of_its_tile(kv_type: KvType) -> None:
    shape = Shape(2, 1, 32)
    table = random_table(shape, 40)
    table[37] = np.nan
    vm = LoneAttention(table, heads=2, kv_heads=1, head_size=32, kv_type=kv_type, isa=best_isa())

    got = vm.step([Rows(range(40), 0, [0, 1])])[0]

    assert np.isfinite(got[:37]).all()
    assert np.isnan(got[37:]).all()


@pytest.mark.parametrize("kv_type", list(KvType), ids=lambda kind: kind.name)
def test_all_instruction_sets_that_share_a_definition_give_the_same_bits(kv_type: KvType) -> None:
    shape = Shape(6, 2, 32)
    table = random_table(shape, 600)
    exact = [isa for isa in available_isas() if isa != "avx512bf16"]  # whose pair product flushes denormals

    runs = [run_in_chunks(table, shape, [0, 77, 600], threads=1, kv_type=kv_type, isa=isa) for isa in exact]

    for run in runs[1:]:
        np.testing.assert_array_equal(run, runs[0])


def test_scores_that_span_hundreds_do_not_overflow() -> None:
    shape = Shape(1, 1, 32)
    table = random_table(shape, 70) * np.float32(30)
    vm = LoneAttention(table, heads=1, kv_heads=1, head_size=32, isa=best_isa())

    got = vm.step([Rows(range(70), 0, blocks_for(70))])[0]

    # Values of size 100 and scores of size 5000: an error of the score of 5000 · 2^-22 scales weights by that much.
    assert np.abs(got - expected(shape, table, range(70), 0, is_bf16=False)).max() < 100 * 5000 * 2**-20
