"""Vectors as bytes: which numbers they are made of, in which order of bytes, and how they are sent (vLLM's fields)."""

from __future__ import annotations

import base64
import json
import math
import struct
import sys
from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Final

from headrace.base.errors import RequestError
from headrace.protocol.fields import Fields

# ``bytes`` names each vector in one header: 256 of them are 28 KB, and clients read lines of 64 KB.
MAX_NAMED: Final = 256
ENDIANNESS: Final = ("native", "little", "big")


class EmbedDtype(StrEnum):
    """What a number is sent as."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FP8_E4M3 = "fp8_e4m3"
    FP8_E5M2 = "fp8_e5m2"


class VectorForm(StrEnum):
    """How vectors are sent: in JSON as numbers or base64; alone one behind the other, with or without their places."""

    FLOAT = "float"
    BASE64 = "base64"
    BYTES = "bytes"
    BYTES_ONLY = "bytes_only"


@dataclass(frozen=True, slots=True)
class Packed:
    """An answer that is no JSON: vectors one behind the other.

    Args:
        metadata: where each one stands, as a JSON text for a header; None where it is not wanted.
    """

    body: bytes
    metadata: bytes | None


@dataclass(frozen=True, slots=True)
class Binary:
    """How vectors are written; ``dtype`` and ``is_big`` say nothing about numbers in JSON."""

    dtype: EmbedDtype = EmbedDtype.FLOAT32
    is_big: bool = False
    form: VectorForm = VectorForm.FLOAT

    @property
    def is_packed(self) -> bool:
        """Whether the answer is no JSON."""
        return self.form in (VectorForm.BYTES, VectorForm.BYTES_ONLY)

    def text_of(self, vector: bytes) -> str:
        """Gives the base64 of a vector, f32 little-endian. Numbers are rounded to the nearest, ties to even."""
        return base64.b64encode(self.packed(vector)).decode("ascii")

    def answer(self, vectors: Sequence[bytes], shapes: Sequence[Sequence[int]], about: Mapping[str, object]) -> Packed:
        """Gives vectors, f32 little-endian, one behind the other.

        Args:
            about: what the metadata say beside the places.
        """
        parts = [self.packed(vector) for vector in vectors]
        if self.form is VectorForm.BYTES_ONLY:
            return Packed(b"".join(parts), None)
        endianness = "big" if self.is_big else "little"
        places = []
        start = 0
        for index, (part, shape) in enumerate(zip(parts, shapes, strict=True)):
            stop = start + len(part)
            place = {"index": index, "embed_dtype": self.dtype, "endianness": endianness, "start": start, "end": stop}
            places.append({**place, "shape": shape})
            start = stop
        # Plain ASCII, whatever the model is called: it is a header.
        return Packed(b"".join(parts), json.dumps({**about, "data": places}, separators=(",", ":")).encode())

    def packed(self, vector: bytes) -> bytes:
        """Gives the bytes of a vector, f32 little-endian."""
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
            case EmbedDtype.FP8_E4M3:
                return _eighths(vector, _E4M3)
            case EmbedDtype.FP8_E5M2:
                return _eighths(vector, _E5M2)


def _middles(num_codes: int, mantissa_bits: int, bias: int) -> list[float]:
    """Gives what lies in the middle of neighbours among the finite numbers of an 8-bit format, from 0 upwards."""
    unit = 1 << mantissa_bits
    numbers = []
    for code in range(num_codes):
        exponent, mantissa = code >> mantissa_bits, (code & (unit - 1)) / unit
        numbers.append(math.ldexp(mantissa + (exponent > 0), max(exponent, 1) - bias))
    return [(low + high) / 2 for low, high in pairwise(numbers)]


# The formats of the Open Compute Project's OFP8; the codes above are no finite numbers.
_E4M3: Final = _middles(0x7F, mantissa_bits=3, bias=7)
_E5M2: Final = _middles(0x7C, mantissa_bits=2, bias=15)


def _eighths(vector: bytes, middles: list[float]) -> bytes:
    """Gives numbers of 8 bits, what is too large as the largest one. Cost: 0.3 µs a number."""
    out = bytearray()
    for value in struct.unpack(f"<{len(vector) // 4}f", vector):
        size = abs(value)
        code = bisect_left(middles, size)
        if code & 1 and code < len(middles) and middles[code] == size:
            code += 1  # of two that are as near, the even one
        out.append(code | (0x80 if math.copysign(1.0, value) < 0 else 0))
    return bytes(out)


_MAX_HALF: Final = 65504.0
PLAIN: Final = Binary()
"""Little-endian f32, as OpenAI sends."""


def take_binary(fields: Fields, num_inputs: int) -> Binary:
    """Takes ``encoding_format``, ``embed_dtype`` and ``endianness``.

    Raises:
        RequestError: another value than those that there are, or more inputs than a header can name.
    """
    form = fields.choice("encoding_format", [*VectorForm]) or VectorForm.FLOAT.value
    if form == VectorForm.BYTES and num_inputs > MAX_NAMED:
        raise RequestError(
            f"encoding_format bytes names each input in a header, {MAX_NAMED} at most, and there are {num_inputs}: "
            "use bytes_only",
            param="encoding_format",
        )
    dtype = fields.choice("embed_dtype", [*EmbedDtype]) or EmbedDtype.FLOAT32.value
    endianness = fields.choice("endianness", ENDIANNESS, "native (little), little or big")
    return Binary(EmbedDtype(dtype), endianness == "big", VectorForm(form))
