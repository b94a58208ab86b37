"""Reads protobuf messages without a schema, as hostile input: fields by number, nothing allocated that is not there.

Just enough for SentencePiece's model files. Groups (wire types 3 and 4) are refused: that format has none.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NoReturn

from headrace.base.errors import ModelFormatError

Value = int | float | memoryview


def fields(message: memoryview, where: str) -> Iterator[tuple[int, Value]]:
    """Yields number and value of each field: varints as unsigned int, 4 bytes as float, 8 as int, the rest as bytes.

    Raises:
        ModelFormatError: the message is cut off or malformed; ``where`` names it.
    """
    offset, end = 0, len(message)

    def refuse(why: str) -> NoReturn:
        raise ModelFormatError(f"{where}: at byte {offset}: {why}")

    def varint() -> int:
        nonlocal offset
        value = 0
        for shift in range(0, 70, 7):
            if offset >= end:
                refuse("the message is cut off in a number")
            byte = message[offset]
            offset += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        refuse("a number has more than 10 bytes")

    def take(size: int) -> memoryview:
        nonlocal offset
        if size > end - offset:
            refuse(f"a field takes {size} bytes, {end - offset} are left")
        offset += size
        return message[offset - size : offset]

    while offset < end:
        tag = varint()
        number, kind = tag >> 3, tag & 7
        match kind:
            case 0:
                yield number, varint()
            case 1:
                yield number, int.from_bytes(take(8), "little")
            case 2:
                yield number, take(varint())
            case 5:
                yield number, float(struct.unpack("<f", take(4))[0])
            case _:
                refuse(f"field {number} has wire type {kind}, which this format does not use")
