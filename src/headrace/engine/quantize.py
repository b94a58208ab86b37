"""Which packed layout a weight gets, how many bytes that takes, and the conversions that packing itself does not do.

Rules: sources that are quantised keep their own values wherever a layout holds them losslessly; ``quantization`` only
narrows (a Q4_1 file loaded with ``int8`` stays Q4M). ``dtype: fp32`` is the exact path: every weight as f32.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headrace.base.errors import ConfigError
from headrace.program.opcodes import GROUP, LANES, Layout

DTYPES = ("bf16", "fp32")
QUANTIZATIONS = ("none", "int8", "int4")

_NATURAL = {
    "F32": Layout.BF16,
    "F16": Layout.BF16,
    "BF16": Layout.BF16,
    "Q8_0": Layout.Q8,
    "Q4_0": Layout.Q4,
    "Q4_1": Layout.Q4M,
}
_BITS = {Layout.F32: 32, Layout.BF16: 16, Layout.Q8: 8, Layout.Q4: 4, Layout.Q4M: 4}
# What kernels.vm.pack makes of each stored type; other pairs go through f32.
PACKABLE: dict[str, frozenset[Layout]] = {
    "F32": frozenset(_BITS),
    "F16": frozenset(_BITS),
    "BF16": frozenset(_BITS),
    "Q8_0": frozenset((Layout.F32, Layout.Q8)),
    "Q4_0": frozenset((Layout.F32, Layout.Q4, Layout.Q4M)),
    "Q4_1": frozenset((Layout.F32, Layout.Q4M)),
}
_TILE_GROUP_BYTES = {Layout.Q8: 544, Layout.Q4: 288, Layout.Q4M: 320}


def check_precision(dtype: str, quantization: str) -> None:
    """Checks the two settings alone and together.

    Raises:
        ConfigError: a value that the native engine does not have, or ``fp32`` with a quantization.
    """
    if dtype not in DTYPES:
        raise ConfigError(
            f"dtype is {dtype!r}; the native engine has {', '.join(DTYPES)} (fp16 runs with --engine vllm)"
        )
    if quantization not in QUANTIZATIONS:
        raise ConfigError(f"quantization is {quantization!r}; the native engine has {', '.join(QUANTIZATIONS)}")
    if dtype == "fp32" and quantization != "none":
        raise ConfigError(f"dtype fp32 is the exact path and quantization {quantization} contradicts it: drop one")


def choose_layout(stored: list[str], dtype: str, quantization: str, *, is_vocabulary: bool) -> Layout:
    """Returns the layout of a matrix whose parts are stored as ``stored`` (keys of ``PACKABLE``).

    Args:
        is_vocabulary: embedding or head, which ``int4`` keeps at 8 bits: their error reaches every logit.
    """
    if dtype == "fp32":
        return Layout.F32
    found = {_NATURAL[kind] for kind in stored}
    if found == {Layout.Q4, Layout.Q4M}:
        natural = Layout.Q4M
    else:
        natural = found.pop() if len(found) == 1 else Layout.BF16
    if quantization == "none":
        return natural
    wanted = Layout.Q8 if quantization == "int8" or is_vocabulary else Layout.Q4M
    return natural if _BITS[natural] <= _BITS[wanted] else wanted


def packed_bytes(layout: Layout, n: int, k: int) -> int:
    """Returns the size of a packed weight; N is padded to ``LANES`` in matrix layouts."""
    tiles = -(-n // LANES)
    match layout:
        case Layout.VECTOR_F32:
            return 4 * n
        case Layout.ROPE_F32:
            return 4 * n * k
        case Layout.F32:
            return 4 * tiles * LANES * k
        case Layout.BF16:
            return 2 * tiles * LANES * k
        case Layout.Q8 | Layout.Q4 | Layout.Q4M:
            return tiles * (k // GROUP) * _TILE_GROUP_BYTES[layout]


def to_f32(stored: str, raw: NDArray[np.uint8], k: int) -> NDArray[np.float32]:
    """Returns stored rows as values. raw: [n, row bytes] uint8. Returns: [n, k] f32."""
    rows = len(raw)
    match stored:
        case "F32":
            return raw.view("<f4").reshape(rows, k).astype(np.float32, copy=False)
        case "F16":
            return raw.view("<f2").reshape(rows, k).astype(np.float32)
        case "BF16":
            wide = raw.view("<u2").reshape(rows, k).astype(np.uint32)
            np.left_shift(wide, 16, out=wide)
            return wide.view(np.float32)
        case _:
            return _dequantize(stored, raw).reshape(rows, k)


def _dequantize(stored: str, raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Blocks of ggml: f16 scale (and f16 minimum), then 32 values; nibbles hold value j and value j + 16."""
    head_bytes = {"Q8_0": 2, "Q4_0": 2, "Q4_1": 4}[stored]
    body_bytes = GROUP if stored == "Q8_0" else GROUP // 2
    blocks = raw.reshape(-1, head_bytes + body_bytes)
    head = np.ascontiguousarray(blocks[:, :head_bytes]).view("<f2").astype(np.float32)
    body = blocks[:, head_bytes:]
    if stored == "Q8_0":
        return body.view(np.int8).astype(np.float32) * head
    values = np.concatenate((body & 15, body >> 4), axis=1).astype(np.float32)
    if stored == "Q4_0":
        return (values - np.float32(8)) * head
    result: NDArray[np.float32] = values * head[:, :1] + head[:, 1:]
    return result


def q4_0_as_q4_1(raw: NDArray[np.uint8]) -> NDArray[np.uint8] | None:
    """Returns Q4_0 rows as Q4_1 rows of the same values, or None where a minimum of −8 × scale leaves f16.

    raw: [n, k/32 × 18] uint8. Returns: [n, k/32 × 20] uint8.
    """
    blocks = raw.reshape(-1, 18)
    scale = np.ascontiguousarray(blocks[:, :2]).view("<f2").astype(np.float32)
    minimum = scale * np.float32(-8)  # a power of two: exact in f16 while it stays in range
    if not (np.abs(minimum) <= np.finfo(np.float16).max).all():
        return None
    out = np.empty((len(blocks), 20), np.uint8)
    out[:, :2] = blocks[:, :2]
    out[:, 2:4] = minimum.astype("<f2").view(np.uint8)
    out[:, 4:] = blocks[:, 2:]
    return out.reshape(len(raw), -1)
