"""Vectors in base64: every kind of number and order of bytes, against struct's own."""

from __future__ import annotations

import base64
import json
import struct
from typing import Any

import pytest

from headrace.base.errors import RequestError
from headrace.protocol.binary import Binary, take_binary
from headrace.protocol.fields import Fields

VALUES = [0.25, -1.5, 3.0, 0.1, -1e-3, 65504.0]


def taken(**values: Any) -> Binary:
    return take_binary(Fields(json.loads(json.dumps(values))))


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
    ("values", "param"), [({"embed_dtype": "fp8_e4m3"}, "embed_dtype"), ({"endianness": "middle"}, "endianness")]
)
def test_other_values_are_refused_by_name(values: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        taken(**values)

    assert caught.value.param == param
