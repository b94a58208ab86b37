"""Writers for the two model file formats, for tests only: the product reads such files and never writes them."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.testing.tiny_blocks import Encoded

GGUF_ALIGNMENT = 32
_GGML_TYPES = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14,
    "BF16": 30,
}  # fmt: skip
_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9


def safetensors_bytes(tensors: Mapping[str, Encoded], metadata: Mapping[str, str] | None = None) -> bytes:
    """Returns a safetensors file: header length, JSON header padded with spaces to 8 bytes, then the data."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, tensor in tensors.items():
        stop = offset + len(tensor.data)
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(tensor.data for tensor in tensors.values())


def gguf_bytes(metadata: Mapping[str, Any], tensors: Mapping[str, Encoded]) -> bytes:
    """Returns a GGUF v3 file. Python ints become uint32 (int32 in lists), floats float32."""
    descriptions = [(name, tensor.dtype, tensor.shape, len(tensor.data)) for name, tensor in tensors.items()]
    out = bytearray(gguf_head(metadata, descriptions))
    for tensor in tensors.values():
        out += tensor.data + b"\0" * gguf_padding(len(tensor.data))
    return bytes(out)


def gguf_head(metadata: Mapping[str, Any], tensors: Sequence[tuple[str, str, tuple[int, ...], int]]) -> bytes:
    """Returns a GGUF v3 file up to its data: name, type, shape and bytes of each tensor, in the order of the data.

    Each tensor's data is followed by ``gguf_padding`` zeros.
    """
    out = bytearray(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)))
    for key, value in metadata.items():
        out += _string(key) + _value(value)
    offset = 0
    for name, dtype, shape, size_bytes in tensors:
        # GGUF lists the innermost dimension first.
        dimensions = shape[::-1]
        out += _string(name) + struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
        out += struct.pack("<IQ", _GGML_TYPES[dtype], offset)
        offset += size_bytes + gguf_padding(size_bytes)
    return bytes(out) + b"\0" * gguf_padding(len(out))


def gguf_padding(size_bytes: int) -> int:
    """Returns how many zeros follow so many bytes."""
    return -size_bytes % GGUF_ALIGNMENT


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> bytes:
    if isinstance(value, list):
        kind = _STRING if isinstance(value[0], str) else _FLOAT32 if isinstance(value[0], float) else _INT32
        head = struct.pack("<IIQ", _ARRAY, kind, len(value))
        if kind == _STRING:
            return head + b"".join(_string(item) for item in value)
        return head + struct.pack(f"<{len(value)}{'f' if kind == _FLOAT32 else 'i'}", *value)
    if isinstance(value, bool):
        return struct.pack("<IB", _BOOL, value)
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _string(value)
    if isinstance(value, float):
        return struct.pack("<If", _FLOAT32, value)
    return struct.pack("<II", _UINT32, value)
