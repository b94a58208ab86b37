"""Reads GGUF headers as hostile input: each length is checked against what is left before anything is allocated.

A file is ``GGUF``, version, counts, key-value pairs, tensor descriptions, padding, tensor data. Versions 2 and 3,
little-endian. Limits keep any input under 1 s and 256 MiB; they are several times what real models hold.
Source: the GGUF specification (ggml).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NoReturn

from headrace.base.errors import ModelFormatError
from headrace.registry.files import map_file, shown
from headrace.registry.formats.tensor import STORED, TensorView, size_bytes

MAX_KEYS = 16_384
MAX_TENSORS = 16_384
MAX_STRING_BYTES = 4 * 2**20
"""Of one string. The longest real ones are chat templates, up to about 100 kB."""
MAX_METADATA_BYTES = 24 * 2**20
"""Of all key-value pairs. A vocabulary of 262,144 with 514,000 merges takes 14 MB."""
MAX_HEADER_BYTES = 32 * 2**20
"""Metadata and 16,384 tensor descriptions of at most 320 bytes."""
_FIRST_BYTES = 4 * 2**20
"""What a header is taken to need at first: a vocabulary of 49,000 tokens with its merges takes 2 MiB."""
MAX_ARRAY_ITEMS = 2**20
"""Of all arrays together, per kind (strings, numbers): 1.3 times the largest known vocabulary with its merges."""
MAX_ALIGNMENT = 65_536

_GGML_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 10: "<Q", 11: "<q", 12: "<d"}
_UINT32, _BOOL, _STRING, _ARRAY = 4, 7, 8, 9
_VOCABULARY_PREFIX = "tokenizer.ggml."


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A parsed file: key-value pairs (arrays as lists) and tensors by name."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorView]


def open_gguf(path: Path) -> GgufFile:
    """Returns the file's metadata and tensors.

    Raises:
        ModelFormatError: the header lies in any way; the message names the file, the offset or key, value and limit.
    """
    return parse_gguf(map_file(path), path)


def parse_gguf(data: memoryview, path: Path, *, has_vocabulary: bool = True) -> GgufFile:
    """Returns what a file of the bytes ``data`` holds; ``path`` only names it in messages.

    Args:
        has_vocabulary: False steps over the tokenizer's arrays, most of the time that a header takes.
    """
    reader = _Reader(data, path)
    num_tensors, num_keys = _read_counts(reader)
    metadata: dict[str, Any] = {}
    start = reader.offset
    alignment = 32
    seen: set[str] = set()
    for _ in range(num_keys):
        key = reader.string("a key", limit_bytes=65_535)
        if not key or not key.isprintable() or key in seen:
            reader.refuse(f"the key {shown(key)} is {'there twice' if key in seen else 'not printable'}")
        seen.add(key)
        kind = reader.number("<I", f"the type of {shown(key)}")
        if kind == _ARRAY and key.startswith(_VOCABULARY_PREFIX) and not has_vocabulary:
            reader.array(key, is_kept=False)
        else:
            metadata[key] = reader.value(kind, key)
        if key == "general.alignment":
            alignment = _alignment(reader, kind, metadata[key])
        if reader.offset - start > MAX_METADATA_BYTES:
            reader.refuse(f"its key-value pairs take more than {MAX_METADATA_BYTES} bytes")
    infos = [_tensor_info(reader, alignment) for _ in range(num_tensors)]
    body_start = reader.offset + -reader.offset % alignment
    return GgufFile(metadata, _views(data, body_start, infos, path))


def _read_counts(reader: _Reader) -> tuple[int, int]:
    magic = reader.take(4, "the magic number")
    if magic != b"GGUF":
        reader.refuse(f"starts with {magic!r}, a GGUF file starts with b'GGUF'")
    version = reader.number("<I", "the version")
    if version not in (2, 3):
        why = "the file is big-endian" if version & 0xFFFF == 0 and version else "only 2 and 3 are read"
        reader.refuse(f"version is {version}: {why}")
    counts = []
    for what, limit, smallest in (("tensors", MAX_TENSORS, 24), ("keys", MAX_KEYS, 13)):
        count = reader.number("<Q", f"the number of {what}")
        if count > limit:
            reader.refuse(f"claims {count} {what}, the limit is {limit}")
        if count * smallest > reader.left:
            reader.refuse(f"claims {count} {what}, but only {reader.left} bytes are left")
        counts.append(count)
    return counts[0], counts[1]


def _alignment(reader: _Reader, kind: int, value: Any) -> int:
    if kind != _UINT32 or not 8 <= value <= MAX_ALIGNMENT or value & (value - 1):
        reader.refuse(f"general.alignment is {value!r}, it should be a uint32 power of two from 8 to {MAX_ALIGNMENT}")
    return int(value)


def _tensor_info(reader: _Reader, alignment: int) -> tuple[str, str, tuple[int, ...], int, int]:
    """Returns name, dtype, shape, offset in the data and bytes of the next tensor description."""
    name = reader.string("a tensor name", limit_bytes=256)
    where = f"tensor {shown(name)}"
    if not name or not name.isprintable():
        reader.refuse(f"{where}: the name is empty or not printable")
    num_dimensions = reader.number("<I", f"the dimensions of {where}")
    if not 1 <= num_dimensions <= 4:
        reader.refuse(f"{where}: has {num_dimensions} dimensions, the limits are 1 and 4")
    # The file lists the innermost dimension first.
    shape = tuple(reader.number("<Q", f"a dimension of {where}") for _ in range(num_dimensions))[::-1]
    if not all(shape) or prod(shape) >= 2**63:
        reader.refuse(f"{where}: the dimensions {list(shape)} hold a zero or multiply to 2^63 or more")
    kind = reader.number("<I", f"the type of {where}")
    dtype = _GGML_TYPES.get(kind)
    if dtype is None:
        reader.refuse(f"{where}: type {kind} is unknown")
    block = STORED[dtype].block_values
    if shape[-1] % block:
        reader.refuse(f"{where}: rows of {shape[-1]} values are no multiple of {dtype}'s block of {block}")
    offset = reader.number("<Q", f"the offset of {where}")
    if offset % alignment:
        reader.refuse(f"{where}: offset {offset} is no multiple of the alignment {alignment}")
    return name, dtype, shape, offset, size_bytes(dtype, shape)


def _views(
    data: memoryview, body_start: int, infos: list[tuple[str, str, tuple[int, ...], int, int]], path: Path
) -> dict[str, TensorView]:
    tensors: dict[str, TensorView] = {}
    body_bytes = len(data) - body_start
    end, before = 0, ""
    for name, dtype, shape, offset, size in sorted(infos, key=lambda info: info[3]):
        if offset + size > body_bytes:
            raise ModelFormatError(
                f"{path}: tensor {shown(name)} ({dtype} {list(shape)}) needs data bytes {offset} to {offset + size}, "
                f"the file has {max(body_bytes, 0)}: it is truncated or the header lies"
            )
        if offset < end:
            raise ModelFormatError(f"{path}: tensors {shown(before)} and {shown(name)} overlap at data byte {offset}")
        if name in tensors:
            raise ModelFormatError(f"{path}: the tensor {shown(name)} is there twice")
        tensors[name] = TensorView(name, dtype, shape, data[body_start + offset : body_start + offset + size])
        end, before = offset + size, name
    return tensors


class _Reader:
    """A cursor over the file's bytes that never passes their end."""

    def __init__(self, data: memoryview, path: Path) -> None:
        # A copy: slices of bytes are several times cheaper than those of a map. It grows as the header goes on.
        self._data = data
        self._head = data[:_FIRST_BYTES].tobytes()
        self._size = len(data)
        self._path = path
        self._items_left = {"strings": MAX_ARRAY_ITEMS, "numbers": MAX_ARRAY_ITEMS}
        self.offset = 0

    @property
    def left(self) -> int:
        """Bytes between the cursor and the end of the file."""
        return self._size - self.offset

    def refuse(self, why: str) -> NoReturn:
        """Raises the error for ``why`` at this place."""
        raise ModelFormatError(f"{self._path}: at byte {self.offset}: {why}")

    def take(self, count: int, what: str) -> bytes:
        """Returns the next ``count`` bytes."""
        if count > self.left:
            self.refuse(f"{what} takes {count} bytes, only {self.left} are left: the file is truncated or lies")
        self.offset += count
        if self.offset > len(self._hold(self.offset)):
            self.refuse(f"its header takes more than {MAX_HEADER_BYTES} bytes")
        return self._head[self.offset - count : self.offset]

    def _hold(self, stop: int) -> bytes:
        """Returns the copy of the file's first bytes, with those before ``stop`` in it if the header may be so long."""
        if stop > len(self._head):
            self._head = self._data[: min(max(stop, 2 * len(self._head)), MAX_HEADER_BYTES)].tobytes()
        return self._head

    def number(self, code: str, what: str) -> Any:
        """Returns the next number of struct code ``code``."""
        size = struct.calcsize(code)
        return struct.unpack(code, self.take(size, what))[0]

    def string(self, what: str, limit_bytes: int = MAX_STRING_BYTES) -> str:
        """Returns the next string: 8 bytes of length, then UTF-8."""
        size = self.number("<Q", f"the length of {what}")
        if size > limit_bytes:
            self.refuse(f"{what} has {size} bytes, the limit is {limit_bytes}")
        try:
            return self.take(size, what).decode()
        except UnicodeDecodeError as error:
            self.refuse(f"{what} is not UTF-8: {error.reason}")

    def value(self, kind: int, key: str) -> Any:
        """Returns the next value of GGUF type ``kind``."""
        if kind == _STRING:
            return self.string(f"the value of {shown(key)}")
        if kind == _BOOL:
            return self._bools(1, key)[0]
        if kind == _ARRAY:
            return self.array(key)
        if kind not in _SCALARS:
            self.refuse(f"the type of {shown(key)} is {kind}, which is unknown")
        return self.number(_SCALARS[kind], f"the value of {shown(key)}")

    def array(self, key: str, *, is_kept: bool = True) -> list[Any]:
        """Returns the next array; with ``is_kept`` False it is checked for size only and comes back empty."""
        kind = self.number("<I", f"the item type of {shown(key)}")
        count = self.number("<Q", f"the length of {shown(key)}")
        if kind == _ARRAY:
            self.refuse(f"{shown(key)} is an array of arrays, which is not read")
        if kind not in _SCALARS and kind not in (_STRING, _BOOL):
            self.refuse(f"the item type of {shown(key)} is {kind}, which is unknown")
        what = "strings" if kind == _STRING else "numbers"
        if count > self._items_left[what]:
            self.refuse(f"{shown(key)} has {count} items; arrays of {what} may hold {MAX_ARRAY_ITEMS} in one file")
        self._items_left[what] -= count
        if kind == _STRING:
            return self._strings(count, key, is_kept=is_kept)
        if kind == _BOOL:
            return self._bools(count, key)
        code = _SCALARS[kind]
        raw = self.take(count * struct.calcsize(code), f"the array {shown(key)}")
        return list(struct.unpack(f"<{count}{code[1]}", raw)) if is_kept else []

    def _bools(self, count: int, key: str) -> list[bool]:
        raw = self.take(count, f"the value of {shown(key)}")
        if raw.strip(b"\0\1"):
            self.refuse(f"{shown(key)} holds a bool that is neither 0 nor 1")
        return [byte == 1 for byte in raw]

    def _strings(self, count: int, key: str, *, is_kept: bool) -> list[str]:
        # The same checks as `string`, unrolled: a vocabulary with its merges is 100,000 of them.
        if count * 8 > self.left:
            self.refuse(f"{shown(key)} claims {count} strings, but only {self.left} bytes are left")
        head, length, offset, end = self._head, struct.Struct("<Q").unpack_from, self.offset, len(self._head)
        items: list[str] = []
        try:
            for index in range(count):
                start = offset + 8
                if start > end:
                    head = self._hold(start)
                    end = len(head)
                offset = start + length(head, offset)[0] if start <= end else end + 1
                if end < offset <= start + MAX_STRING_BYTES:
                    head = self._hold(offset)
                    end = len(head)
                if offset > end or offset - start > MAX_STRING_BYTES:
                    self.refuse(f"item {index} of {shown(key)} passes the end of the file or is over the limit")
                if is_kept:
                    items.append(head[start:offset].decode())
        except UnicodeDecodeError as error:
            self.refuse(f"item {len(items)} of {shown(key)} is not UTF-8: {error.reason}")
        self.offset = offset
        return items
