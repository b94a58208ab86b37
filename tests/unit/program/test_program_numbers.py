"""The arithmetic that the reference is built from: single rounding, bf16, packed layouts, sampling, cost."""

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.program import sampling
from headrace.program.cost import Work, instruction_cost, layout_bytes, limit_s, step_cost
from headrace.program.lanes import (
    bf16_bits,
    bf16_values,
    exp,
    fma,
    gelu_erf,
    gelu_tanh,
    reduce_add,
    relu,
    round_bf16,
    silu,
    soft_cap,
)
from headrace.program.layouts import Numbers, pack, unpack
from headrace.program.opcodes import KvType, Layout, Opcode, Pooling
from headrace.program.rowwise import layer_norm, pool, quantise, rms_norm, route
from headrace.program.spec import build_program, spec_from_config
from headrace.testing.random_builder import Wanted, random_program

FINITE = st.floats(-1e6, 1e6, width=32, allow_subnormal=False)
NONE = np.zeros((0, 0), np.float32)


def nearest(exact: Fraction) -> np.float32:
    """The float32 nearest to an exact number, ties to even."""
    about = np.float32(float(exact))
    around = [about, np.nextafter(about, np.float32(np.inf)), np.nextafter(about, np.float32(-np.inf))]
    return min(around, key=lambda value: (abs(Fraction(float(value)) - exact), int(value.view(np.int32)) & 1))


@given(FINITE, FINITE, FINITE)
@settings(max_examples=500)
def test_fma_rounds_once(a: float, b: float, c: float) -> None:
    exact = Fraction(a) * Fraction(b) + Fraction(c)

    if abs(exact) > Fraction(2) ** -126 or exact == 0:
        assert fma(np.float32(a), np.float32(b), np.float32(c)) == nearest(exact)


def test_fma_rounds_once_where_float64_lands_on_a_tie() -> None:
    # 1 + 2⁻²⁴ is a tie of float32; 2⁻⁶⁰ above or below it decides, and float64 has lost that.
    one = np.float32(1)
    tiny = np.float32(2.0**-60)

    above = fma(np.float32(2.0**-24), one + np.float32(2.0**-23), one)
    below = fma(np.float32(2.0**-24), one - np.float32(2.0**-24), one)

    assert above == np.float32(1 + 2.0**-23)
    assert below == one
    assert fma(tiny, tiny, np.float32(1 + 2.0**-23)) == np.float32(1 + 2.0**-23)


def test_bf16_rounds_to_nearest_even_and_keeps_nan() -> None:
    values = np.array([1.0, 1 + 2.0**-8, 1 + 3 * 2.0**-8, -1 - 2.0**-8, np.inf, np.nan, 3.4e38], np.float32)

    rounded = round_bf16(values)

    np.testing.assert_array_equal(rounded, np.array([1, 1, 1 + 2.0**-6, -1, np.inf, np.nan, np.inf], np.float32))
    np.testing.assert_array_equal(bf16_bits(bf16_values(bf16_bits(values))), bf16_bits(values))


def test_exponential_is_within_its_bound() -> None:
    x = np.linspace(-87.2, 88.7, 20001, dtype=np.float32)

    relative = exp(x).astype(np.float64) / np.exp(x.astype(np.float64)) - 1

    assert np.abs(relative).max() < 2**-22
    np.testing.assert_array_equal(
        exp(np.array([-np.inf, -88.0, np.inf, 89.0, np.nan, 0.0], np.float32)), [0, 0, np.inf, np.inf, np.nan, 1]
    )


def test_silu_and_cap_are_what_they_are_called() -> None:
    x = np.linspace(-20, 20, 401, dtype=np.float32)

    np.testing.assert_allclose(silu(x), x / (1 + np.exp(-x.astype(np.float64))), rtol=2**-20, atol=1e-12)
    np.testing.assert_allclose(soft_cap(x, 5.0), 5 * np.tanh(x.astype(np.float64) / 5), atol=5 * 2**-21)
    np.testing.assert_array_equal(soft_cap(x, 0.0), x)


def normal_below(x: np.ndarray) -> np.ndarray:
    """Φ(x) to float64, by its complement at negative x."""
    return np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in x])


