"""Single-precision arithmetic as the VM does it, in numpy: fused multiply-add, exponentials, bf16, the lane reduction.

The VM's result is defined to the bit (docs/decisions, numerics), so the reference needs these few operations exactly:
every one rounds once to float32. They are the twins of ``csrc/isa/scalar.h`` and ``csrc/ops/math.h``.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headrace.program.opcodes import LANES

F32 = NDArray[np.float32]

_LOW_BITS = np.int64(2**29 - 1)  # of a float64 mantissa, those that float32 does not have
_HALF = np.int64(2**28)


def f32(value: ArrayLike) -> F32:
    """Returns ``value`` rounded to float32."""
    return np.asarray(value, np.float32)


def fma(a: ArrayLike, b: ArrayLike, c: ArrayLike) -> F32:
    """Returns a·b + c with one rounding.

    A float64 holds a·b of two float32 exactly; the sum is rounded to 53 bits, then to 24. Two roundings differ from one
    only when the first lands on a tie of the second: those results are moved off the tie, to the side of the truth.
    Results below 2⁻¹²⁶ may differ in their last bit.
    """
    product = np.multiply(np.asarray(a, np.float32), b, dtype=np.float64)
    addend = np.asarray(c, np.float64)
    total = product + addend
    is_tie = (total.view(np.int64) & _LOW_BITS) == _HALF
    if is_tie.any():
        # TwoSum (Knuth): what the sum lost.
        part = total - product
        lost = (product - (total - part)) + (addend - part)
        moved = np.nextafter(total, np.where(lost > 0, np.inf, -np.inf))
        total = np.where(is_tie & (lost != 0), moved, total)
    with np.errstate(over="ignore"):
        return f32(total)


def bf16_bits(value: ArrayLike) -> NDArray[np.uint16]:
    """Returns float32 values rounded to the nearest bf16, ties to even, as bits; NaN stays NaN."""
    array = np.ascontiguousarray(value, np.float32)
    bits = array.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.where(np.isnan(array), quiet, rounded).astype(np.uint16)


def bf16_values(bits: NDArray[np.uint16]) -> F32:
    """Returns bf16 bits as float32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def round_bf16(value: ArrayLike) -> F32:
    """Returns float32 values rounded to bf16."""
    return bf16_values(bf16_bits(value))


def reduce_add(lanes: F32) -> F32:
    """Sums the last axis of 16 in the fixed tree: lane l with l+8, then l+4, l+2, l+1."""
    half = LANES // 2
    while half:
        lanes = lanes[..., :half] + lanes[..., half : 2 * half]
        half //= 2
    return lanes[..., 0]


_LOG2_E = np.float32(1.44269504088896341)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_EXP = [np.float32(c) for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)]
EXP_MIN, EXP_MAX = np.float32(-87.3), np.float32(88.72283)


def exp(value: ArrayLike) -> F32:
    """Returns e^x within 2⁻²² relative: Cephes' polynomial on x − n·ln 2. 0 below EXP_MIN, infinite above EXP_MAX."""
    x = f32(value)
    with np.errstate(invalid="ignore", over="ignore"):
        n = np.clip(np.rint(x * _LOG2_E), np.float32(-126), np.float32(128))
        n = f32(np.where(np.isnan(n), np.float32(-126), n))
        safe = f32(np.where(np.isfinite(x), x, np.float32(0)))
        r = fma(n, -_LN2_LOW, fma(n, -_LN2_HIGH, safe))
        p = f32(1.9875691500e-4)
        for coefficient in _EXP:
            p = fma(p, r, coefficient)
        y = f32(fma(p, r * r, r) + np.float32(1))
        half = f32(np.rint(n * np.float32(0.5)))
        y = f32(y * np.exp2(half) * np.exp2(n - half))
    y = f32(np.where(x > EXP_MAX, np.float32(np.inf), np.where(x < EXP_MIN, np.float32(0), y)))
    return f32(np.where(np.isnan(x), x, y))


_WEIGHT = [np.float32(c) for c in (0.041897975, 0.16667637, 0.4999915, 0.9999997, 1.0)]
_WEIGHT_MIN, _LN2, _ROUNDER = np.float32(-87), np.float32(0.69314718056), np.float32(12582912 + 127)


def exp_weight(value: ArrayLike) -> F32:
    """Returns e^x for x ≤ 0 as attention weighs its scores: e^−87 below −87, never 0; within 2⁻²² for x > −4."""
    x = f32(value)
    with np.errstate(invalid="ignore"):
        x = f32(np.where(x < _WEIGHT_MIN, _WEIGHT_MIN, x))
        shifted = fma(x, _LOG2_E, _ROUNDER)
        r = fma(shifted - _ROUNDER, -_LN2, x)
        p = np.full_like(r, np.float32(0.008290306))
        for coefficient in _WEIGHT:
            p = fma(p, r, coefficient)
        return f32(p * (shifted.view(np.uint32) << np.uint32(23)).view(np.float32))


