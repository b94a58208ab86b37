"""Packing: what is copied is copied exactly, what is quantised is within half a step, what is wrong is refused."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from headrace.base.errors import ModelFormatError
from headrace.kernels import vm
from headrace.program.layouts import unpack
from headrace.program.opcodes import Layout
from headrace.testing.tiny_blocks import encode

N, K = 35, 96  # neither a multiple of the sixteen lanes nor a power of two

GGUF_TYPES = {
    "Q8_0": gguf.GGMLQuantizationType.Q8_0,
    "Q4_0": gguf.GGMLQuantizationType.Q4_0,
    "Q4_1": gguf.GGMLQuantizationType.Q4_1,
    "Q5_0": gguf.GGMLQuantizationType.Q5_0,
    "Q5_1": gguf.GGMLQuantizationType.Q5_1,
    "Q4_K": gguf.GGMLQuantizationType.Q4_K,
    "Q5_K": gguf.GGMLQuantizationType.Q5_K,
    "Q6_K": gguf.GGMLQuantizationType.Q6_K,
}
WIDE_K = 512  # two blocks of 256
HALF_EDGES = np.array([0x0000, 0x8000, 0x0001, 0x83FF, 0x0400, 0x3C00, 0xBC00, 0x7BFF, 0xFBFF, 0x2E66], np.uint16)
"""f16: zeros, subnormals of both signs, the smallest normal, ±1, the largest of both signs, and 0.1."""


def _values(seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((N, K), dtype=np.float32)


@pytest.mark.parametrize(
    ("source", "layout"),
    [
        ("Q8_0", Layout.Q8),
        ("Q4_0", Layout.Q4),
        ("Q4_1", Layout.Q4M),
        ("Q8_0", Layout.F32),
        ("Q4_0", Layout.F32),
        ("Q4_1", Layout.F32),
    ],
)
def test_gguf_blocks_keep_their_numbers(source: str, layout: Layout) -> None:
    blocks = gguf.quants.quantize(_values(), GGUF_TYPES[source])

    packed = vm.pack(layout, source, blocks, N, K)

    assert np.array_equal(vm.unpack(layout, packed, N, K), gguf.quants.dequantize(blocks, GGUF_TYPES[source]))


def _halves_of(kind: str, blocks: np.ndarray) -> list[np.ndarray]:
    """Returns where the f16 scales (and minimums) of blocks [B, bytes] stand, as views [B, 2] of uint8."""
    starts = {"Q6_K": [208], "Q4_1": [0, 2], "Q5_1": [0, 2], "Q4_K": [0, 2], "Q5_K": [0, 2]}.get(kind, [0])
    return [blocks[:, start : start + 2] for start in starts]


def _random_blocks(kind: str, n: int, k: int, halves: np.ndarray, seed: int = 7) -> np.ndarray:
    """Returns blocks [n, row bytes] of random bits whose f16 scales and minimums are drawn from ``halves``."""
    rng = np.random.default_rng(seed)
    values, size = gguf.GGML_QUANT_SIZES[GGUF_TYPES[kind]]
    blocks = rng.integers(0, 256, (n * k // values, size), dtype=np.uint8)
    for place in _halves_of(kind, blocks):
        place[:] = rng.choice(halves, len(blocks)).view(np.uint8).reshape(-1, 2)
    # Blocks of nothing but zero bits and one bits, between the edges.
    blocks[0], blocks[1] = 0, 255
    for place in _halves_of(kind, blocks[:2]):
        place[:] = halves[-1:].view(np.uint8)
    return blocks.reshape(n, -1)


@pytest.mark.parametrize("kind", GGUF_TYPES)
def test_every_gguf_type_dequantises_bit_for_bit_as_the_reference_does(kind: str) -> None:
    blocks = _random_blocks(kind, N, WIDE_K, HALF_EDGES)
    wanted = gguf.quants.dequantize(blocks, GGUF_TYPES[kind])

    found = vm.dequantise(kind, blocks, N, WIDE_K)
    packed = vm.unpack(Layout.F32, vm.pack(Layout.F32, kind, blocks, N, WIDE_K), N, WIDE_K)

    # As bits: −0 is not 0 here.
    assert np.array_equal(found.view(np.uint32), wanted.view(np.uint32))
    assert np.array_equal(packed.view(np.uint32), wanted.view(np.uint32))


@pytest.mark.parametrize("kind", GGUF_TYPES)
def test_scales_that_are_not_numbers_stay_so(kind: str) -> None:
    blocks = _random_blocks(kind, 2, WIDE_K, np.array([0x7C00, 0xFC00, 0x7E00], np.uint16))
    with np.errstate(invalid="ignore"):
        wanted = gguf.quants.dequantize(blocks, GGUF_TYPES[kind])

    assert np.array_equal(vm.dequantise(kind, blocks, 2, WIDE_K), wanted, equal_nan=True)


# Scales as models have them: about 0.002, and 1/64 of that where they are multiplied by six bits.
@pytest.mark.parametrize(
    ("kind", "layout", "bits"),
    [
        ("Q4_0", Layout.Q8, None),
        ("Q5_0", Layout.Q8, None),
        ("Q5_1", Layout.Q8, 7),
        ("Q5_K", Layout.Q8, 7),
        ("Q6_K", Layout.Q8, 7),
    ],
)
def test_the_layout_of_a_gguf_type_holds_its_numbers(kind: str, layout: Layout, bits: int | None) -> None:
    blocks = _random_blocks(kind, N, WIDE_K, np.array([0x1000, 0x1456, 0x17FF], np.uint16))
    wanted = gguf.quants.dequantize(blocks, GGUF_TYPES[kind])

    found = vm.unpack(layout, vm.pack(layout, kind, blocks, N, WIDE_K, threads=2), N, WIDE_K)

    if bits is None:
        assert np.array_equal(found, wanted)
    else:
        # Half a step of 1/127 of the group's largest, and a scale that f16 rounds by 2^-25 where it is subnormal.
        largest = np.abs(wanted).reshape(N, -1, 32).max(-1, keepdims=True)
        gap = np.abs(found - wanted).reshape(N, -1, 32)
        assert (gap <= largest * 2.0**-bits * 0.51 + 127 * 2.0**-25).all()
        assert gap.max() > 0  # else the row of the table should say that it is exact


def test_q4_k_keeps_its_integers_and_rounds_scale_and_minimum_to_f16() -> None:
    blocks = _random_blocks("Q4_K", N, WIDE_K, np.array([0x1000, 0x1456, 0x2E66], np.uint16))

    numbers = unpack(Layout.Q4M, vm.pack(Layout.Q4M, "Q4_K", blocks, N, WIDE_K), N, WIDE_K)

    parts = blocks.reshape(-1, 144)
    units = np.ascontiguousarray(parts[:, :4]).view(np.float16).astype(np.float32)
    scales, mins = gguf.quants.Q4_K.get_scale_min(np.ascontiguousarray(parts[:, 4:16]))
    nibbles = parts[:, 16:].reshape(-1, 4, 1, 32)
    assert np.array_equal(
        numbers.values.reshape(-1, 256), np.concatenate([nibbles & 15, nibbles >> 4], 2).reshape(-1, 256)
    )
    assert np.array_equal(numbers.scales.reshape(-1, 8), (units[:, :1] * scales).astype(np.float16))
    assert np.array_equal(numbers.mins.reshape(-1, 8), (-units[:, 1:] * mins).astype(np.float16))


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K"])
def test_rows_that_split_a_block_are_refused(kind: str) -> None:
    with pytest.raises(ModelFormatError, match="block of 256"):
        vm.pack(Layout.F32, kind, np.zeros(16 * 210, np.uint8), 16, 288)


def test_q4_0_blocks_keep_their_numbers_beside_q4_1() -> None:
    blocks = gguf.quants.quantize(_values(), GGUF_TYPES["Q4_0"])

    packed = vm.pack(Layout.Q4M, "Q4_0", blocks, N, K)

    # The minimum is −8·scale: exact in f16. The sum of the two rounds once in f32.
    expected = gguf.quants.dequantize(blocks, GGUF_TYPES["Q4_0"])
    assert np.allclose(vm.unpack(Layout.Q4M, packed, N, K), expected, rtol=2**-22, atol=1e-7)


def test_q8_0_keeps_the_most_negative_integer() -> None:
    blocks = gguf.quants.quantize(_values(), GGUF_TYPES["Q8_0"])
    blocks.reshape(N, K // 32, 34)[:, :, 2:] = 0x80

    packed = vm.pack(Layout.Q8, "Q8_0", blocks, N, K)

    assert np.array_equal(vm.unpack(Layout.Q8, packed, N, K), gguf.quants.dequantize(blocks, GGUF_TYPES["Q8_0"]))


def test_f32_survives_f32() -> None:
    values = _values()

    packed = vm.pack(Layout.F32, "F32", values, N, K, threads=2)

    assert np.array_equal(vm.unpack(Layout.F32, packed, N, K), values)


@pytest.mark.parametrize("layout", [Layout.F32, Layout.BF16])
def test_bf16_survives_every_bit(layout: Layout) -> None:
    raw = np.random.default_rng(3).integers(0, 1 << 16, (N, K), dtype=np.uint16)
    raw[(raw & 0x7F80) == 0x7F80] = 0x3F80  # no NaN: they do not compare equal

    packed = vm.pack(layout, "BF16", raw, N, K)

    assert np.array_equal(vm.unpack(layout, packed, N, K), (raw.astype(np.uint32) << 16).view(np.float32))


@pytest.mark.parametrize("layout", [Layout.F32, Layout.F16])
def test_f16_survives_every_bit(layout: Layout) -> None:
    raw = np.random.default_rng(4).integers(0, 1 << 16, (N, K), dtype=np.uint16)
    raw[(raw & 0x7C00) == 0x7C00] = 1

    packed = vm.pack(layout, "F16", raw, N, K)

    assert np.array_equal(vm.unpack(layout, packed, N, K), raw.view(np.float16).astype(np.float32))


def test_f32_rounds_to_f16_nearest_even_and_refuses_what_overflows() -> None:
    values = _values()
    values[0, :4] = [1 + 2**-11, 1 + 3 * 2**-11, 65519.0, 2**-25]

    found = vm.unpack(Layout.F16, vm.pack(Layout.F16, "F32", values, N, K), N, K)

    assert np.array_equal(found, values.astype(np.float16).astype(np.float32))
    values[3, 5] = 65520.0
    with pytest.raises(ModelFormatError, match="too large for f16"):
        vm.pack(Layout.F16, "F32", values, N, K)


def test_f32_rounds_to_bf16_nearest_even() -> None:
    values = _values()
    values[0, :4] = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF], dtype=np.uint32).view(np.float32)

    packed = vm.pack(Layout.BF16, "F32", values, N, K)

    got = vm.unpack(Layout.BF16, packed, N, K).view(np.uint32) >> 16
    bits = values.view(np.uint32)
    assert list(got[0, :4]) == [0x3F80, 0x3F82, 0x3F81, 0x3F80]
    assert np.array_equal(got, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)


@pytest.mark.parametrize("source", ["F32", "BF16", "F16"])
@pytest.mark.parametrize(("layout", "steps"), [(Layout.Q8, 254), (Layout.Q4, 15)])
def test_quantising_errs_by_half_a_step(source: str, layout: Layout, steps: int) -> None:
    values = _values(5)
    if source == "BF16":
        raw = (values.view(np.uint32) >> 16).astype(np.uint16)
        values = (raw.astype(np.uint32) << 16).view(np.float32)
    elif source == "F16":
        raw = values.astype(np.float16)
        values = raw.astype(np.float32)
    else:
        raw = values

    got = vm.unpack(layout, vm.pack(layout, source, raw, N, K), N, K)

    groups = values.reshape(N, K // 32, 32)
    span = 2 * np.abs(groups).max(-1)
    # Half a step, and what f16 rounds off the scale (2^-11) over up to `steps` steps; Q4 clamps its smaller side,
    # which may cost one whole step.
    step = span / (16 if layout is Layout.Q4 else steps)
    bound = step * ((1.0 if layout is Layout.Q4 else 0.5) + steps * 2**-10)
    assert (np.abs(got - values).reshape(N, K // 32, 32).max(-1) <= bound).all()


def _range_rounded(groups: np.ndarray) -> np.ndarray:
    """Returns groups rounded to sixteen steps over their range, scale and minimum in f16."""
    low = groups.min(-1, keepdims=True).astype(np.float16).astype(np.float32)
    scale = ((groups.max(-1, keepdims=True) - groups.min(-1, keepdims=True)) / 15).astype(np.float16).astype(np.float32)
    rounded: np.ndarray = np.rint((groups - low) / scale).clip(0, 15) * scale + low
    return rounded


@pytest.mark.parametrize("source", ["F32", "F16"])
def test_q4m_errs_less_than_steps_over_the_range_do(source: str) -> None:
    values = _values(5)
    values[3] *= 1e4
    values[4, ::7] *= 10  # ends that are worth keeping
    raw = values if source == "F32" else values.astype(np.float16)
    values = np.asarray(raw, np.float32)

    found = vm.unpack(Layout.Q4M, vm.pack(Layout.Q4M, source, raw, N, K), N, K)

    groups = values.reshape(-1, 32)
    ours = ((found.reshape(-1, 32) - groups) ** 2).sum(1)
    plain = ((_range_rounded(groups) - groups) ** 2).sum(1)
    assert (ours <= plain * (1 + 1e-5)).all()
    # Normal values: a seventh less, as for ggml's search.
    assert ours[:9].sum() < 0.9 * plain[:9].sum()


def test_numbers_on_a_grid_of_sixteen_steps_come_back() -> None:
    raw = np.frombuffer(encode(_values(6), "Q4_1").data, np.uint8)
    values = vm.dequantise("Q4_1", raw, N, K)

    found = vm.unpack(Layout.Q4M, vm.pack(Layout.Q4M, "F32", values, N, K), N, K)

    assert np.array_equal(found, values)


@pytest.mark.parametrize("value", [0.0, 3.0, -65504.0])
def test_groups_of_one_value_come_back(value: float) -> None:
    values = np.full((N, K), value, np.float32)

    assert np.array_equal(vm.unpack(Layout.Q4M, vm.pack(Layout.Q4M, "F32", values, N, K), N, K), values)


@pytest.mark.parametrize("layout", [Layout.Q8, Layout.Q4, Layout.Q4M])
@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30])
def test_pack_refuses_what_no_scale_holds(layout: Layout, bad: float) -> None:
    values = _values()
    values[7, 50] = bad

    with pytest.raises(ModelFormatError, match="quantise"):
        vm.pack(layout, "F32", values, N, K)


def test_pack_with_two_threads_gives_the_same_bytes() -> None:
    values = _values()

    one = vm.pack(Layout.Q4M, "F32", values, N, K, threads=1)
    two = vm.pack(Layout.Q4M, "F32", values, N, K, threads=2)

    assert np.array_equal(one, two)


@pytest.mark.parametrize(
    ("layout", "source", "size", "n", "k"),
    [
        (Layout.Q8, "Q8_0", 33, 1, 32),
        (Layout.Q8, "Q8_0", 34, 1, 33),
        (Layout.Q8, "Q8_0", 0, 0, 32),
        (Layout.Q8, "Q2_K", 34, 1, 32),
        (Layout.VECTOR_F32, "F32", 128, 1, 32),
        (Layout.F32, "F32", 128, -1, 32),
    ],
    ids=["size", "k", "n", "source", "layout", "negative"],
)
def test_pack_refuses_a_wrong_shape(layout: Layout, source: str, size: int, n: int, k: int) -> None:
    with pytest.raises(ModelFormatError):
        vm.pack(layout, source, np.zeros(size, dtype=np.uint8), n, k)


def test_unpack_refuses_a_short_array() -> None:
    with pytest.raises(ModelFormatError, match="needs"):
        vm.unpack(Layout.Q8, np.zeros(10, dtype=np.uint8), 16, 32)
