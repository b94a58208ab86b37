"""Encodes f32 tensors as stored element types: floats, and GGUF's blocks from Q4_0 to Q6_K. Small and plain.

Blocks of 32 follow ggml's reference quantisers (quantize_row_q*_reference). Those of 256 lie as ggml's do, but their
scales are chosen plainly (each group's range), where ggml searches for the least error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

BLOCK = 32
SUPER_BLOCK = 256


@dataclass(frozen=True, slots=True)
class Encoded:
    """A tensor as it lies in a file."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def encode(values: NDArray[np.float32], dtype: str) -> Encoded:
    """Returns ``values`` stored as ``dtype``; block types need rows of a multiple of 32, those of K of 256."""
    encoders: dict[str, Callable[[NDArray[np.float32]], NDArray[Any]]] = {
        "F32": _f32,
        "F16": _f16,
        "BF16": _bf16,
        "Q8_0": _q8_0,
        "Q4_0": _q4_0,
        "Q4_1": _q4_1,
        "Q5_0": _q5_0,
        "Q5_1": _q5_1,
        "Q4_K": _q4_k,
        "Q5_K": _q5_k,
        "Q6_K": _q6_k,
    }
    data = encoders[dtype](np.ascontiguousarray(values, np.float32))
    return Encoded(dtype, values.shape, data.tobytes())


