"""Arithmetic on rows that instructions are made of: norms, quantised products, activations, routing. Twins in csrc/ops.

Every float operation is the VM's, with one rounding (``lanes``) and in the same order; integer products are exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.program.lanes import F32, exp, f32, fma, gelu_erf, gelu_tanh, reduce_add, relu, round_bf16, silu, tanh
from headrace.program.layouts import Numbers
from headrace.program.opcodes import GROUP, LANES, Activation, Layout, Pooling

I32 = NDArray[np.int32]
MIN_LENGTH = np.float32(1e-12)
"""A pooled row is divided by no less, as torch's ``normalize`` does."""

OUTLIER = np.float32(1.25)
"""A group whose largest element is over this multiple of the row's mean of such maxima has a second term."""
SECOND_STEPS = np.float32(254)
"""Steps of the second term within one step of the first."""
FOLDING_ISAS = ("scalar", "avx2")
"""Instruction sets that fold a group's second term into its first where weights are Q8 (docs/decisions/0017)."""


@dataclass(frozen=True, slots=True)
class Quantised:
    """Rows as integer products take them: per 32 a scale, eight-bit integers, and their sum."""

    integers: F32  # [R, k], whole numbers in −127..127
    scales: F32  # [R, k/32]
    sums: F32  # [R, k/32], whole numbers
    is_present: NDArray[np.bool_]  # [R, k/32]


def quantise(rows: F32) -> tuple[Quantised, Quantised]:
    """Returns activations quantised per 32, and the second term of the groups that have one.

    First term: q = round(x · 127/amax), scale = amax/127. A group so small that 127/amax is not finite becomes zeros.
    A group that holds NaN or infinity gets a NaN scale, which spoils every product of its row. Second term: what
    rounding left, in steps of scale/254, where amax · groups > 1.25 · Σ amax (summed in order).
    """
    groups = rows.reshape(len(rows), -1, GROUP)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        amax = np.abs(groups).max(axis=2)
        inverse = np.float32(127) / amax
        is_poisoned = ~np.isfinite(groups).all(axis=2)
        is_zero = is_poisoned | ~np.isfinite(inverse)
        scaled = np.where(is_zero[:, :, None], np.float32(0), groups * inverse[:, :, None])
        integers = np.rint(scaled)
        scales = np.where(is_poisoned, np.float32(np.nan), amax / np.float32(127))
        total = np.cumsum(amax, axis=1, dtype=np.float32)[:, -1:]
        has_second = ~is_zero & (amax * np.float32(groups.shape[1]) > OUTLIER * total)
    seconds = np.rint((scaled - integers) * SECOND_STEPS)
    first = Quantised(
        f32(integers).reshape(rows.shape), f32(scales), f32(integers.sum(axis=2)), np.ones_like(has_second)
    )
    second = Quantised(
        f32(seconds).reshape(rows.shape), f32(scales / SECOND_STEPS), f32(seconds.sum(axis=2)), has_second
    )
    return first, second


def rms_norm(rows: F32, weight: F32 | None, eps: float) -> F32:
    """Returns (x · 1/√(mean of squares + eps)) · w; squares are summed in sixteen lanes, then in a fixed tree."""
    sums = np.zeros((len(rows), LANES), np.float32)
    for start in range(0, rows.shape[1], LANES):
        part = rows[:, start : start + LANES]
        sums = fma(part, part, sums)
    mean = reduce_add(sums) / np.float32(rows.shape[1]) + np.float32(eps)
    normed = rows * (np.float32(1) / np.sqrt(mean))[:, None]
    return f32(normed if weight is None else normed * weight)


