"""safetensors headers that lie: each is refused with a typed error that says what and where."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest

from headrace.base.errors import ModelFormatError
from headrace.registry.formats.safetensors import MAX_HEADER_BYTES, MAX_TENSORS, open_safetensors, parse_safetensors
from headrace.registry.formats.tensor import TensorView
from headrace.testing.tiny import TinyShape, tiny_tensors, write_tiny_llama


def file_of(header: object, data: bytes = b"", *, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def tensor(start: int, stop: int, *, dtype: object = "F32", shape: object = None) -> dict[str, object]:
    return {
        "dtype": dtype,
        "shape": [(stop - start) // 4] if shape is None else shape,
        "data_offsets": [start, stop],
    }


def parse(content: bytes) -> dict[str, TensorView]:
    return parse_safetensors(memoryview(content), Path("model.safetensors"))


def test_tensors_come_back_with_their_values(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path, dtype="f32")

    tensors = open_safetensors(folder / "model.safetensors")

    truth = tiny_tensors(TinyShape(), 0)
    assert tensors.keys() == truth.keys()
    for name, values in truth.items():
        assert tensors[name].shape == values.shape
        assert np.array_equal(tensors[name].data.view(np.float32).reshape(values.shape), values)


def test_empty_tensors_and_scalars_are_allowed() -> None:
    tensors = parse(file_of({"none": tensor(0, 0, shape=[0, 4]), "one": tensor(0, 4, shape=[])}, bytes(4)))

    assert tensors["none"].data.nbytes == 0
    assert tensors["one"].shape == ()


LIES = {
    "no_bytes": (b"", "has 0 bytes"),
    "length_2_63": (file_of({}, length=2**63), "header length is 9223372036854775808"),
    "length_over_limit": (file_of({}, bytes(64), length=MAX_HEADER_BYTES + 1), "the limit is"),
    "length_beyond_file": (file_of({}, length=1000), "truncated"),
    "length_zero": (file_of({}, bytes(8), length=0), "header length is 0"),
    "not_an_object": (file_of([1, 2, 3]), "should start a JSON object"),
    "not_json": (file_of(b"{nonsense"), "is not JSON"),
    "not_utf8": (file_of(b'{"\xff": 1}'), "is not UTF-8"),
    "nested_too_deep": (file_of(b'{"a":' + b"[" * 90_000), "nested too deep"),
    "bracket_flood": (file_of(b'{"a":[' + b"[]," * 300_000 + b"[]]}"), "objects and lists"),
    "comma_flood": (file_of(b'{"a":[' + b"0," * 2_000_000 + b"0]}"), "entries"),
    "nan": (file_of(b'{"a":NaN}'), "NaN"),
    "long_number": (file_of(b'{"a":' + b"9" * 5000 + b"}"), "is not JSON"),
    "duplicate_key": (
        file_of(b'{"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'),
        "twice",
    ),
    "duplicate_field": (file_of(b'{"a":{"dtype":"F32","dtype":"F16","shape":[],"data_offsets":[0,4]}}'), "twice"),
    "metadata_not_strings": (file_of({"__metadata__": {"format": 1}}), "should be a string"),
    "metadata_not_object": (file_of({"__metadata__": []}), "should be an object"),
    "missing_field": (file_of({"a": {"dtype": "F32", "shape": []}}), "exactly dtype"),
    "extra_field": (file_of({"a": {**tensor(0, 4), "x": 1}}, bytes(4)), "exactly dtype"),
    "not_a_tensor": (file_of({"a": 7}), "exactly dtype"),
    "unknown_dtype": (file_of({"a": tensor(0, 4, dtype="Q4_0")}, bytes(4)), "is unknown"),
    "dtype_not_text": (file_of({"a": tensor(0, 4, dtype=["F32"])}, bytes(4)), "is unknown"),
    "shape_negative": (file_of({"a": tensor(0, 4, shape=[-1])}, bytes(4)), "whole numbers"),
    "shape_bool": (file_of({"a": tensor(0, 4, shape=[True])}, bytes(4)), "whole numbers"),
    "shape_fraction": (file_of({"a": tensor(0, 4, shape=[1.0])}, bytes(4)), "whole numbers"),
    "shape_not_a_list": (file_of({"a": tensor(0, 4, shape=1)}, bytes(4)), "should be a list"),
    "shape_overflow": (file_of({"a": tensor(0, 4, shape=[2**62, 2**62, 4])}, bytes(4)), "needs"),
    "shape_of_many": (file_of({"a": tensor(0, 4, shape=[1] * 9)}, bytes(4)), "dimensions"),
    "stop_before_start": (file_of({"a": tensor(8, 4, shape=[1])}, bytes(8)), "a start and a later stop"),
    "three_offsets": (file_of({"a": {**tensor(0, 4), "data_offsets": [0, 4, 8]}}, bytes(8)), "a start and a later"),
    "beyond_file": (file_of({"a": tensor(0, 8)}, bytes(4)), "truncated"),
    "overlap": (file_of({"a": tensor(0, 8), "b": tensor(4, 12)}, bytes(12)), "overlaps"),
    "gap": (file_of({"a": tensor(0, 4), "b": tensor(8, 12)}, bytes(12)), "gap"),
    "starts_late": (file_of({"a": tensor(4, 8)}, bytes(8)), "gap"),
    "trailing_bytes": (file_of({"a": tensor(0, 4)}, bytes(5)), "cover 4 bytes"),
    "name_empty": (file_of({"": tensor(0, 4)}, bytes(4)), "names are"),
    "name_with_escape": (file_of({"a\x1b[2J": tensor(0, 4)}, bytes(4)), "printable"),
    "name_long": (file_of({"a" * 600: tensor(0, 4)}, bytes(4)), "names are"),
    "name_half_surrogate": (file_of(b'{"\\ud800":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}'), "printable"),
}  # fmt: skip


@pytest.mark.parametrize(("content", "words"), LIES.values(), ids=LIES.keys())
def test_lying_headers_are_refused(content: bytes, words: str) -> None:
    with pytest.raises(ModelFormatError) as caught:
        parse(content)

    assert caught.value.message.startswith("model.safetensors: ")
    assert words in caught.value.message
    assert caught.value.message.isprintable()


def test_more_tensors_than_the_limit_are_refused() -> None:
    entry = b'{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    header = b"{" + b",".join(b'"t%d":%s' % (index, entry) for index in range(MAX_TENSORS + 1)) + b"}"

    with pytest.raises(ModelFormatError, match=r"32769 tensors|objects and lists"):
        parse(file_of(header))
