"""Packed weight layouts in numpy: the definition in bytes of ``opcodes.Layout``, both ways.

``pack`` lays out numbers that are already of the layout's kind (quantised integers and their scales); choosing those
numbers from floats is ``engine.quantize``'s and the native packer's work. ``unpack`` is its inverse, and what the
reference interpreter reads weights with.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.program.lanes import F32, bf16_bits, bf16_values
from headrace.program.opcodes import GROUP, LANES, Layout

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Numbers:
    """A matrix in the terms of its layout.

    Args:
        values: F32, BF16, F16: the weights. Else the integers: Q8 −128..127, Q4 −8..7, Q4M 0..15. [n, k] f32.
        scales: [n, k/32] f32, each a float16; empty for the three of floats.
        mins: Q4M: [n, k/32] f32, each a float16; else empty.
    """

    layout: Layout
    values: F32
    scales: F32
    mins: F32

    def dequantised(self) -> F32:
        """Returns the weights, [n, k] f32: product and sum are rounded one after the other."""
        if self.scales.size == 0:
            return self.values
        values = self.values * np.repeat(self.scales, GROUP, axis=1)
        return values + np.repeat(self.mins, GROUP, axis=1) if self.mins.size else values

    def columns(self, start: int, stop: int) -> Numbers:
        """Returns the columns [start, stop)."""
        part = slice(start, stop)
        return Numbers(self.layout, self.values[part], self.scales[part], self.mins[part])


_EMPTY = np.zeros((0, 0), np.float32)


def _tiles(array: NDArray[np.generic], n: int) -> NDArray[np.generic]:
    """Returns ``[tiles, 16, …]`` of ``[n, …]``, padded with zero rows."""
    padded = np.zeros((-(-n // LANES) * LANES, *array.shape[1:]), array.dtype)
    padded[:n] = array
    return padded.reshape(-1, LANES, *array.shape[1:])


def _raw(array: NDArray[np.generic], *shape: int) -> Bytes:
    return np.ascontiguousarray(array).view(np.uint8).reshape(*shape, -1)


def pack(numbers: Numbers) -> Bytes:
    """Returns the packed bytes of ``numbers``; rows are padded with zeros to whole tiles."""
    n, k = numbers.values.shape
    layout = numbers.layout
    assert k % GROUP == 0
    if layout is Layout.F32:
        return _raw(_tiles(numbers.values, n).transpose(0, 2, 1)).reshape(-1)
    if layout is Layout.F16:
        return _raw(_tiles(numbers.values.astype(np.float16), n).transpose(0, 2, 1)).reshape(-1)
    if layout is Layout.BF16:
        pairs = _tiles(bf16_bits(numbers.values), n).reshape(-1, LANES, k // 2, 2)
        return _raw(pairs.transpose(0, 2, 1, 3)).reshape(-1)
    groups = k // GROUP
    halves = [numbers.scales, numbers.mins] if layout is Layout.Q4M else [numbers.scales]
    heads = [_raw(_tiles(half.astype(np.float16), n).transpose(0, 2, 1), -(-n // LANES), groups) for half in halves]
    tiles = _tiles(numbers.values.astype(np.int16), n).reshape(-1, LANES, groups, GROUP)
    if layout is Layout.Q8:
        runs: Bytes = (tiles + 128).astype(np.uint8).reshape(-1, LANES, groups, 8, 4)
    else:
        zero = 8 if layout is Layout.Q4 else 0
        nibbles: Bytes = (tiles + zero).astype(np.uint8).reshape(-1, LANES, groups, 4, 2, 4)
        runs = np.bitwise_or(nibbles[..., 0, :], nibbles[..., 1, :] << np.uint8(4), dtype=np.uint8)
    body = _raw(runs.transpose(0, 2, 3, 1, 4), runs.shape[0], groups)
    return np.concatenate([*heads, body], axis=2).reshape(-1)


def unpack(layout: Layout, data: Bytes, n: int, k: int) -> Numbers:
    """Returns the numbers that packed bytes hold."""
    tiles, groups = -(-n // LANES), k // GROUP
    if layout in (Layout.F32, Layout.F16):
        values = data.view("<f4" if layout is Layout.F32 else "<f2").reshape(tiles, k, LANES).transpose(0, 2, 1)
        return Numbers(layout, np.ascontiguousarray(values.reshape(-1, k)[:n], np.float32), _EMPTY, _EMPTY)
    if layout is Layout.BF16:
        bits = data.view("<u2").reshape(tiles, k // 2, LANES, 2).transpose(0, 2, 1, 3).reshape(-1, k)[:n]
        return Numbers(layout, bf16_values(np.ascontiguousarray(bits)), _EMPTY, _EMPTY)
    assert layout in (Layout.Q8, Layout.Q4, Layout.Q4M)
    records = data.reshape(tiles, groups, -1)

    def halves(start: int) -> F32:
        part = np.ascontiguousarray(records[:, :, start : start + 2 * LANES]).view("<f2")
        return part.transpose(0, 2, 1).reshape(-1, groups)[:n].astype(np.float32)

    mins = halves(2 * LANES) if layout is Layout.Q4M else _EMPTY
    body = records[:, :, (4 if layout is Layout.Q4M else 2) * LANES :]
    runs = body.reshape(tiles, groups, -1, LANES, 4).transpose(0, 3, 1, 2, 4)
    integers: Bytes = runs if layout is Layout.Q8 else np.stack([runs & 15, runs >> 4], axis=4)
    zero = np.float32({Layout.Q8: 128, Layout.Q4: 8, Layout.Q4M: 0}[layout])
    values = integers.reshape(-1, k)[:n].astype(np.float32) - zero
    return Numbers(layout, values, halves(0), mins)