def ulps(ours: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Distance in units in the last place of float32, for results that are normal numbers."""
    is_normal = np.abs(exact) > 2.0**-120
    unit = np.spacing(np.abs(exact[is_normal]).astype(np.float32)).astype(np.float64)
    return np.abs(ours[is_normal].astype(np.float64) - exact[is_normal]) / unit


GELU_POINTS = np.concatenate(
    [np.linspace(-12.9, 12.9, 30001), -np.logspace(-6, 1.1, 20001), np.random.default_rng(0).normal(0, 1, 20000)]
).astype(np.float32)


def test_gelu_is_within_six_units_in_the_last_place() -> None:
    x = GELU_POINTS.astype(np.float64)

    assert ulps(gelu_erf(GELU_POINTS), x * normal_below(x)).max() <= 6


def test_gelu_by_tanh_is_within_four_units_in_the_last_place() -> None:
    x = GELU_POINTS.astype(np.float64)

    exact = x / (1 + np.exp(-2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    assert ulps(gelu_tanh(GELU_POINTS), exact).max() <= 4


@pytest.mark.parametrize("function", [gelu_erf, gelu_tanh, relu, silu])
def test_activations_far_out_are_the_identity_or_nothing_and_keep_not_a_number(function: Any) -> None:
    with np.errstate(invalid="ignore"):
        y = function(np.array([200.0, np.inf, -200.0, 0.0, np.nan], np.float32))

    np.testing.assert_array_equal(y, [200, np.inf, 0, 0, np.nan])


def test_layer_norm_centres_and_divides_by_the_deviation() -> None:
    random = np.random.default_rng(3)
    x = (random.standard_normal((4, 96)) * 3 + 50).astype(np.float32)
    weight, bias = random.standard_normal((2, 96)).astype(np.float32)
    wide = x.astype(np.float64)

    centred = wide - wide.mean(1, keepdims=True)
    exact = centred / np.sqrt((centred**2).mean(1, keepdims=True) + 1e-5) * weight + bias

    # The mean of 96 numbers near 50 carries about ten roundings of 2⁻²⁴ · 50; the deviation is 3.
    np.testing.assert_allclose(layer_norm(x, weight, bias, 1e-5), exact, atol=2e-5)


def test_route_takes_the_largest_and_of_equal_ones_the_first() -> None:
    logits = np.log(np.array([[4, 8, 4, 8, 1], [1, 1, 1, 1, 1]], np.float32))

    ids, shares = route(logits, 3, is_renormalised=False)
    _, renormalised = route(logits, 3, is_renormalised=True)

    assert ids.tolist() == [[0, 1, 3], [0, 1, 2]]
    np.testing.assert_allclose(shares, [[4 / 25, 8 / 25, 8 / 25], [0.2, 0.2, 0.2]], rtol=1e-6)
    np.testing.assert_allclose(renormalised, [[0.2, 0.4, 0.4], [1 / 3, 1 / 3, 1 / 3]], rtol=1e-6)


def test_row_without_numbers_is_routed_somewhere_and_stays_without() -> None:
    logits = np.array([[0, np.nan, 1, 2], [0, 1, np.inf, 2], [0, 1, 2, 3]], np.float32)

    ids, shares = route(logits, 2, is_renormalised=True)

    assert ids.tolist() == [[0, 1], [0, 1], [2, 3]]
    assert np.isnan(shares[:2]).all()
    assert np.isfinite(shares[2]).all()


@pytest.mark.parametrize("is_normalised", [True, False], ids=["length 1", "as it is"])
@pytest.mark.parametrize("pooling", list(Pooling))
def test_pool_gives_first_mean_or_last(pooling: Pooling, is_normalised: bool) -> None:
    rows = np.random.default_rng(0).standard_normal((5, 64)).astype(np.float32)

    wanted = {Pooling.FIRST: rows[0], Pooling.MEAN: rows.astype(np.float64).mean(0), Pooling.LAST: rows[4]}[pooling]
    wanted = wanted / np.linalg.norm(wanted) if is_normalised else wanted

    np.testing.assert_allclose(pool(rows, pooling, is_normalised), wanted, rtol=1e-5, atol=1e-6)


def test_pool_of_nothing_is_nothing_and_of_not_a_number_not_a_number() -> None:
    zeros = np.zeros((2, 32), np.float32)
    bad = np.full((2, 32), np.nan, np.float32)

    assert not pool(zeros, Pooling.MEAN, is_normalised=True).any()
    assert np.isnan(pool(bad, Pooling.MEAN, is_normalised=True)).all()


def test_lanes_are_summed_in_the_fixed_tree() -> None:
    lanes = np.array([2.0**24, 1, 0, 0, 0, 0, 0, 0, -(2.0**24), 1, 0, 0, 0, 0, 0, 0], np.float32)

    assert reduce_add(lanes) == 2


def test_rms_norm_divides_by_the_root_mean_square() -> None:
    rows = np.random.default_rng(0).standard_normal((5, 96)).astype(np.float32)
    weight = np.linspace(0.5, 2, 96, dtype=np.float32)

    normed = rms_norm(rows, weight, 1e-5)

    wide = rows.astype(np.float64)
    np.testing.assert_allclose(
        normed, wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-5) * weight, rtol=8 * 2**-23
    )


def test_quantised_activations_reach_127_in_every_group() -> None:
    rows = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)
    rows[1, :32] = 0

    q, _ = quantise(rows)

    assert q.scales.shape == (3, 2)
    assert q.is_present.all()
    np.testing.assert_array_equal(np.abs(q.integers).reshape(3, 2, 32).max(2), [[127, 127], [0, 127], [127, 127]])
    np.testing.assert_array_equal(q.integers.reshape(3, 2, 32).sum(2), q.sums)
    assert np.abs(q.integers * np.repeat(q.scales, 32, 1) - rows).max() <= np.abs(rows).max() / 254 * (1 + 2**-20)


def test_group_with_an_outlier_has_a_second_term_that_halves_its_step_254_times() -> None:
    rows = np.random.default_rng(0).standard_normal((2, 128)).astype(np.float32)
    rows[0, 40] = 50

    first, second = quantise(rows)

    # The outlier's group is over 1.5 times the mean of the row's maxima; no group of the quiet row is.
    np.testing.assert_array_equal(second.is_present, [[False, True, False, False], [False] * 4])
    assert np.abs(second.integers).max() <= 127
    both = first.integers * np.repeat(first.scales, 32, 1) + second.integers * np.repeat(second.scales, 32, 1)
    # Half a step of the second term: 50 / 127 / 254 / 2; and single-precision rounding of x · 127 / amax.
    assert np.abs(both - rows)[0, 32:64].max() <= 50 / 127 / 254 / 2 + 50 * 2**-22


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_group_that_is_not_finite_poisons_its_row(bad: float) -> None:
    rows = np.ones((2, 64), np.float32)
    rows[0, 40] = bad

    q, second = quantise(rows)

    assert np.isnan(q.scales[0, 1])
    assert np.isfinite(q.scales[1]).all()
    assert not second.is_present.any()


@pytest.mark.parametrize(("n", "k"), [(1, 32), (16, 64), (37, 96)])
@pytest.mark.parametrize("layout", [Layout.F32, Layout.BF16, Layout.F16, Layout.Q8, Layout.Q4, Layout.Q4M])
def test_packed_numbers_read_back(layout: Layout, n: int, k: int) -> None:
    random = np.random.default_rng(n)
    low, high = {Layout.Q8: (-128, 128), Layout.Q4: (-8, 8), Layout.Q4M: (0, 16)}.get(layout, (0, 0))
    values = random.integers(low, high, (n, k)) if high else round_bf16(random.standard_normal((n, k)))
    halves = random.standard_normal((2, n, k // 32)).astype(np.float16).astype(np.float32)
    scales = halves[0] if high else NONE
    mins = halves[1] if layout is Layout.Q4M else NONE
    numbers = Numbers(layout, values.astype(np.float32), scales, mins)

    data = pack(numbers)
    back = unpack(layout, data, n, k)

    assert len(data) == layout_bytes(layout, n, k)
    np.testing.assert_array_equal(back.values, numbers.values)
    np.testing.assert_array_equal(back.scales, numbers.scales)
    np.testing.assert_array_equal(back.mins, numbers.mins)


def test_layout_bytes_are_the_ones_of_the_definition() -> None:
    # One tile of sixteen columns, one group of 32: opcodes.Layout gives 544, 288 and 320 bytes.
    assert [layout_bytes(layout, 16, 32) for layout in (Layout.Q8, Layout.Q4, Layout.Q4M)] == [544, 288, 320]


# Sampling

ROW = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 7, "position": 3}


def test_uniform_numbers_are_philox_4x32_10() -> None:
    # Known answer of the Random123 distribution: key and counter zero.
    block = sampling._philox((0, 0), (0, 0, 0, 0))

    assert [f"{word:08x}" for word in block] == ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]
    values = [sampling.uniform(seed, position) for seed in (0, 2**64 - 1) for position in range(1000)]
    assert 0 <= min(values) < 0.01
    assert 0.99 < max(values) < 1
    assert abs(np.mean(values) - 0.5) < 0.03


def test_no_temperature_takes_the_first_of_the_best() -> None:
    assert sampling.choose(np.array([1, 3, 3, 2], np.float32), {**ROW, "temperature": 0.0}) == 1


def draws(keys: np.ndarray, **row: float) -> np.ndarray:
    return np.array([sampling.choose(keys, {**ROW, **row, "position": position}) for position in range(3000)])


def test_draws_follow_the_softmax() -> None:
    keys = np.log(np.array([0.5, 0.25, 0.15, 0.1], np.float32))

    shares = np.bincount(draws(keys), minlength=4) / 3000

    # Four standard deviations of a share of 3000 draws are at most 4 · √(0.25 / 3000) = 0.037.
    np.testing.assert_allclose(shares, [0.5, 0.25, 0.15, 0.1], atol=0.037)


@pytest.mark.parametrize(
    ("row", "kept"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.7}, {0, 1}),
        ({"top_p": 0.76}, {0, 1, 2}),
        ({"min_p": 0.4}, {0, 1}),
        ({"top_k": 3, "top_p": 0.8}, {0, 1}),
        ({"top_p": 1e-9}, {0}),
    ],
)
def test_filters_keep_what_they_say(row: dict[str, float], kept: set[int]) -> None:
    keys = np.log(np.array([0.5, 0.25, 0.15, 0.1], np.float32))

    assert set(draws(keys, **row).tolist()) == kept


def test_penalties_bias_and_mask_change_the_keys_in_order() -> None:
    logits = np.array([2, -2, 1, 1, 0], np.float32)
    row = {"repetition": 2.0, "frequency": 0.5, "presence": 0.25}
    allowed = np.array([True, True, True, True, False])

    keys = sampling.modified(logits, row, [(0, 2), (1, -1), (2, 0)], [(2, 5.0)], allowed)

    # Id 0: 2/2 − 2·0.5 − 0.25. Id 1 stands in the prompt only: −2·2. Id 2: no penalty, bias.
    np.testing.assert_array_equal(keys, np.array([-0.25, -4, 6, 1, -np.inf], np.float32))
    np.testing.assert_array_equal(logits, np.array([2, -2, 1, 1, 0], np.float32))


def test_nothing_allowed_chooses_nothing() -> None:
    assert sampling.choose(np.full(4, -np.inf, np.float32), ROW) == -1


# Cost

CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
CONFIG |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 320}
CONFIG |= {"max_position_embeddings": 512, "tie_word_embeddings": True}


def test_cost_of_a_step_counts_every_weight_once() -> None:
    program = build_program(spec_from_config(CONFIG))
    layouts = {
        weight.index: Layout.BF16 if weight.kind == "matrix" else Layout.VECTOR_F32 for weight in program.weights
    }

    one = step_cost(program, layouts, KvType.BF16, Work(1, 1, [100]))
    eight = step_cost(program, layouts, KvType.BF16, Work(8, 8, [100] * 8))

    per_layer = 64 * (128 + 2 * 64) + 128 * 64 + 64 * 192 + 96 * 64
    matrices = 2 * (2 * per_layer + 320 * 64)  # bf16
    vectors = 4 * (2 * 2 * 64 + 64)
    assert one.weight_bytes == matrices + vectors + 2 * 64  # and the token's row of the embedding
    assert eight.weight_bytes == one.weight_bytes + 7 * 2 * 64
    assert eight.operations == 8 * one.operations
    assert one.kv_bytes == 2 * 2 * (2 * 32) * 2 * (100 + 1)  # layers · K and V · values · bytes · (read and appended)


def test_cost_of_experts_reads_only_those_that_the_rows_may_take() -> None:
    program = random_program(np.random.default_rng(7), Wanted(has_experts=True, layers=1))
    item = next(item for item in program.instructions if item.opcode is Opcode.MOE)
    layouts = {
        weight.index: Layout.BF16 if weight.kind == "matrix" else Layout.VECTOR_F32 for weight in program.weights
    }
    k, hidden, experts, top_k = (item.integer(name) for name in ("k", "hidden", "experts", "top_k"))
    assert experts > 2 * top_k

    one, two, many = (
        instruction_cost(program, item, layouts, KvType.BF16, Work(rows, 1, [1] * rows)) for rows in (1, 2, 500)
    )

    expert_bytes = 3 * hidden * k * 2  # gate, up and down in bf16
    assert two.weight_bytes - one.weight_bytes == top_k * expert_bytes
    assert many.weight_bytes - one.weight_bytes == (experts - top_k) * expert_bytes
    assert two.operations == 2 * one.operations == 4 * (experts * k + 3 * top_k * hidden * k)


def test_cost_of_attention_stops_at_the_window() -> None:
    mistral = {**CONFIG, "architectures": ["MistralForCausalLM"], "sliding_window": 64}
    program = build_program(spec_from_config(mistral))
    item = next(item for item in program.instructions if item.opcode is Opcode.ATTENTION)

    short = instruction_cost(program, item, {}, KvType.F32, Work(1, 1, [64]))
    long = instruction_cost(program, item, {}, KvType.F32, Work(1, 1, [500]))

    assert short == long


def test_the_limit_is_whichever_takes_longer_of_moving_and_computing() -> None:
    assert limit_s(100e6, 1e9, bandwidth=50e9, peak=1e12) == 2e-3
    assert limit_s(100e6, 10e9, bandwidth=50e9, peak=1e12) == 10e-3
