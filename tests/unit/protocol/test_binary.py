"""Vectors in base64: every kind of number and order of bytes, against struct's own."""

from __future__ import annotations

import base64
import json
import struct
from typing import Any

import pytest

from headrace.base.errors import RequestError
from headrace.protocol.binary import MAX_NAMED, Binary, Packed, take_binary
from headrace.protocol.fields import Fields

VALUES = [0.25, -1.5, 3.0, 0.1, -1e-3, 65504.0]


def taken(**values: Any) -> Binary:
    return take_binary(Fields(json.loads(json.dumps(values))), 1)


def raw(binary: Binary, values: list[float]) -> bytes:
    return base64.b64decode(binary.text_of(struct.pack(f"<{len(values)}f", *values)))


@pytest.mark.parametrize("endianness", [None, "native", "little", "big"])
@pytest.mark.parametrize(("dtype", "letter"), [(None, "f"), ("float32", "f"), ("float16", "e")])
def test_numbers_are_those_of_struct(dtype: str | None, letter: str, endianness: str | None) -> None:
    order = ">" if endianness == "big" else "<"

    got = raw(taken(embed_dtype=dtype, endianness=endianness), VALUES)

    assert got == struct.pack(f"{order}{len(VALUES)}{letter}", *VALUES)


@pytest.mark.parametrize(("endianness", "order"), [("little", "<"), ("big", ">")])
def test_bfloat16_rounds_to_the_nearest_even(endianness: str, order: str) -> None:
    # 1 + 2^-8 lies between 1 and 1 + 2^-7: to the even one; 1 + 3·2^-8 as well, upwards.
    values = [1.0, 1.0 + 2**-8, 1.0 + 3 * 2**-8, 1.0 + 2**-8 + 2**-20, -2.0]

    got = raw(taken(embed_dtype="bfloat16", endianness=endianness), values)

    assert list(struct.unpack(f"{order}5H", got)) == [0x3F80, 0x3F80, 0x3F82, 0x3F81, 0xC000]


def test_what_is_no_half_becomes_the_largest_one() -> None:
    got = raw(taken(embed_dtype="float16"), [1e6, -1e6])

    assert struct.unpack("<2e", got) == (65504.0, -65504.0)


@pytest.mark.parametrize(
    ("values", "param"), [({"embed_dtype": "int8"}, "embed_dtype"), ({"endianness": "middle"}, "endianness")]
)
def test_other_values_are_refused_by_name(values: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        taken(**values)

    assert caught.value.param == param


@pytest.mark.parametrize(("dtype", "num_codes"), [("fp8_e4m3", 0x7F), ("fp8_e5m2", 0x7C)])
def test_every_number_of_eight_bits_is_written_as_itself(dtype: str, num_codes: int) -> None:
    codes = [*range(num_codes), *range(0x80, 0x80 + num_codes)]

    got = raw(taken(embed_dtype=dtype, endianness="big"), [number_of(dtype, code) for code in codes])

    assert list(got) == codes


def number_of(dtype: str, code: int) -> float:
    """Reads a number through the half whose bits it is; e4m3 has one bit of exponent less, and so another bias."""
    sign, bits = code & 0x80, code & 0x7F
    if dtype == "fp8_e5m2":
        return float(struct.unpack("<e", bytes([0, code]))[0])
    return float(struct.unpack("<e", struct.pack("<H", sign << 8 | bits << 7))[0]) * 2**8


@pytest.mark.parametrize(
    ("dtype", "value", "code"),
    [
        ("fp8_e4m3", 1.0625, 0x38),
        ("fp8_e4m3", 1.0626, 0x39),
        ("fp8_e4m3", 1.1875, 0x3A),
        ("fp8_e4m3", 2**-10, 0x00),
        ("fp8_e4m3", 3 * 2**-10, 0x02),
        ("fp8_e4m3", -1e6, 0xFE),
        ("fp8_e5m2", 1.125, 0x3C),
        ("fp8_e5m2", 1.375, 0x3E),
        ("fp8_e5m2", 2**-17, 0x00),
        ("fp8_e5m2", 1e6, 0x7B),
    ],
)
def test_eight_bits_round_to_the_nearest_even_and_keep_what_is_too_large(dtype: str, value: float, code: int) -> None:
    assert list(raw(taken(embed_dtype=dtype), [value])) == [code]


@pytest.mark.parametrize(("dtype", "width"), [("float32", 4), ("bfloat16", 2), ("fp8_e5m2", 1)])
def test_packed_vectors_stand_where_their_metadata_say(dtype: str, width: int) -> None:
    vectors = [struct.pack("<2f", 0.25, -1.5), struct.pack("<4f", 1, 2, 3, 4)]
    binary = taken(encoding_format="bytes", embed_dtype=dtype)

    got = binary.answer(vectors, [[2], [2, 2]], {"model": "é"})

    assert got.metadata is not None
    about = json.loads(got.metadata.decode("ascii"))
    assert about["model"] == "é"
    assert [place["shape"] for place in about["data"]] == [[2], [2, 2]]
    assert [(place["start"], place["end"]) for place in about["data"]] == [(0, 2 * width), (2 * width, 6 * width)]
    assert got.body == binary.packed(vectors[0]) + binary.packed(vectors[1])
    only = taken(encoding_format="bytes_only", embed_dtype=dtype)
    assert only.answer(vectors, [[2], [2, 2]], {}) == Packed(got.body, None)


def test_a_header_names_so_many_vectors_and_no_more() -> None:
    fields = {"encoding_format": "bytes"}

    assert take_binary(Fields(dict(fields)), MAX_NAMED).is_packed
    with pytest.raises(RequestError, match="use bytes_only"):
        take_binary(Fields(dict(fields)), MAX_NAMED + 1)
    assert take_binary(Fields({"encoding_format": "bytes_only"}), MAX_NAMED + 1).is_packed
