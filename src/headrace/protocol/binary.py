"""Vectors in base64: which numbers they are made of, and in which order of bytes (vLLM's fields)."""

from __future__ import annotations

import base64
import struct
import sys
from array import array
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from headrace.protocol.fields import Fields

_LITTLE: Final = ("native", "little")


class EmbedDtype(StrEnum):
    """What a number is sent as."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


@dataclass(frozen=True, slots=True)
class Binary:
    """How vectors are written in base64."""

    dtype: EmbedDtype = EmbedDtype.FLOAT32
    is_big: bool = False

    def text_of(self, vector: bytes) -> str:
        """Gives the base64 of a vector, f32 little-endian. Numbers are rounded to the nearest, ties to even."""
        return base64.b64encode(self._packed(vector)).decode("ascii")

    def _packed(self, vector: bytes) -> bytes:
        match self.dtype:
            case EmbedDtype.FLOAT32:
                if not self.is_big:
                    return vector
                values = array("f", vector)
                values.byteswap()
                return values.tobytes()
            case EmbedDtype.FLOAT16:
                count = len(vector) // 4
                order = ">" if self.is_big else "<"
                # Vectors of raw tokens may hold what is no half: it becomes the largest one.
                numbers = [max(-_MAX_HALF, min(_MAX_HALF, value)) for value in struct.unpack(f"<{count}f", vector)]
                return struct.pack(f"{order}{count}e", *numbers)
            case EmbedDtype.BFLOAT16:
                words = array("I", vector)
                if sys.byteorder == "big":
                    words.byteswap()
                halves = array("H", [(word + 0x7FFF + (word >> 16 & 1)) >> 16 & 0xFFFF for word in words])
                if self.is_big is (sys.byteorder == "little"):
                    halves.byteswap()
                return halves.tobytes()


_MAX_HALF: Final = 65504.0
PLAIN: Final = Binary()
"""Little-endian f32, as OpenAI sends."""


def take_binary(fields: Fields) -> Binary:
    """Takes ``embed_dtype`` and ``endianness``.

    Raises:
        RequestError: another value than those that there are.
    """
    dtype = fields.text("embed_dtype", 16) or EmbedDtype.FLOAT32.value
    if dtype not in set(EmbedDtype):
        raise fields.wrong("embed_dtype", dtype, f"one of {', '.join(EmbedDtype)}")
    endianness = fields.text("endianness", 16) or "native"
    if endianness not in (*_LITTLE, "big"):
        raise fields.wrong("endianness", endianness, "native (little), little or big")
    return Binary(EmbedDtype(dtype), endianness == "big")
