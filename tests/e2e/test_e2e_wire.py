"""What clients in the field trip over, byte for byte, against a real server.

Each test is a case that a public bug report of some server taught; the shapes are those of the OpenAI API.
"""

from __future__ import annotations

import json
import socket
from itertools import accumulate
from typing import Any
from urllib.parse import urlsplit

import pytest

pytestmark = pytest.mark.timeout(180)

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
LAMP = {
    "type": "function",
    "function": {
        "name": "set_lamp",
        "description": "switch a lamp",
        "parameters": {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]},
    },
}


def chat(server: Any, **fields: Any) -> dict[str, Any]:
    return {"model": server.model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, **fields}


def completion(server: Any, **fields: Any) -> dict[str, Any]:
    return {"model": server.model, "prompt": "Grass is usually green", "max_tokens": 6, "temperature": 0, **fields}


def good(answer: Any) -> Any:
    assert answer.status == 200, answer.content
    return answer.json()


def refused(answer: Any, param: str | None = None) -> Any:
    assert answer.status == 400, answer.content
    error = answer.json()["error"]
    assert error.keys() >= {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert param is None or error["param"] == param
    assert answer.headers["x-request-id"]
    return error


@pytest.mark.parametrize("stop", [[], None, "\x00\x00no", ["\x00\x00no"]], ids=["empty_list", "null", "text", "list"])
def test_stop_may_be_absent_text_or_a_list(server: Any, stop: Any) -> None:
    plain = good(server.post(TEXT, completion(server)))

    assert good(server.post(TEXT, completion(server, stop=stop)))["choices"] == plain["choices"]


@pytest.mark.parametrize("stop", [5, [""], "", [5], ["x"] * 17, ["x" * 257]], ids=str)
def test_unusable_stops_are_refused_before_any_token(server: Any, stop: Any) -> None:
    refused(server.post(TEXT, completion(server, stop=stop)), "stop")


def test_text_before_a_stop_inside_one_token_is_delivered(server: Any) -> None:
    plain = good(server.post(TEXT, completion(server, max_tokens=60)))["choices"][0]["text"]
    for size in (1, 2, 3, 5):
        for start in range(0, 20, 3):
            stop = plain[start : start + size]
            request = completion(server, max_tokens=60, stop=[stop])

            whole = good(server.post(TEXT, request))["choices"][0]
            chunks = server.chunks(TEXT, request)

            joined = "".join(chunk["choices"][0]["text"] for chunk in chunks)
            assert whole["text"] == joined == plain[: plain.index(stop)]
            assert whole["finish_reason"] == chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_usage_comes_only_when_it_is_asked_for(server: Any) -> None:
    chunks = server.chunks(CHAT, chat(server))

    assert all(len(chunk["choices"]) == 1 for chunk in chunks)
    assert not any(chunk.get("usage") for chunk in chunks)
    assert all("finish_reason" in chunk["choices"][0] for chunk in chunks)


@pytest.mark.parametrize("path", [CHAT, TEXT], ids=["chat", "text"])
def test_the_usage_chunk_is_last_and_equals_the_other_usage(server: Any, path: str) -> None:
    request = (chat if path == CHAT else completion)(server, temperature=0, stream_options={"include_usage": True})
    whole = good(server.post(path, {key: value for key, value in request.items() if key != "stream_options"}))

    chunks = server.chunks(path, request)
    usage = chunks[-1]["usage"]

    assert chunks[-1]["choices"] == []
    assert usage["prompt_tokens"] + usage["completion_tokens"] == usage["total_tokens"]
    assert usage["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert usage["prompt_tokens"] == whole["usage"]["prompt_tokens"]
    assert not any(chunk.get("usage") for chunk in chunks[:-1])
    assert chunks[-1]["object"] == ("chat.completion.chunk" if path == CHAT else "text_completion")


def test_stream_options_without_stream_is_never_an_internal_error(server: Any) -> None:
    answer = server.post(CHAT, chat(server, stream=False, stream_options={"include_usage": True}))

    assert answer.status in (200, 400)


def test_loglikelihood_requests_get_one_entry_a_token(server: Any) -> None:
    request = completion(server, max_tokens=1, logprobs=1, echo=True, seed=1234)

    body = good(server.post(TEXT, request))
    entries = body["choices"][0]["logprobs"]

    count = body["usage"]["prompt_tokens"] + 1
    assert [len(entries[key]) for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset")] == [count] * 4
    assert entries["token_logprobs"][0] is None
    assert entries["top_logprobs"][0] is None
    assert all(value <= 0 for value in entries["token_logprobs"][1:])


def test_an_echo_of_no_new_tokens_gives_the_prompt_alone(server: Any) -> None:
    body = good(server.post(TEXT, completion(server, max_tokens=0, logprobs=1, echo=True)))

    assert body["choices"][0]["text"] == "Grass is usually green"
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 0


def test_streamed_offsets_equal_those_that_are_not(server: Any) -> None:
    request = completion(server, prompt="Once upon a time", max_tokens=4, logprobs=1, echo=True)

    whole = good(server.post(TEXT, request))["choices"][0]["logprobs"]
    streamed = [chunk["choices"][0]["logprobs"] for chunk in server.chunks(TEXT, request)]

    for key in ("text_offset", "tokens", "token_logprobs"):
        assert [value for part in streamed if part for value in part[key]] == whole[key]


def test_an_echo_writes_special_tokens_out_whether_they_came_as_text_or_ids(server: Any) -> None:
    special = good(server.get("/tokenizer_info"))["special_tokens"]
    text = next(iter(special.values())) + "Grass" + next(iter(special.values())) + " is"
    ids = good(server.post("/tokenize", {"prompt": text, "add_special_tokens": False}))["tokens"]
    request = completion(server, max_tokens=0, logprobs=1, echo=True, add_special_tokens=False)

    as_text, as_ids = (good(server.post(TEXT, {**request, "prompt": given}))["choices"][0] for given in (text, ids))

    assert as_text == as_ids
    assert as_text["text"] == "".join(as_text["logprobs"]["tokens"]) == text
    tokens, offsets = as_text["logprobs"]["tokens"], as_text["logprobs"]["text_offset"]
    assert offsets == [0, *accumulate(map(len, tokens[:-1]))]


def test_logprob_tokens_are_single_tokens(server: Any) -> None:
    request = completion(server, prompt="\n1. Ann has 20", max_tokens=0, logprobs=1, echo=True)

    choice = good(server.post(TEXT, request))["choices"][0]
    tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]

    assert "".join(tokens) == choice["text"]
    assert offsets == [0, *accumulate(map(len, tokens[:-1]))]


@pytest.mark.parametrize("count", [0, 1, 5])
def test_completion_logprobs_are_an_object(server: Any, count: int) -> None:
    entries = good(server.post(TEXT, completion(server, max_tokens=3, logprobs=count)))["choices"][0]["logprobs"]

    assert entries.keys() >= {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert len(entries["tokens"]) == 3


def test_chat_logprobs_without_top_have_empty_lists(server: Any) -> None:
    body = good(server.post(CHAT, chat(server, logprobs=True, temperature=0)))

    entries = body["choices"][0]["logprobs"]["content"]
    assert len(entries) == body["usage"]["completion_tokens"]
    assert all(entry["top_logprobs"] == [] for entry in entries)


def test_streamed_logprobs_count_the_completion_tokens(server: Any) -> None:
    request = chat(
        server, max_tokens=12, temperature=0, logprobs=True, top_logprobs=1, stream_options={"include_usage": True}
    )

    *chunks, last = server.chunks(CHAT, request)

    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert sum(len(part["content"]) for part in parts if part) == last["usage"]["completion_tokens"]


@pytest.mark.parametrize(
    "fields",
    [{"top_logprobs": 2}, {"logprobs": True, "top_logprobs": 21}, {"logprobs": True, "top_logprobs": -1}],
    ids=["without_logprobs", "many", "negative"],
)
def test_top_logprobs_out_of_place_are_refused(server: Any, fields: dict[str, Any]) -> None:
    refused(server.post(CHAT, chat(server, **fields)), "top_logprobs")


def test_chat_counts_the_templates_own_tokens(server: Any) -> None:
    rendered = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"

    from_chat = good(server.post(CHAT, chat(server, max_tokens=1)))["usage"]["prompt_tokens"]
    from_text = good(server.post(TEXT, completion(server, prompt=rendered, max_tokens=1, add_special_tokens=False)))

    assert from_chat == from_text["usage"]["prompt_tokens"]


@pytest.mark.parametrize("form", ["null", "empty", "missing"])
def test_an_assistant_turn_of_tool_calls_alone_counts_the_same(server: Any, form: str) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "set_lamp", "arguments": '{"on":true}'}}
    turn: dict[str, Any] = {"role": "assistant", "tool_calls": [call]}
    turn |= {"null": {"content": None}, "empty": {"content": ""}, "missing": {}}[form]
    messages = [{"role": "user", "content": "Lamp on"}, turn, {"role": "tool", "tool_call_id": "c1", "content": "done"}]

    body = good(server.post(CHAT, chat(server, messages=messages, tools=[LAMP], tool_choice="none")))

    same = [messages[0], {**turn, "content": ""}, messages[2]]
    expected = good(server.post(CHAT, chat(server, messages=same)))
    silent = [messages[0], {"role": "assistant", "content": ""}, messages[2]]
    fewer = good(server.post(CHAT, chat(server, messages=silent)))
    assert body["usage"]["prompt_tokens"] == expected["usage"]["prompt_tokens"]
    assert body["usage"]["prompt_tokens"] > fewer["usage"]["prompt_tokens"]  # the calls are in the prompt


def test_text_parts_count_the_same_as_text(server: Any) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}]

    assert (
        good(server.post(CHAT, chat(server, messages=parts, temperature=0)))["choices"]
        == (good(server.post(CHAT, chat(server, temperature=0)))["choices"])
    )


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_length_is_the_reason_when_the_limit_ends_it(server: Any, name: str) -> None:
    request = chat(server, ignore_eos=True)
    del request["max_tokens"]

    body = good(server.post(CHAT, {**request, name: 10}))

    assert body["usage"]["completion_tokens"] == 10
    assert body["choices"][0]["finish_reason"] == "length"


