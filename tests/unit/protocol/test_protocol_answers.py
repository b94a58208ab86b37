"""The bytes of chunks, whole answers, usage and errors."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.base.errors import ContextLengthError, OverloadedError
from headrace.protocol import sse
from headrace.protocol.answers import AnswerWriter, Choice, Piece, TokenEntry, TopToken, Usage, error_body

AWKWARD = 'quote " back \\ line \n tab \t percent %d %% \u2028 \U0001f600 \x00'


def writer(kind: Any = "chat", **options: Any) -> AnswerWriter:
    return AnswerWriter(kind, "id-1", 5, 'model "%s"', "hr-%d", **options)


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_chunks_hold_any_text_and_name(kind: Any) -> None:
    chunk = json.loads(writer(kind).chunks(Piece(2, AWKWARD))[0])

    choice = chunk["choices"][0]
    assert (choice["delta"]["content"] if kind == "chat" else choice["text"]) == AWKWARD
    assert (chunk["id"], chunk["created"], chunk["model"], chunk["system_fingerprint"]) == (
        "id-1",
        5,
        'model "%s"',
        "hr-%d",
    )
    assert choice["index"] == 2
    assert choice["finish_reason"] is None
    assert "logprobs" in choice


def test_a_frame_is_one_line() -> None:
    for chunk in writer().chunks(Piece(0, AWKWARD, None, "stop")):
        frame = sse.data(chunk)
        assert frame.count(b"\n") == 2
        assert b"\r" not in frame


def test_a_chat_finish_is_a_chunk_of_its_own() -> None:
    chunks = [json.loads(chunk) for chunk in writer().chunks(Piece(0, "x", None, "length"))]

    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, "length"]
    assert chunks[1]["choices"][0]["delta"] == {}


def test_usage_is_null_until_the_chunk_that_has_it() -> None:
    out = writer(has_usage=True)

    assert json.loads(out.role(0))["usage"] is None
    assert json.loads(out.chunks(Piece(0, "x"))[0])["usage"] is None
    last = json.loads(out.usage(Usage(3, 4, 1)))
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 1},
    }


def test_text_completions_have_no_role_chunk() -> None:
    assert writer("completion").role(0) == b""


def test_legacy_alternatives_hold_the_chosen_token_too() -> None:
    entry = TokenEntry("c", -3.0, [99], [TopToken("a", -1.0, [97]), TopToken("b", -2.0, [98])], 0, 1)

    choice = Choice(0)
    choice.add(Piece(0, "c", [entry], "stop"))

    answer = json.loads(writer("completion").whole([choice], Usage(1, 1, 0), has_logprobs=True))

    assert answer["choices"][0]["logprobs"]["top_logprobs"] == [{"a": -1.0, "b": -2.0, "c": -3.0}]


def test_an_error_body_has_all_its_keys() -> None:
    body = json.loads(error_body(ContextLengthError("too long", param="prompt"), "req-1"))

    assert body == {
        "error": {
            "message": "too long",
            "type": "invalid_request_error",
            "param": "prompt",
            "code": "context_length_exceeded",
            "request_id": "req-1",
        }
    }


def test_an_error_keeps_the_code_it_was_given() -> None:
    body = json.loads(error_body(OverloadedError("later", code="draining"), ""))

    assert (body["error"]["code"], body["error"]["type"], body["error"]["param"]) == (
        "draining",
        "overloaded_error",
        None,
    )
