"""EMBED and LINEAR against numpy, and the determinism contract of products."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.kernels import vm
from headrace.program.opcodes import GROUP, Activation, Epilogue, KvType, Layout, Norm, Opcode
from headrace.program.rowwise import activate, quantise
from headrace.testing.lone_op import plain_record

from .conftest import MATRIX_LAYOUTS, Product, matrix, no_outputs, unpacked

ISAS = vm.available_isas()
SHAPES = [(1, 32), (15, 96), (16, 64), (17, 32), (100, 576), (33, 1536)]


def _bf16(x: NDArray[np.float32]) -> NDArray[np.float32]:
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


def _activations(layout: Layout, x: NDArray[np.float32]) -> NDArray[np.float64]:
    """What the product sees of its input."""
    if layout in (Layout.F32, Layout.F16):
        return x.astype(np.float64)
    if layout is Layout.BF16:
        return _bf16(x).astype(np.float64)
    total = np.zeros((len(x), x.shape[1] // GROUP, GROUP))
    for term in quantise(x):
        values = term.integers.reshape(total.shape) * term.scales[:, :, None].astype(np.float64)
        total += np.where(term.is_present[:, :, None], values, 0.0)
    return total.reshape(x.shape)


def _rows(rng: np.random.Generator, rows: int, k: int) -> NDArray[np.float32]:
    """Random rows of which some groups stand out, so that they have second terms: different ones in each row."""
    x = rng.standard_normal((rows, k // GROUP, GROUP), dtype=np.float32)
    x[rng.random((rows, k // GROUP)) < 0.2] *= 6
    return x.reshape(rows, k)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("layout", MATRIX_LAYOUTS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_linear_is_the_product_of_what_it_sees(
    isa: str, layout: Layout, n: int, k: int, rng: np.random.Generator, product: Callable[..., Product]
) -> None:
    x = _rows(rng, 19, k)
    weight = matrix(rng.standard_normal((n, k), dtype=np.float32), layout)

    got = product(x, weight).run(isa, threads=2)

    a, w = _activations(layout, x), unpacked(weight).astype(np.float64)
    # k fused additions, each within half an ulp of the partial sum, which the sum of magnitudes bounds.
    bound = k * 2.0**-23 * (np.abs(a) @ np.abs(w).T)
    assert (np.abs(got - a @ w.T) <= bound).all()


@pytest.mark.parametrize("isa", ISAS)
def test_f16_weights_give_the_products_of_the_same_numbers_in_f32(
    isa: str, rng: np.random.Generator, product: Callable[..., Product]
) -> None:
    x, values = _rows(rng, 19, 96), rng.standard_normal((100, 96), dtype=np.float32).astype(np.float16)
    values[0, :6] = [0.0, -0.0, 2**-24, -(2**-15), 65504, -65504]

    narrow, wide = (
        product(x, matrix(values.astype(np.float32), layout)).run(isa) for layout in (Layout.F16, Layout.F32)
    )

    np.testing.assert_array_equal(narrow, wide)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("layout", [Layout.Q8, Layout.Q4, Layout.Q4M])
def test_integer_products_are_exact(
    isa: str, layout: Layout, rng: np.random.Generator, product: Callable[..., Product]
) -> None:
    # Every group of weights and inputs reaches its largest magnitude, so all scales are 1 and all values integers.
    n, k = 50, 320
    low, high = {Layout.Q8: (-127, 127), Layout.Q4: (-8, 7), Layout.Q4M: (0, 15)}[layout]
    w = rng.integers(low, high + 1, (n, k)).astype(np.float32)
    x = rng.integers(-127, 128, (70, k)).astype(np.float32)
    w[:, ::32], w[:, 1::32], x[:, ::32] = low, high, 127
    w[-1], x[-1] = low, -127  # all extremes at once
    w[-1, 1::32] = high

    got = product(x, matrix(w, layout)).run(isa)

    assert np.array_equal(got, x @ w.T)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("layout", MATRIX_LAYOUTS)
def test_a_row_is_the_same_in_any_company(
    isa: str, layout: Layout, rng: np.random.Generator, product: Callable[..., Product]
) -> None:
    x = _rows(rng, 300, 192)
    weight = matrix(rng.standard_normal((45, 192), dtype=np.float32), layout)
    case = product(x, weight, norm=Norm.RMS)

    together = case.run(isa, threads=2)

    for count in (1, 2, 3, 4, 5, 7, 8, 9, 16, 33, 270):
        rows = rng.permutation(300)[:count].astype(np.int32)
        for threads in (1, 2, 3):
            assert np.array_equal(case.run(isa, threads=threads, rows=rows), together[rows]), (count, threads)


@pytest.mark.parametrize("layout", MATRIX_LAYOUTS)
@pytest.mark.parametrize("epilogue", list(Epilogue))
def test_instruction_sets_agree_bit_for_bit(
    layout: Layout, epilogue: Epilogue, rng: np.random.Generator, product: Callable[..., Product]
) -> None:
    x = _rows(rng, 23, 256)
    case = product(
        x,
        matrix(rng.standard_normal((96, 256), dtype=np.float32), layout),
        bias=rng.standard_normal(96, dtype=np.float32),
        norm=Norm.RMS,
        norm_weight=rng.standard_normal(256, dtype=np.float32),
        epilogue=epilogue,
    )

    exact = [isa for isa in ISAS if not (isa == "avx512bf16" and layout is Layout.BF16)]
    results = [case.run(isa) for isa in exact]

    assert all(np.array_equal(results[0], result) for result in results)


@pytest.mark.parametrize("isa", ISAS)
def test_add_epilogue_accumulates(isa: str, rng: np.random.Generator, product: Callable[..., Product]) -> None:
    x, weight = (
        rng.standard_normal((5, 64), dtype=np.float32),
        matrix(rng.standard_normal((20, 64), dtype=np.float32), Layout.F32),
    )

    once = product(x, weight, epilogue=Epilogue.STORE).run(isa)
    twice = product(x, weight, epilogue=Epilogue.ADD, repeats=2).run(isa)

    assert np.array_equal(twice, 2 * once)


@pytest.mark.parametrize("isa", ISAS)
def test_norm_bias_and_store(isa: str, rng: np.random.Generator, product: Callable[..., Product]) -> None:
    x, norm_weight = rng.standard_normal((5, 64), dtype=np.float32), rng.standard_normal(64, dtype=np.float32)
    w, bias = rng.standard_normal((20, 64), dtype=np.float32), rng.standard_normal(20, dtype=np.float32)

    got = product(x, matrix(w, Layout.F32), bias=bias, norm=Norm.RMS, norm_weight=norm_weight).run(isa)

    normed = x / np.sqrt((x.astype(np.float64) ** 2).mean(1, keepdims=True) + 1e-5) * norm_weight
    assert np.allclose(got, normed @ w.T.astype(np.float64) + bias, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("isa", ISAS)
def test_gated_epilogue_pairs_tiles_of_sixteen(
    isa: str, rng: np.random.Generator, product: Callable[..., Product]
) -> None:
    x = 3 * rng.standard_normal((6, 64), dtype=np.float32)
    gate, up = rng.standard_normal((48, 64), dtype=np.float32), rng.standard_normal((48, 64), dtype=np.float32)
    both = np.concatenate([gate.reshape(3, 1, 16, 64), up.reshape(3, 1, 16, 64)], axis=1).reshape(96, 64)

    got = product(x, matrix(both, Layout.F32), epilogue=Epilogue.GLU, activation=Activation.SILU).run(isa)

    g, u = x.astype(np.float64) @ gate.T, x.astype(np.float64) @ up.T
    assert np.allclose(got, g / (1 + np.exp(-g)) * u, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("activation", list(Activation))
def test_activation_of_every_element_is_the_reference_s(
    isa: str, activation: Activation, product: Callable[..., Product]
) -> None:
    # The identity passes the numbers on: every kind of magnitude, both tails, and what is no number.
    x = np.concatenate([np.linspace(-20, 20, 2043), [1e-30, -1e-30, 300, -300, np.inf]]).astype(np.float32)
    rows = x.reshape(64, 32)
    rows[-1] = np.where(np.isfinite(rows[-1]), rows[-1], np.float32(0))

    got = product(rows, matrix(np.eye(32, dtype=np.float32), Layout.F32), activation=activation).run(isa)

    assert np.array_equal(got, activate(activation, rows))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "plain"])
def test_layer_norm_is_that_of_float64(
    isa: str, has_bias: bool, rng: np.random.Generator, product: Callable[..., Product]
) -> None:
    x = rng.standard_normal((5, 96), dtype=np.float32) * 2 + 7
    weight, bias = rng.standard_normal((2, 96), dtype=np.float32)
    w = rng.standard_normal((20, 96), dtype=np.float32)

    got = product(
        x, matrix(w, Layout.F32), norm=Norm.LAYER, norm_weight=weight, norm_bias=bias if has_bias else None
    ).run(isa)

    centred = x - x.astype(np.float64).mean(1, keepdims=True)
    normed = centred / np.sqrt((centred**2).mean(1, keepdims=True) + 1e-5) * weight + (bias if has_bias else 0)
    assert np.allclose(got, normed @ w.T.astype(np.float64), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("layout", MATRIX_LAYOUTS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_bad_row_spoils_itself_and_no_other(
    isa: str, layout: Layout, bad: float, rng: np.random.Generator, product: Callable[..., Product]
) -> None:
    x = rng.standard_normal((6, 96), dtype=np.float32)
    weight = matrix(rng.standard_normal((20, 96), dtype=np.float32), layout)
    good = product(x, weight).run(isa)
    x[2, 40] = bad

    got = product(x, weight).run(isa)

    assert not np.isfinite(got[2]).any()
    assert np.array_equal(np.delete(got, 2, 0), np.delete(good, 2, 0))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("layout", MATRIX_LAYOUTS)
@pytest.mark.parametrize("tiny", [0.0, 1e-42, 1e-37])
def test_tiny_inputs_stay_finite(
    isa: str, layout: Layout, tiny: float, rng: np.random.Generator, product: Callable[..., Product]
) -> None:
    x = np.full((3, 64), tiny, dtype=np.float32)

    got = product(x, matrix(rng.standard_normal((20, 64), dtype=np.float32), layout)).run(isa)

    assert np.abs(got).max() <= 1e-34


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("layout", MATRIX_LAYOUTS)
def test_embed_gives_the_scaled_numbers_of_the_table(isa: str, layout: Layout, rng: np.random.Generator) -> None:
    table = matrix(rng.standard_normal((37, 160), dtype=np.float32), layout)
    program = plain_record(Opcode.EMBED, 0, table=0, out=64, width=160, scale=1.75)
    machine = vm.Vm(
        program, 64 + 41 * 640, [table], threads=3, max_rows=41, isa=isa, kv=vm.KvConfig(KvType.F32, 1, 1, 32, 1)
    )
    tokens = rng.integers(0, 37, 41).astype(np.int32)

    machine.step(
        tokens, np.arange(41, dtype=np.int32), np.array([0, 41], np.int32), np.zeros((1, 0), np.int32), no_outputs()
    )

    assert np.array_equal(machine.read_buffer(64, 41, 160), unpacked(table)[tokens] * np.float32(1.75))
