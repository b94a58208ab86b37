"""Binary forms that Python and the VM share: instruction records, output and result rows, packed weights."""

from __future__ import annotations

import struct
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.program.opcodes import (
    FIELDS,
    OUTPUT_FIELDS,
    RECORD_BYTES,
    RESULT_FIELDS,
    STRUCT_CODES,
    Layout,
    Opcode,
    ordered,
    ordered_rows,
)

_NUMPY_CODES = {"i32": "<i4", "f32": "<f4", "u64": "<u8"}


def _dtype(fields: tuple[tuple[str, str, str], ...]) -> np.dtype[np.void]:
    return np.dtype([(name, _NUMPY_CODES[kind]) for name, kind, _ in ordered_rows(fields)], align=True)


OUTPUT_DTYPE = _dtype(OUTPUT_FIELDS)
"""One row per token to choose or score in a step."""
RESULT_DTYPE = _dtype(RESULT_FIELDS)
"""What the step says about each of them."""


class PackedLike(Protocol):
    """A packed weight, as the VM and the reference take it; ``data`` is 64-byte aligned and outlives its user."""

    @property
    def layout(self) -> Layout:
        """How ``data`` is to be read."""

    @property
    def n(self) -> int:
        """Columns, elements or positions."""

    @property
    def k(self) -> int:
        """Inputs of a matrix, head size of a rotation table."""

    @property
    def data(self) -> NDArray[np.uint8]:
        """The bytes."""


def pack_record(opcode: Opcode, phase: int, **values: float) -> bytes:
    """Returns one ``RECORD_BYTES`` record. Every field of the opcode must be given, and no other."""
    fields = ordered(FIELDS[opcode])
    names = {field.name for field in fields}
    assert names == set(values), f"{opcode.name}: {sorted(names ^ set(values))}"
    codes = "".join(STRUCT_CODES[field.type] for field in fields)
    body = struct.pack("<ii" + codes, opcode, phase, *(values[field.name] for field in fields))
    return body.ljust(RECORD_BYTES, b"\0")


def unpack_record(record: bytes) -> tuple[Opcode, int, dict[str, float]]:
    """Returns opcode, phase and fields of one record."""
    opcode_number, phase = struct.unpack_from("<ii", record)
    opcode = Opcode(opcode_number)
    fields = ordered(FIELDS[opcode])
    codes = "".join(STRUCT_CODES[field.type] for field in fields)
    values = struct.unpack_from("<" + codes, record, 8)
    return opcode, phase, {field.name: value for field, value in zip(fields, values, strict=True)}
