"""Bodies that lenient parsers repair, and this one refuses."""

from __future__ import annotations

import json

import pytest

from headrace.base.errors import RequestError
from headrace.protocol.strict_json import MAX_DEPTH, decode_object


@pytest.mark.parametrize(
    ("body", "code"),
    [
        pytest.param(b"", "invalid_json", id="empty"),
        pytest.param(b"[]", "invalid_json", id="a list"),
        pytest.param(b'"x"', "invalid_json", id="a string"),
        pytest.param(b"{", "invalid_json", id="cut"),
        pytest.param(b'{"a":1}x', "invalid_json", id="trailing text"),
        pytest.param(b'{"a":1,}', "invalid_json", id="trailing comma"),
        pytest.param(b"{'a':1}", "invalid_json", id="single quotes"),
        pytest.param(b'{"a":NaN}', "invalid_json", id="NaN"),
        pytest.param(b'{"a":Infinity}', "invalid_json", id="Infinity"),
        pytest.param(b'{"a":-Infinity}', "invalid_json", id="minus Infinity"),
        pytest.param(b'{"a":1e999}', "invalid_json", id="overflowing float"),
        pytest.param(b'{"a":[1.5,1e999]}', "invalid_json", id="overflowing float in a list"),
        pytest.param(b'{"a":18446744073709551616}', "invalid_json", id="65 bits"),
        pytest.param(b'{"a":-9223372036854775809}', "invalid_json", id="minus 65 bits"),
        pytest.param(b'{"a":' + b"9" * 5000 + b"}", "invalid_json", id="5000 digits"),
        pytest.param(b'{"a":1,"a":2}', "invalid_json", id="duplicate key"),
        pytest.param(b'{"x":{"a":1,"b":0,"a":2}}', "invalid_json", id="duplicate key inside"),
        pytest.param(b'{"a":"\x01"}', "invalid_json", id="raw control character"),
        pytest.param(b'\xef\xbb\xbf{"a":1}', "invalid_json", id="byte order mark"),
        pytest.param(b'{"a":"\xff"}', "invalid_utf8", id="no UTF-8"),
        pytest.param(b'{"a":"\xed\xa0\x80"}', "invalid_utf8", id="encoded surrogate"),
        pytest.param(b'{"a":"\\ud800"}', "invalid_utf8", id="lone surrogate"),
        pytest.param(b'{"a":["\\udc00x"]}', "invalid_utf8", id="lone low surrogate in a list"),
        pytest.param(b'{"\\ud800":1}', "invalid_utf8", id="lone surrogate in a key"),
        pytest.param(b'{"a":' + b"[" * 64 + b"]" * 64 + b"}", "json_too_deep", id="65 levels"),
        pytest.param(b'{"a":' * 100_000, "json_too_deep", id="100,000 objects"),
        pytest.param(b'{"a":' + b"[" * 250_000, "json_too_deep", id="250,000 lists"),
        pytest.param(
            b'{"a":{' + b",".join(b'"%d":1' % i for i in range(10_001)) + b"}}", "invalid_json", id="10,002 keys"
        ),
        pytest.param(b'{"a":[' + b",".join([b"[]"] * 60_000) + b"]}", "invalid_json", id="60,000 lists"),
        pytest.param(b'{"a":[' + b",".join([b"1"] * 600_000) + b"]}", "invalid_json", id="600,000 numbers"),
        pytest.param(b'{"a":[' + b",".join([b'""'] * 600_000) + b"]}", "invalid_json", id="600,000 strings"),
    ],
)
def test_a_bad_body_is_refused_with_its_code(body: bytes, code: str) -> None:
    with pytest.raises(RequestError) as caught:
        decode_object(body)

    assert (caught.value.http_status, caught.value.stable_code) == (400, code)
    assert len(caught.value.message) < 200


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"{}", {}),
        (b' {"a": [1, 2.5, true, null, "x"]} ', {"a": [1, 2.5, True, None, "x"]}),
        (b'{"a":18446744073709551615}', {"a": 2**64 - 1}),
        (b'{"a":"\\ud83d\\ude00"}', {"a": "\U0001f600"}),
        (b'{"a":"\\u0000"}', {"a": "\x00"}),
        (b'{"a":{"b":1},"c":{"b":1}}', {"a": {"b": 1}, "c": {"b": 1}}),
    ],
    ids=["empty", "values", "64 bits", "surrogate pair", "NUL", "same key in two objects"],
)
def test_a_good_body_is_read(body: bytes, expected: dict[str, object]) -> None:
    assert decode_object(body) == expected


def test_punctuation_inside_of_text_is_not_counted() -> None:
    text = '[{":",,\\\\"}]' * 100_000
    body = json.dumps({"a": text}).encode()

    assert decode_object(body) == {"a": text}


def test_the_deepest_legal_body_is_read() -> None:
    inner = MAX_DEPTH - 1

    value = decode_object(b'{"a":' + b"[" * inner + b"]" * inner + b"}")

    assert list(value) == ["a"]
