"""Reads safetensors headers as hostile input: every rule is checked before any tensor is touched.

A file is 8 bytes of header length (little-endian), a JSON header, and data that the tensors must cover exactly.
Cost: under 1 s and 256 MiB whatever the bytes are; the data itself stays in the memory map.
Source: the safetensors format description (Hugging Face).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

from headrace.base.errors import ModelFormatError
from headrace.registry.files import map_file, shown
from headrace.registry.formats.json_text import parse_json
from headrace.registry.formats.tensor import TensorView, size_bytes

MAX_HEADER_BYTES = 16 * 2**20
MAX_TENSORS = 32_768
MAX_NAME_CHARACTERS = 512
MAX_DIMENSIONS = 8
# Per tensor: one object and two lists; name, three keys, and commas of eight dimensions and three members.
_MAX_CONTAINERS = 3 * MAX_TENSORS + 64
_MAX_ITEMS = 16 * MAX_TENSORS
_FIELDS = frozenset(("dtype", "shape", "data_offsets"))
_DTYPES = frozenset(
    ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "BOOL", "I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8")
)


def open_safetensors(path: Path) -> dict[str, TensorView]:
    """Returns the file's tensors by name, in the order of their data.

    Raises:
        ModelFormatError: the header lies in any way; the message names the file, the tensor, the value and the limit.
    """
    return parse_safetensors(map_file(path), path)


def parse_safetensors(data: memoryview, path: Path) -> dict[str, TensorView]:
    """Returns the tensors of a file whose bytes are ``data``; ``path`` only names it in messages."""
    header_bytes = _header_bytes(data, path)
    text = data[8 : 8 + header_bytes].tobytes()
    if not text.startswith(b"{"):
        raise ModelFormatError(f"{path}: byte 8 should start a JSON object, found {text[:1]!r}")
    header = parse_json(text, path, max_containers=_MAX_CONTAINERS, max_items=_MAX_ITEMS)
    _check_metadata(header.pop("__metadata__", {}), path)
    if len(header) > MAX_TENSORS:
        raise ModelFormatError(f"{path}: has {len(header)} tensors, the limit is {MAX_TENSORS}")
    entries = [_entry(name, fields, path) for name, fields in header.items()]
    entries.sort(key=lambda entry: entry[3:])
    body = data[8 + header_bytes :]
    tensors: dict[str, TensorView] = {}
    expected = 0
    for name, dtype, shape, start, stop in entries:
        if start != expected:
            fault = "overlaps the tensor before it" if start < expected else "leaves a gap before it"
            raise ModelFormatError(f"{path}: tensor {shown(name)} starts at {start} and {fault}, expected {expected}")
        if stop > len(body):
            raise ModelFormatError(
                f"{path}: tensor {shown(name)} ends at {stop}, the file has {len(body)} bytes of data: it is truncated"
            )
        tensors[name] = TensorView(name, dtype, shape, body[start:stop])
        expected = stop
    if expected != len(body):
        raise ModelFormatError(f"{path}: its tensors cover {expected} bytes, the file has {len(body)} bytes of data")
    return tensors


def _header_bytes(data: memoryview, path: Path) -> int:
    if len(data) < 10:
        raise ModelFormatError(f"{path}: has {len(data)} bytes, a safetensors file has at least 10")
    header_bytes = int.from_bytes(data[:8].tobytes(), "little")
    if header_bytes > MAX_HEADER_BYTES:
        raise ModelFormatError(f"{path}: header length is {header_bytes}, the limit is {MAX_HEADER_BYTES}")
    if not 2 <= header_bytes <= len(data) - 8:
        raise ModelFormatError(
            f"{path}: header length is {header_bytes}, the file has {len(data) - 8} bytes after it: it is truncated"
        )
    return header_bytes


def _check_metadata(metadata: Any, path: Path) -> None:
    if not isinstance(metadata, dict):
        raise ModelFormatError(f"{path}: __metadata__ should be an object, found {type(metadata).__name__}")
    for key, value in metadata.items():
        if not isinstance(value, str):
            raise ModelFormatError(
                f"{path}: __metadata__ key {shown(key)} should be a string, found {type(value).__name__}"
            )


def _entry(name: str, fields: Any, path: Path) -> tuple[str, str, tuple[int, ...], int, int]:
    """Returns name, dtype, shape, start and stop. Messages are made on refusal only: a header may hold 32,768."""

    def refuse(why: str) -> NoReturn:
        raise ModelFormatError(f"{path}: tensor {shown(name)}: {why}")

    if not 1 <= len(name) <= MAX_NAME_CHARACTERS or not name.isprintable():
        refuse(f"names are 1 to {MAX_NAME_CHARACTERS} printable characters")
    if not isinstance(fields, dict) or fields.keys() != _FIELDS:
        refuse("should have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        refuse(f"dtype {shown(str(dtype))} is unknown")
    for what, values in (("shape", shape), ("data_offsets", offsets)):
        if not isinstance(values, list):
            refuse(f"{what} should be a list, found {type(values).__name__}")
        for value in values:
            # bool is an int in Python, but not here. 2^63 keeps products of eight dimensions printable.
            if type(value) is not int or not 0 <= value < 2**63:
                refuse(f"{what} should hold whole numbers from 0 to 2^63 − 1, found {shown(str(value), 40)}")
    if len(shape) > MAX_DIMENSIONS:
        refuse(f"has {len(shape)} dimensions, the limit is {MAX_DIMENSIONS}")
    if len(offsets) != 2 or offsets[1] < offsets[0]:
        refuse(f"data_offsets {offsets[:4]} are not a start and a later stop")
    needed = size_bytes(dtype, shape)
    if needed != offsets[1] - offsets[0]:
        refuse(f"{dtype} {shape} needs {needed} bytes, data_offsets give {offsets[1] - offsets[0]}")
    return name, dtype, tuple(shape), offsets[0], offsets[1]