def silu(value: ArrayLike) -> F32:
    """Returns x / (1 + e^−x)."""
    x = f32(value)
    return f32(x / (np.float32(1) + exp(-x)))


# 0.5 · erfc(y / √2) · e^(y²/2) = t · polynomial(t), t = 1 / (1 + 0.35·y): minimax over 0 ≤ y ≤ 13.4, 3.2e-8 relative.
_TAIL_SLOPE = np.float32(0.35)
_TAIL = [
    np.float32(c)
    for c in (
        -0.029120702296495438,
        0.14384661614894867,
        -0.2554505169391632,
        0.15886609256267548,
        -0.022892504930496216,
        0.10541350394487381,
        0.11985751241445541,
        0.13985836505889893,
        0.13962161540985107,
    )
]
_GELU_MAX = np.float32(16)
"""From here on e^(−y²/2), and its like of the approximation, are flushed to zero."""


def gelu_erf(value: ArrayLike) -> F32:
    """Returns x · Φ(x) within 6 units in the last place: the tail of Φ at |x|, then its complement for x > 0."""
    x = f32(value)
    with np.errstate(invalid="ignore"):
        y = f32(np.where(np.abs(x) < _GELU_MAX, np.abs(x), _GELU_MAX))
        t = f32(np.float32(1) / fma(y, _TAIL_SLOPE, np.float32(1)))
        p = np.full_like(t, _TAIL[0])
        for coefficient in _TAIL[1:]:
            p = fma(p, t, coefficient)
        square = f32(y * y)
        lost = fma(y, y, -square)
        e = exp(square * np.float32(-0.5))
        q = f32(fma(e, lost * np.float32(-0.5), e) * f32(p * t))
        return f32(x * np.where(x > 0, np.float32(1) - q, q))


# 2·√(2/π) and 0.044715 times that, each as a float32 and what it lost.
_GELU_LINEAR = (np.float32(1.5957691669464111), np.float32(-4.534068054340423e-08))
_GELU_CUBIC = (np.float32(0.07135481387376785), np.float32(2.3988324659995897e-09))


def gelu_tanh(value: ArrayLike) -> F32:
    """Returns x / (1 + e^−w), w = 2·√(2/π)·(x + 0.044715·x³), within 4 units in the last place.

    The same number as x/2 · (1 + tanh(w/2)), without its cancellation at negative x; w is kept in two parts, for an
    error of it is one of the result, w times as large.
    """
    x = f32(value)
    linear, linear_lost = _GELU_LINEAR
    cubic, cubic_lost = _GELU_CUBIC
    one = np.float32(1)
    with np.errstate(invalid="ignore"):
        y = f32(np.where(np.abs(x) < _GELU_MAX, np.abs(x), _GELU_MAX))
        square = f32(y * y)
        square_lost = fma(y, y, -square)
        third = f32(square * cubic)
        third_lost = fma(square, cubic, -third)
        slope = f32(third + linear)
        part = f32(slope - third)
        lost = f32(f32(third - f32(slope - part)) + f32(linear - part))
        lost = fma(square_lost, cubic, fma(square, cubic_lost, f32(f32(lost + third_lost) + linear_lost)))
        w = f32(y * slope)
        lost = fma(y, lost, fma(y, slope, -w))
        t = exp(-w)
        t = fma(t, -lost, t)
        return f32(x * f32(np.where(x > 0, one, t) / f32(one + t)))


def relu(value: ArrayLike) -> F32:
    """Returns 0 where x is below it, else x; NaN stays NaN."""
    x = f32(value)
    return f32(np.where(np.float32(0) > x, np.float32(0), x))


def tanh(value: ArrayLike) -> F32:
    """Returns ±(1 − t) / (1 + t), t = e^(−2|x|): within 2⁻²² absolute."""
    x = f32(value)
    t = exp(np.abs(x) * np.float32(-2))
    y = (np.float32(1) - t) / (np.float32(1) + t)
    return f32(np.where(x < 0, -y, y))


def soft_cap(value: ArrayLike, cap: float) -> F32:
    """Returns cap · tanh(x / cap); the identity for cap 0."""
    x = f32(value)
    return x if cap == 0 else f32(tanh(x * (np.float32(1) / np.float32(cap))) * np.float32(cap))
