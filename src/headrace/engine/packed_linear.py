"""What the words of AWQ and GPTQ matrices mean: integers, zero points and scales → rows that the packer takes.

A weight is ``(q − z) · s`` with q and z in 0..15 and one z and s per output and group of inputs. That is Q4M with a
minimum of −z · s, which f16 rounds by at most 2⁻¹¹ of itself; the exact path multiplies in f32 without rounding.
Where groups are not runs of inputs (GPTQ's act-order) no layout keeps the integers, and the values go through f32.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headrace.base.errors import ModelFormatError
from headrace.engine.quantize import to_f32
from headrace.program.opcodes import GROUP, Layout
from headrace.registry.formats.tensor import PackedLinear, TensorView

_PER_WORD = 8
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""AWQ: the i-th nibble of a word, lowest first, is column 8c + _AWQ_ORDER[i]."""


def packed_rows(tensor: TensorView, layout: Layout) -> tuple[str, NDArray[np.uint8]]:
    """Returns the matrix as rows of ``Q4_1`` blocks where ``layout`` keeps them, else of ``F32``: [n, row bytes] uint8.

    Raises:
        ModelFormatError: a scale or minimum is not finite in f16.
    """
    assert tensor.packed is not None
    integers, zeros, scales = _numbers(tensor, tensor.packed)
    n, k = tensor.shape
    if layout is Layout.Q4M and tensor.packed.order is None:
        return "Q4_1", _blocks(tensor, integers, zeros, scales)
    groups = np.arange(k) // (k // scales.shape[1])
    if tensor.packed.order is not None:
        groups = np.frombuffer(tensor.packed.order.data.tobytes(), "<i4")
    values = (integers.astype(np.float32) - zeros[:, groups]) * scales[:, groups]
    return "F32", values.view(np.uint8).reshape(n, -1)


def _numbers(
    tensor: TensorView, packed: PackedLinear
) -> tuple[NDArray[np.uint8], NDArray[np.float32], NDArray[np.float32]]:
    """Returns integers [n, k] of 0..15, zero points and scales [n, groups]."""
    n, k = tensor.shape
    words = tensor.data.view("<u4") if tensor.data.ctypes.data % 4 == 0 else tensor.data.copy().view("<u4")
    is_awq = tensor.dtype == "AWQ"
    if is_awq:
        integers = _nibbles(words.reshape(k, n // _PER_WORD), _AWQ_ORDER).reshape(k, n).T
    else:
        # Eight inputs of a column in a word: [k/8, n] words are [k/8, n, 8] integers.
        integers = _nibbles(words.reshape(k // _PER_WORD, n), range(_PER_WORD)).transpose(1, 0, 2).reshape(n, k)
    groups = packed.scales.shape[0]
    zero_words = np.frombuffer(packed.zeros.data.tobytes(), "<u4").reshape(groups, n // _PER_WORD)
    zeros = _nibbles(zero_words, _AWQ_ORDER if is_awq else range(_PER_WORD)).reshape(groups, n)
    # Stored less one in four bits, a zero point of 0 comes as 15.
    zeros = (zeros + np.uint8(packed.zero_offset)) & np.uint8(15)
    scales = to_f32(packed.scales.dtype, np.frombuffer(packed.scales.data.tobytes(), np.uint8).reshape(groups, -1), n)
    return np.ascontiguousarray(integers), zeros.T.astype(np.float32), scales.T


def _nibbles(words: NDArray[np.uint32], order: tuple[int, ...] | range) -> NDArray[np.uint8]:
    """Returns the eight integers of every word, […, 8]: nibble i at place ``order[i]``."""
    out = np.empty((*words.shape, _PER_WORD), np.uint8)
    for index, place in enumerate(order):
        out[..., place] = (words >> np.uint32(4 * index)) & np.uint32(15)
    return out


def _blocks(
    tensor: TensorView, integers: NDArray[np.uint8], zeros: NDArray[np.float32], scales: NDArray[np.float32]
) -> NDArray[np.uint8]:
    n, k = tensor.shape
    times = k // scales.shape[1] // GROUP
    with np.errstate(over="ignore", invalid="ignore"):
        halves = np.stack([scales, -zeros * scales], axis=2).astype("<f2")
    if not np.isfinite(halves).all():
        raise ModelFormatError(f"{tensor.name}: a scale or minimum is not a finite f16")
    blocks = np.empty((n, k // GROUP, 4 + GROUP // 2), np.uint8)
    blocks[:, :, :4] = np.repeat(halves, times, axis=1).view(np.uint8)
    groups = integers.reshape(n, -1, 2, GROUP // 2)
    np.bitwise_or(groups[:, :, 0], groups[:, :, 1] << np.uint8(4), out=blocks[:, :, 4:])
    return blocks.reshape(n, -1)