def round_to_bf16(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Returns the values rounded to bf16, as f32."""
    wide = _bf16(np.ascontiguousarray(values, np.float32)).astype(np.uint32) << 16
    return wide.view(np.float32).reshape(values.shape)


def _f32(values: NDArray[np.float32]) -> NDArray[np.float32]:
    return values


def _f16(values: NDArray[np.float32]) -> NDArray[np.float16]:
    return values.astype(np.float16)


def _bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    bits = values.view(np.uint32)
    # Round to nearest, ties to even: add half of the dropped unit, less one unless the kept bit is odd.
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _blocks(values: NDArray[np.float32]) -> NDArray[np.float32]:
    assert values.shape[-1] % BLOCK == 0, f"rows of {values.shape[-1]} do not divide into blocks of {BLOCK}"
    return values.reshape(-1, BLOCK)


def _inverse(scale: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.divide(1.0, scale, out=np.zeros_like(scale), where=scale != 0).astype(np.float32)


def _join(*columns: NDArray[np.generic]) -> NDArray[np.uint8]:
    rows = len(columns[0])
    parts = [np.ascontiguousarray(column).view(np.uint8).reshape(rows, -1) for column in columns]
    return np.concatenate(parts, axis=1)


def _nibbles(q: NDArray[np.uint8]) -> NDArray[np.uint8]:
    half = BLOCK // 2
    packed: NDArray[np.uint8] = np.bitwise_or(q[:, :half] & 15, q[:, half:] << 4, dtype=np.uint8)
    return packed


def _q8_0(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    blocks = _blocks(values)
    scale = np.abs(blocks).max(1, keepdims=True) / np.float32(127)
    return _join(scale.astype(np.float16), np.rint(blocks * _inverse(scale)).astype(np.int8))


def _q4_0(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    blocks = _blocks(values)
    extreme = np.take_along_axis(blocks, np.abs(blocks).argmax(1)[:, None], 1)
    scale = extreme / np.float32(-8)
    q = np.minimum(15, np.floor(blocks * _inverse(scale) + np.float32(8.5))).astype(np.uint8)
    return _join(scale.astype(np.float16), _nibbles(q))


def _q4_1(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    blocks = _blocks(values)
    low = blocks.min(1, keepdims=True)
    scale = (blocks.max(1, keepdims=True) - low) / np.float32(15)
    q = np.minimum(15, np.floor((blocks - low) * _inverse(scale) + np.float32(0.5))).astype(np.uint8)
    return _join(scale.astype(np.float16), low.astype(np.float16), _nibbles(q))


def _q5_0(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    blocks = _blocks(values)
    extreme = np.take_along_axis(blocks, np.abs(blocks).argmax(1)[:, None], 1)
    scale = extreme / np.float32(-16)
    q = np.minimum(31, np.floor(blocks * _inverse(scale) + np.float32(16.5))).astype(np.uint8)
    return _join(scale.astype(np.float16), np.packbits(q >> 4, axis=1, bitorder="little"), _nibbles(q))


def _q5_1(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    blocks = _blocks(values)
    low = blocks.min(1, keepdims=True)
    scale = (blocks.max(1, keepdims=True) - low) / np.float32(31)
    q = np.minimum(31, np.floor((blocks - low) * _inverse(scale) + np.float32(0.5))).astype(np.uint8)
    fifth = np.packbits(q >> 4, axis=1, bitorder="little")
    return _join(scale.astype(np.float16), low.astype(np.float16), fifth, _nibbles(q))


def _q4_k(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    q, head = _sixes(values, 15)
    pairs = q.reshape(-1, 4, 2, BLOCK)
    return _join(head, (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(len(q), -1))


def _q5_k(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    q, head = _sixes(values, 31)
    pairs = (q & 15).reshape(-1, 4, 2, BLOCK)
    fifth = np.packbits(q >> 4, axis=1, bitorder="little")  # bit j of byte i: value i of group j
    return _join(head, fifth.reshape(len(q), -1), (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(len(q), -1))


def _sixes(values: NDArray[np.float32], steps: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Returns integers [B, 8, 32] of 0..steps, and the sixteen bytes [B, 16] of f16 units and six-bit scales."""
    assert values.shape[-1] % SUPER_BLOCK == 0, f"rows of {values.shape[-1]} do not divide into blocks of {SUPER_BLOCK}"
    groups = values.reshape(-1, 8, BLOCK)
    low = np.minimum(groups.min(2), 0)
    wanted = np.stack([(groups.max(2) - low) / np.float32(steps), -low], axis=1)  # scales and minimums, [B, 2, 8]
    units = (wanted.max(2, keepdims=True) / np.float32(63)).astype(np.float16)
    sixes = np.rint(wanted * _inverse(units.astype(np.float32))).clip(0, 63).astype(np.uint8)
    scale, minimum = (sixes * units.astype(np.float32)).swapaxes(0, 1)[..., None]
    q = np.rint((groups + minimum) * _inverse(scale)).clip(0, steps).astype(np.uint8)
    first, last = sixes[:, :, :4], sixes[:, :, 4:]
    packed = np.concatenate([first | last >> 4 << 6, (last[:, :1] & 15) | last[:, 1:] << 4], axis=1)
    return q, _join(units, packed)


def _q6_k(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    assert values.shape[-1] % SUPER_BLOCK == 0, f"rows of {values.shape[-1]} do not divide into blocks of {SUPER_BLOCK}"
    groups = values.reshape(-1, 16, 16)
    wanted = np.abs(groups).max(2) / np.float32(31)
    unit = (wanted.max(1, keepdims=True) / np.float32(127)).astype(np.float16)
    scales = np.rint(wanted * _inverse(unit.astype(np.float32))).clip(0, 127).astype(np.int8)
    step = (scales * unit.astype(np.float32))[..., None]
    q = (np.rint(groups * _inverse(step)).clip(-32, 31) + 32).astype(np.uint8)
    # Half h of a block: groups of 32 a, b, c, d; nibble bytes hold (a, c) and (b, d), pair bytes all four.
    quarters = q.reshape(-1, 2, 4, BLOCK)
    low = (quarters[:, :, :2] & 15) | quarters[:, :, 2:] << 4
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    high = np.bitwise_or.reduce((quarters >> 4) << shifts, axis=2)
    return _join(low.reshape(len(q), -1), high.reshape(len(q), -1), scales, unit)