def product(rows: F32, weight: Numbers, *, is_folded: bool = False) -> F32:
    """Returns rows · wᵀ, [R, n]: one accumulator per element, along K in order, second terms after all first ones.

    Args:
        is_folded: Q8 takes both terms of a group at once, as the instruction sets of ``FOLDING_ISAS`` do.
    """
    n, k = weight.values.shape
    acc = np.zeros((len(rows), n), np.float32)
    if weight.layout in (Layout.F32, Layout.BF16, Layout.F16):
        inputs = round_bf16(rows) if weight.layout is Layout.BF16 else rows
        for i in range(k):
            acc = fma(inputs[:, i : i + 1], weight.values[:, i], acc)
        return acc
    terms = quantise(rows)
    if is_folded and weight.layout is Layout.Q8:
        return _folded(*terms, weight)
    offset = np.float32(8 if weight.layout is Layout.Q4 else 0)
    for a in terms:
        for g in range(k // GROUP):
            part = slice(g * GROUP, (g + 1) * GROUP)
            # Whole numbers below 2²⁴: exact in float32 in any order.
            integer = a.integers[:, part] @ (weight.values[:, part] + offset).T
            scales, sums = a.scales[:, g : g + 1], a.sums[:, g : g + 1]
            added = fma(integer - offset * sums, weight.scales[:, g] * scales, acc)
            if weight.layout is Layout.Q4M:
                added = fma(weight.mins[:, g], scales * sums, added)
            acc = np.where(a.is_present[:, g : g + 1], added, acc)
    return acc


def _folded(first: Quantised, second: Quantised, weight: Numbers) -> F32:
    """Returns the product with Q8 weights where a group's whole numbers are 254 · first + second, of the finer scale.

    They have 16 bits, and sums of 32 products less than 2²⁹, which are rounded once when they become float32.
    """
    rows, n = len(first.integers), len(weight.values)
    acc = np.zeros((rows, n), np.float32)
    for g in range(first.scales.shape[1]):
        part, has_second = slice(g * GROUP, (g + 1) * GROUP), second.is_present[:, g : g + 1]
        ones, finer = first.integers[:, part].astype(np.float64), second.integers[:, part].astype(np.float64)
        integers = np.where(has_second, ones * SECOND_STEPS + finer, ones)
        scales = np.where(has_second, second.scales[:, g : g + 1], first.scales[:, g : g + 1])
        dot = f32(integers @ weight.values[:, part].astype(np.float64).T)
        acc = fma(dot, weight.scales[:, g] * scales, acc)
    return acc


def layer_norm(rows: F32, weight: F32 | None, bias: F32 | None, eps: float) -> F32:
    """Returns (x − mean) · 1/√(variance + eps) · w + b; sums as in ``rms_norm``, those of squares after the mean."""
    width = np.float32(rows.shape[1])
    sums = np.zeros((len(rows), LANES), np.float32)
    for start in range(0, rows.shape[1], LANES):
        sums = sums + rows[:, start : start + LANES]
    centred = f32(rows - (reduce_add(sums) / width)[:, None])
    squares = np.zeros((len(rows), LANES), np.float32)
    for start in range(0, rows.shape[1], LANES):
        part = centred[:, start : start + LANES]
        squares = fma(part, part, squares)
    inverse = np.float32(1) / np.sqrt(reduce_add(squares) / width + np.float32(eps))
    normed = f32(centred * inverse[:, None])
    normed = normed if weight is None else f32(normed * weight)
    return normed if bias is None else f32(normed + bias)


def activate(activation: Activation, values: F32) -> F32:
    """Returns the activation of every element."""
    match activation:
        case Activation.NONE:
            return values
        case Activation.SILU:
            return silu(values)
        case Activation.GELU_TANH:
            return gelu_tanh(values)
        case Activation.GELU_ERF:
            return gelu_erf(values)
        case Activation.RELU:
            return relu(values)
        case Activation.TANH:
            return tanh(values)


def gated(activation: Activation, values: F32) -> F32:
    """Returns activation(gate) × up, [R, n/2], of columns in which sixteen gates and sixteen ups alternate, [R, n]."""
    tiles = values.reshape(len(values), -1, 2, LANES)
    return f32(activate(activation, tiles[:, :, 0]) * tiles[:, :, 1]).reshape(len(values), -1)


def pool(rows: F32, pooling: Pooling, is_normalised: bool) -> F32:
    """Returns one row of a sequence's, [k]: a mean adds the rows in order; a length is summed as ``rms_norm`` does."""
    match pooling:
        case Pooling.FIRST:
            row = rows[0]
        case Pooling.LAST:
            row = rows[-1]
        case Pooling.MEAN:
            total = rows[0]
            for later in rows[1:]:
                total = f32(total + later)
            row = f32(total / np.float32(len(rows)))
    if not is_normalised:
        return f32(row)
    sums = np.zeros(LANES, np.float32)
    for start in range(0, len(row), LANES):
        part = row[start : start + LANES]
        sums = fma(part, part, sums)
    length = np.sqrt(reduce_add(sums))
    # As the VM compares: a length that is not a number stays.
    return f32(row / np.where(length < MIN_LENGTH, MIN_LENGTH, length))


def route(logits: F32, top_k: int, is_renormalised: bool) -> tuple[I32, F32]:
    """Returns the experts of each row, ascending, and how much each counts: both [R, top_k].

    The softmax over all experts is summed in sixteen lanes. The largest logits win, equal ones by lower id; with
    ``is_renormalised`` the probabilities are divided by their sum, added in rising order of experts. A row whose sum is
    not a number takes the first experts, with NaN.
    """
    rows, experts = logits.shape
    padded = np.zeros((rows, -(-experts // LANES) * LANES), np.float32)
    with np.errstate(invalid="ignore"):
        padded[:, :experts] = exp(logits - logits.max(axis=1, keepdims=True))
        sums = np.zeros((rows, LANES), np.float32)
        for start in range(0, padded.shape[1], LANES):
            sums = sums + padded[:, start : start + LANES]
        total = reduce_add(sums)
        shares = f32(padded / total[:, None])
    ids = np.zeros((rows, top_k), np.int32)
    for row, keys in enumerate(logits):
        ranked = np.arange(experts) if np.isnan(total[row]) else np.lexsort((np.arange(experts), -keys))
        ids[row] = np.sort(ranked[:top_k])
    chosen = np.take_along_axis(shares, ids.astype(np.int64), axis=1)
    if is_renormalised:
        share = np.zeros(rows, np.float32)
        for column in range(top_k):
            share = f32(share + chosen[:, column])
        chosen = f32(chosen / share[:, None])
    return ids, chosen
