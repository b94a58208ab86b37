"""Encodes f32 tensors as stored element types: F32, F16, BF16 and GGUF's blocks Q8_0, Q4_0, Q4_1. Small and plain.

Block rules are ggml's reference quantisers (quantize_row_q*_reference): 32 values of a row share one block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

BLOCK = 32


@dataclass(frozen=True, slots=True)
class Encoded:
    """A tensor as it lies in a file."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def encode(values: NDArray[np.float32], dtype: str) -> Encoded:
    """Returns ``values`` stored as ``dtype``; block types need rows of a multiple of 32."""
    encoders: dict[str, Callable[[NDArray[np.float32]], NDArray[Any]]] = {
        "F32": _f32,
        "F16": _f16,
        "BF16": _bf16,
        "Q8_0": _q8_0,
        "Q4_0": _q4_0,
        "Q4_1": _q4_1,
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
    packed: NDArray[np.uint8] = np.bitwise_or(q[:, :half], q[:, half:] << 4, dtype=np.uint8)
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
