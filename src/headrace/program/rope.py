"""Rotary tables. The same formulas as transformers' ``modeling_rope_utils``, in the same single precision.

transformers multiplies a float32 frequency by a float32 position and takes the cosine of the rounded product. At
position 8191 that rounding moves the angle by up to 2⁻¹² rad, which a greedy choice can see; the models were trained
and are judged with it, so the angle here is rounded the same way. Cosine and sine are then exact to float32.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from headrace.program.model import ModelSpec, RopeKind, RopeSpec

_CHUNK_POSITIONS = 4096  # bounds the float64 temporaries to a few MiB however long the table is


def _f32(value: NDArray[np.floating]) -> NDArray[np.float32]:
    return np.asarray(value, np.float32)


def inverse_frequencies(rope: RopeSpec, head_size: int) -> NDArray[np.float32]:
    """Returns the scaled angle per position of each pair, ``[head_size / 2]`` f32.

    Source: Peng et al., YaRN (arXiv 2309.00071); the Llama 3.1 rule as published with that model.
    """
    exponents = np.arange(0, head_size, 2, dtype=np.float32) / np.float32(head_size)
    periods: NDArray[np.float32] = np.power(np.float32(rope.theta), exponents, dtype=np.float32)
    plain = _f32(np.float32(1.0) / periods)
    match rope.kind:
        case RopeKind.DEFAULT:
            return plain
        case RopeKind.LINEAR:
            return _f32(plain / np.float32(rope.factor))
        case RopeKind.FACTORS:
            factors: NDArray[np.float32] = np.array(rope.factors, np.float32)
            return _f32(plain / factors)
        case RopeKind.LLAMA3:
            return _llama3(rope, plain)
        case RopeKind.YARN:
            return _yarn(rope, head_size, periods)


def _llama3(rope: RopeSpec, plain: NDArray[np.float32]) -> NDArray[np.float32]:
    """Long wavelengths are divided by the factor, short ones kept, those between are blended."""
    context = rope.original_context_tokens
    wavelengths = _f32(np.float32(2 * math.pi) / plain)
    is_long = wavelengths > context / rope.low_freq_factor
    is_short = wavelengths < context / rope.high_freq_factor
    divided = _f32(np.where(is_long, plain / np.float32(rope.factor), plain))
    span = np.float32(rope.high_freq_factor - rope.low_freq_factor)
    smooth = (np.float32(context) / wavelengths - np.float32(rope.low_freq_factor)) / span
    blended = (1 - smooth) * divided / np.float32(rope.factor) + smooth * divided
    return _f32(np.where(~is_long & ~is_short, blended, divided))


def _yarn(rope: RopeSpec, head_size: int, periods: NDArray[np.float32]) -> NDArray[np.float32]:
    """Dimensions that turn often keep their frequency, those that turn seldom are interpolated, a ramp between."""

    def dimension(turns: float) -> float:
        ratio = rope.original_context_tokens / (turns * 2 * math.pi)
        return head_size * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.is_truncated:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_size - 1)
    if low == high:
        high += 0.001  # as transformers: keeps the ramp finite
    ramp = np.clip((np.arange(head_size // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low), 0, 1)
    keep = _f32(1 - ramp)
    interpolated = np.float32(1.0) / (np.float32(rope.factor) * periods)
    return _f32(interpolated * (1 - keep) + (np.float32(1.0) / periods) * keep)


def rope_table(spec: ModelSpec, context_tokens: int) -> NDArray[np.float32]:
    """Returns the table of positions 0 … context_tokens − 1.

    Returns:
        ``[context_tokens, head_size]`` f32: head_size/2 cosines, then head_size/2 sines.

    Cost: 4 × context_tokens × head_size bytes.
    """
    assert spec.rope is not None, "a model without rotary embedding has no table"
    half = spec.head_size // 2
    frequencies = inverse_frequencies(spec.rope, spec.head_size)
    table = np.empty((context_tokens, spec.head_size), np.float32)
    for start in range(0, context_tokens, _CHUNK_POSITIONS):
        stop = min(start + _CHUNK_POSITIONS, context_tokens)
        angles = (np.arange(start, stop, dtype=np.float32)[:, None] * frequencies).astype(np.float64)
        table[start:stop, :half] = np.cos(angles)
        table[start:stop, half:] = np.sin(angles)
    if spec.rope.attention_factor != 1.0:
        table *= np.float32(spec.rope.attention_factor)
    return table