def test_a_full_context_is_length_or_refused(server: Any) -> None:
    prompt = [3 + index % 250 for index in range(2040)]

    answer = server.post(TEXT, completion(server, prompt=prompt, max_tokens=64, ignore_eos=True))

    if answer.status == 200:
        body = answer.json()
        assert body["choices"][0]["finish_reason"] == "length"
        assert body["usage"]["total_tokens"] <= 2048
    else:
        assert refused(answer)["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required"},
        {"tools": [LAMP], "tool_choice": {"type": "function", "function": {"name": "other"}}},
        {"tools": [LAMP], "tool_choice": "perhaps"},
        {"tools": [{"type": "function"}]},
        {"tools": "lamp"},
    ],
    ids=["no_tools", "unknown_name", "unknown_word", "no_function", "not_a_list"],
)
def test_tool_choices_that_cannot_be_kept_are_refused(server: Any, fields: dict[str, Any]) -> None:
    refused(server.post(CHAT, chat(server, **fields)))


def test_a_schema_that_refers_to_nothing_is_refused(server: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/Nope"}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "bad", "schema": schema}}

    refused(server.post(CHAT, chat(server, response_format=form)))


def test_null_means_absent_for_every_optional_field(server: Any) -> None:
    names = (
        "temperature top_p n stop seed max_tokens stream stream_options tools tool_choice response_format logprobs "
        "top_logprobs logit_bias presence_penalty frequency_penalty user max_completion_tokens parallel_tool_calls "
        "metadata store service_tier"
    )

    good(server.post(CHAT, {**chat(server), **dict.fromkeys(names.split()), "max_completion_tokens": 3}))
    good(server.post(TEXT, completion(server, prompt=["x"], logprobs=None, seed=None, frequency_penalty=0, n=1)))


MALFORMED = [None, "hi", [], [123], [{}], [{"role": 123, "content": "x"}], [{"role": "user", "content": 123}], {}]


@pytest.mark.parametrize("messages", MALFORMED, ids=str)
def test_malformed_messages_are_refused(server: Any, messages: Any) -> None:
    refused(server.post(CHAT, chat(server, messages=messages)))


BAD_BODIES = {
    "empty": b"",
    "not_json": b"{",
    "list": b"[]",
    "nan": b'{"model": "tests/tiny", "prompt": "x", "temperature": NaN}',
    "infinity": b'{"model": "tests/tiny", "prompt": "x", "temperature": Infinity}',
    "duplicate_key": b'{"model": "tests/tiny", "prompt": "x", "prompt": "y"}',
    "deep": b'{"model": "tests/tiny", "prompt": ' + b"[" * 70 + b"]" * 70 + b"}",
    "bad_utf8": b'{"model": "tests/tiny", "prompt": "\xff"}',
    "surrogate": b'{"model": "tests/tiny", "prompt": "\\ud800"}',
}


@pytest.mark.parametrize("body", BAD_BODIES.values(), ids=BAD_BODIES)
def test_bodies_that_are_not_a_request_are_refused(server: Any, body: bytes) -> None:
    refused(server.post(TEXT, body))


def test_a_whole_float_is_a_legal_integer(server: Any) -> None:
    assert len(good(server.post(CHAT, chat(server, n=1.0, max_tokens=2.0)))["choices"]) == 1


def test_unknown_fields_are_named_and_ignored(server: Any) -> None:
    answer = server.post(CHAT, chat(server, my_field=1))

    good(answer)
    assert "my_field" in answer.headers["x-headrace-ignored-fields"]


def test_a_context_that_cannot_hold_the_prompt_says_both_numbers(server: Any) -> None:
    for stream in (False, True):
        request = chat(server, messages=[{"role": "user", "content": "word " * 20_000}], stream=stream)
        error = refused(server.post(CHAT, request))

        assert error["code"] == "context_length_exceeded"
        assert "maximum context length" in error["message"]
        assert "2048" in error["message"]


def test_the_second_time_a_prompt_is_partly_cached(server: Any) -> None:
    request = completion(server, prompt="alpha beta " * 20, max_tokens=2)

    first, second = (good(server.post(TEXT, request)) for _ in range(2))
    *_, last = server.chunks(TEXT, {**request, "stream_options": {"include_usage": True}})

    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert 0 < cached < second["usage"]["prompt_tokens"]
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
    assert first["choices"] == second["choices"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_socket_closed_early_frees_the_worker(server: Any, stream: bool) -> None:
    body = json.dumps(chat(server, max_tokens=400, ignore_eos=True, stream=stream)).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"

    with socket.create_connection((urlsplit(server.url).hostname, urlsplit(server.url).port), timeout=60) as link:
        link.sendall(head.encode() + body)
        if stream:
            link.recv(10)

    server.wait_idle()


def test_unknown_models_and_routes_are_404_with_an_error_object(server: Any) -> None:
    for answer in (
        server.get("/v1/models/no-such"),
        server.post(CHAT, chat(server) | {"model": "no-such"}),
        server.get("/v1/nothing"),
    ):
        assert answer.status == 404
        assert answer.json()["error"]["message"]


def test_model_ids_with_slashes_are_found_encoded_or_not(server: Any) -> None:
    (model,) = good(server.get("/v1/models"))["data"]

    assert model.keys() >= {"id", "object", "created", "owned_by"}
    assert good(server.get("/v1/models/tests/tiny"))["id"] == good(server.get("/v1/models/tests%2Ftiny"))["id"]


def test_text_is_never_normalised_or_cut(server: Any) -> None:
    prompt = "e\u0301 \u200b\ufeff\x00 🏳️‍🌈 ﬁ"

    body = good(server.post(TEXT, completion(server, prompt=prompt, max_tokens=0, echo=True)))

    assert body["choices"][0]["text"] == prompt
