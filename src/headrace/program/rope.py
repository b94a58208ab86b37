"""Rotary tables. The same formulas as transformers' ``modeling_rope_utils``, in the same single precision.

transformers multiplies a float32 frequency by a float32 position and takes the cosine of the rounded product. At
position 8191 that rounding moves the angle by up to 2⁻¹² rad, which a greedy choice can see; the models were trained
and are judged with it, so the angle here is rounded the same way. Cosine and sine are then exact to float32.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from headrace.program.model import RopeKind, RopeSpec

_CHUNK_POSITIONS = 4096  # bounds the float64 temporaries to a few MiB however long the table is


def _f32(value: NDArray[np.floating]) -> NDArray[np.float32]:
    return np.asarray(value, np.float32)


def inverse_frequencies(rope: RopeSpec, rotary_size: int, positions: int) -> NDArray[np.float32]:
    """Returns the scaled angle per position of each pair, ``[rotary_size / 2]`` f32.

    Args:
        rotary_size: elements of a head that turn, even; the whole head or its first part.
        positions: how many are served; longrope has other frequencies beyond the original context.

    Source: Peng et al., YaRN (arXiv 2309.00071); Ding et al., LongRoPE (arXiv 2402.13753); the Llama 3.1 rule as
    published with that model.
    """
    exponents = np.arange(0, rotary_size, 2, dtype=np.float32) / np.float32(rotary_size)
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
        case RopeKind.LONGROPE:
            is_long = positions > rope.original_context_tokens
            return _f32(
                np.float32(1.0) / (np.array(rope.long_factors if is_long else rope.factors, np.float32) * periods)
            )
        case RopeKind.LLAMA3:
            return _llama3(rope, plain)
        case RopeKind.YARN:
            return _yarn(rope, rotary_size, periods)


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


def _yarn(rope: RopeSpec, rotary_size: int, periods: NDArray[np.float32]) -> NDArray[np.float32]:
    """Dimensions that turn often keep their frequency, those that turn seldom are interpolated, a ramp between."""

    def dimension(turns: float) -> float:
        ratio = rope.original_context_tokens / (turns * 2 * math.pi)
        return rotary_size * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.is_truncated:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_size - 1)
    if low == high:
        high += 0.001  # as transformers: keeps the ramp finite
    ramp = np.clip((np.arange(rotary_size // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low), 0, 1)
    keep = _f32(1 - ramp)
    interpolated = np.float32(1.0) / (np.float32(rope.factor) * periods)
    return _f32(interpolated * (1 - keep) + (np.float32(1.0) / periods) * keep)


def rope_table(rope: RopeSpec, rotary_size: int, positions: int) -> NDArray[np.float32]:
    """Returns the table of positions 0 … positions − 1.

    Args:
        rotary_size: elements of a head that turn, even.

    Returns:
        ``[positions, rotary_size]`` f32: rotary_size/2 cosines, then rotary_size/2 sines.

    Cost: 4 × positions × rotary_size bytes.
    """
    half = rotary_size // 2
    frequencies = inverse_frequencies(rope, rotary_size, positions)
    table = np.empty((positions, rotary_size), np.float32)
    for start in range(0, positions, _CHUNK_POSITIONS):
        stop = min(start + _CHUNK_POSITIONS, positions)
        angles = (np.arange(start, stop, dtype=np.float32)[:, None] * frequencies).astype(np.float64)
        table[start:stop, :half] = np.cos(angles)
        table[start:stop, half:] = np.sin(angles)
    if rope.attention_factor != 1.0:
        table *= np.float32(rope.attention_factor)
    return table
