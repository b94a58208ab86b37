"""The body of /v1/embeddings, and its answer."""

from __future__ import annotations

import base64
import json
import struct
from typing import Any

import pytest

from headrace.base.errors import RequestError
from headrace.protocol.embeddings import embeddings_body, parse_embeddings
from headrace.protocol.inputs import Row


def parse(**values: Any) -> Any:
    return parse_embeddings(json.dumps({"model": "m", **values}).encode())


@pytest.mark.parametrize(
    ("given", "inputs"),
    [
        ("text", ("text",)),
        (["a", "b"], ("a", "b")),
        ([1, 2, 3], ([1, 2, 3],)),
        ([1.0, 2], ([1, 2],)),
        ([[1, 2], [3]], ([1, 2], [3])),
        (["a", [5]], ("a", [5])),
        (" ", (" ",)),
        ([1, "a", 2], (Row((1, "a", 2)),)),
        (["a", 5], (Row(("a", 5)),)),
        ([[1, 2], [1, "a", 2]], ([1, 2], Row((1, "a", 2)))),
        ({"prompt_string": "a"}, ("a",)),
        ({"content": [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]}, ("a b",)),
        (["a", {"content": [{"type": "text", "text": "b"}]}, {"prompt_string": "c"}], ("a", "b", "c")),
    ],
)
def test_inputs_come_in_many_forms(given: Any, inputs: Any) -> None:
    assert parse(input=given).inputs == inputs


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({}, "input is required"),
        ({"input": ""}, "input is empty"),
        ({"input": []}, "not empty"),
        ({"input": ["a", ""]}, "input[1] is empty"),
        ({"input": [[]]}, "input[0] has no tokens"),
        ({"input": [1, -1]}, "token -1, which is out of vocabulary: token ids are from 0"),
        ({"input": [1, True]}, "texts among them"),
        ({"input": [1, "a", None]}, "texts among them"),
        ({"input": [1, "a", -1]}, "token -1, which is out of vocabulary: token ids are from 0"),
        ({"input": [1, *["a"] * 4096]}, "the limit is 4096"),
        ({"input": {"content": "a"}}, "input must be"),
        ({"input": {"content": []}}, "input.content is empty"),
        ({"input": {"content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}}, "input.content[0] must be"),
        ({"input": ["a", {"content": [{"type": "text"}]}]}, "input[1].content[0] must be"),
        ({"input": {"prompt_string": "a", "image": "b"}}, "input must be"),
        ({"input": ["a", {"prompt_string": ""}]}, "input[1].prompt_string is empty"),
        ({"input": {"prompt_string": 5}}, "input must be"),
        ({"input": [1.5]}, "input[0]"),
        ({"input": [1, 1.5]}, "texts among them"),
        ({"input": {"a": 1}}, "input must be"),
        ({"input": [None]}, "input[0]"),
        ({"input": "a", "encoding_format": "int8"}, "one of float, base64"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": "3"}, "dimensions"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"input": "a", "user": 5}, "user"),
        ({"input": "a", "padding": "max_length"}, "padding is not supported"),
    ],
)
def test_what_is_wrong_is_named(values: dict[str, Any], word: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse(**values)
    assert word in caught.value.message


def test_a_model_needs_no_name_and_unknown_fields_are_listed() -> None:
    assert parse_embeddings(b'{"input": "a"}').model is None
    assert parse(input="a", flavour="mint", user="u").unknown == ("flavour",)


@pytest.mark.parametrize("form", ["float", "base64"])
def test_vectors_are_written_in_both_forms(form: str) -> None:
    values = [0.25, -1.5, 3.0]
    request = parse(input=["a", "b"], encoding_format=form)

    vectors = [struct.pack("<3f", *values)] * 2
    answer = json.loads(embeddings_body(request, vectors, answer_id="e", created=5, model="m", prompt_tokens=7))

    assert answer["object"] == "list"
    assert answer["usage"] == {"prompt_tokens": 7, "total_tokens": 7, "completion_tokens": 0}
    assert [item["index"] for item in answer["data"]] == [0, 1]
    got = answer["data"][1]["embedding"]
    if form == "base64":
        got = list(struct.unpack("<3f", base64.b64decode(got)))
    assert got == values
