"""Chat and text completions over the mock worker: shapes, order of chunks, text, usage, log-probabilities."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.testing.mock_worker import Reply, Script

CHAT = {"model": "bytes", "messages": [{"role": "user", "content": "Say hi"}]}
COMPLETION = {"model": "bytes", "prompt": "Once"}
CHAT_PATH = "/v1/chat/completions"
COMPLETION_PATH = "/v1/completions"


def chunks_of(frames: list[str]) -> list[Any]:
    assert frames[-1] == "[DONE]"
    return [json.loads(frame) for frame in frames[:-1]]


def chat_text(chunks: list[Any], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content", "") for choice in choices)


async def test_chat_answers_with_the_workers_text(make_house: Any) -> None:
    house = await make_house(Script(default=Reply(text="Hello")))

    status, body, headers = await house.post(CHAT_PATH, CHAT)

    assert status == 200
    assert body["object"] == "chat.completion"
    message = {"role": "assistant", "content": "Hello", "refusal": None}
    assert body["choices"] == [
        {
            "index": 0,
            "message": message,
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
            "token_ids": None,
        }
    ]
    prompt_tokens = len("user: Say hi\nassistant:")
    assert body["usage"] == {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": 5,
        "total_tokens": prompt_tokens + 5,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert isinstance(body["system_fingerprint"], str)
    assert headers["x-request-id"]


async def test_a_conversation_is_counted_as_its_answer_counts_it(make_house: Any) -> None:
    house = await make_house(Script(default=Reply(text="Hello")))

    _, answer, _ = await house.post(CHAT_PATH, CHAT)
    status, counted, headers = await house.post(CHAT_PATH + "/input_tokens", {**CHAT, "flavour": "mint"})

    assert (status, counted) == (200, {"input_tokens": answer["usage"]["prompt_tokens"]})
    assert headers["x-headrace-ignored-fields"] == "flavour"
    assert len(house.worker.received) == 1


async def test_chat_stream_is_role_deltas_finish_done(make_house: Any) -> None:
    house = await make_house(Script(default=Reply(text="Hello")))

    chunks = chunks_of(await house.stream(CHAT_PATH, CHAT))

    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant"}
    assert chat_text(chunks) == "Hello"
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["stop"]
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    assert all(len(chunk["choices"]) == 1 and "usage" not in chunk for chunk in chunks)


async def test_stream_headers_forbid_buffering(make_house: Any) -> None:
    house = await make_house()

    async with house.client.post(house.url(CHAT_PATH), json={**CHAT, "stream": True}) as response:
        await response.read()

    assert response.headers["x-accel-buffering"] == "no"
    assert response.headers["cache-control"] == "no-store"
    assert response.headers["content-type"].startswith("text/event-stream")


@pytest.mark.parametrize(("path", "body"), [(CHAT_PATH, CHAT), (COMPLETION_PATH, COMPLETION)], ids=["chat", "text"])
async def test_usage_chunk_comes_last_when_asked_for(make_house: Any, path: str, body: dict[str, Any]) -> None:
    house = await make_house(Script(default=Reply(text="Hello", cached_tokens=2)))

    chunks = chunks_of(await house.stream(path, {**body, "stream_options": {"include_usage": True}}))
    _, whole, _ = await house.post(path, body)

    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


async def test_continuous_usage_counts_up(make_house: Any) -> None:
    house = await make_house(Script(default=Reply(text="Hello", inter_token_s=0.001)))
    options = {"include_usage": True, "continuous_usage_stats": True}

    chunks = chunks_of(await house.stream(COMPLETION_PATH, {**COMPLETION, "stream_options": options}))

    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 5


async def test_text_completion_streams_text(make_house: Any) -> None:
    house = await make_house(Script(default=Reply(text=" upon a time")))

    chunks = chunks_of(await house.stream(COMPLETION_PATH, {**COMPLETION, "max_tokens": 40}))

    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == " upon a time"
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


async def test_completion_default_is_sixteen_tokens(make_house: Any) -> None:
    house = await make_house(Script(default=Reply(text="x" * 40)))

    _, body, _ = await house.post(COMPLETION_PATH, COMPLETION)

    assert body["usage"]["completion_tokens"] == 16
    assert body["choices"][0]["finish_reason"] == "length"


async def test_max_completion_tokens_limits_a_chat(make_house: Any) -> None:
    house = await make_house(Script(default=Reply(text="x" * 40)))

    _, body, _ = await house.post(CHAT_PATH, {**CHAT, "max_completion_tokens": 10})

    assert body["usage"]["completion_tokens"] == 10
    assert body["choices"][0]["finish_reason"] == "length"


async def test_split_characters_are_never_shown_in_halves(make_house: Any) -> None:
    text = "naïve 東京 👩‍👩‍👧"
    house = await make_house(Script(default=Reply(text=text, inter_token_s=0.0005)))

    frames = await house.stream(CHAT_PATH, CHAT)
    _, whole, _ = await house.post(CHAT_PATH, CHAT)

    assert all("\ufffd" not in frame for frame in frames)
    assert chat_text(chunks_of(frames)) == whole["choices"][0]["message"]["content"] == text


async def test_a_character_cut_by_the_limit_ends_alike_in_both_forms(make_house: Any) -> None:
    house = await make_house(Script(default=Reply(text="東京")))

    frames = await house.stream(CHAT_PATH, {**CHAT, "max_tokens": 4})
    _, whole, _ = await house.post(CHAT_PATH, {**CHAT, "max_tokens": 4})

    assert chat_text(chunks_of(frames)) == whole["choices"][0]["message"]["content"] == "東\ufffd"
    assert whole["choices"][0]["finish_reason"] == "length"
    assert whole["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize(
    ("stop", "expected", "tokens"),
    [
        pytest.param("lo wor", "Hel", 9, id="across tokens"),
        pytest.param(["zzz", "lo x", " w"], "Hello", 7, id="first of several, near miss let go"),
        pytest.param(["\n"], "Hello world", 12, id="newline"),
        pytest.param(["lo", "lo w"], "Hel", 5, id="prefix of another"),
    ],
)
async def test_stop_string_ends_the_text_before_it(make_house: Any, stop: Any, expected: str, tokens: int) -> None:
    house = await make_house(Script(default=Reply(text="Hello world\nand on and on", inter_token_s=0.0005)))

    frames = await house.stream(CHAT_PATH, {**CHAT, "stop": stop, "max_tokens": 50})
    _, whole, _ = await house.post(CHAT_PATH, {**CHAT, "stop": stop, "max_tokens": 50})

    assert chat_text(chunks_of(frames)) == whole["choices"][0]["message"]["content"] == expected
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert whole["usage"]["completion_tokens"] == tokens


async def test_text_held_for_a_stop_that_never_comes_is_flushed(make_house: Any) -> None:
    house = await make_house(Script(default=Reply(text="Hello wor")))

    frames = await house.stream(CHAT_PATH, {**CHAT, "stop": ["world"]})

    assert chat_text(chunks_of(frames)) == "Hello wor"


async def test_n_streams_every_index_once_with_role_and_finish(make_house: Any) -> None:
    script = Script(replies=[Reply(text="one"), Reply(text="two")])
    house = await make_house(script)
    body = {**CHAT, "n": 2, "seed": 7, "stream_options": {"include_usage": True}}

    chunks = chunks_of(await house.stream(CHAT_PATH, body))

    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    for index, text in ((0, "one"), (1, "two")):
        own = [choice for choice in choices if choice["index"] == index]
        assert own[0]["delta"]["role"] == "assistant"
        assert sum("role" in choice["delta"] for choice in own) == 1
        assert [choice["finish_reason"] for choice in own if choice["finish_reason"]] == ["stop"]
        assert chat_text(chunks, index) == text
    assert chunks[-1]["usage"]["completion_tokens"] == 6
    assert chunks[-1]["usage"]["prompt_tokens"] == len("user: Say hi\nassistant:")
    seeds = [submit.sampling.seed for submit in house.worker.received]
    assert seeds[0] == 7
    assert len(set(seeds)) == 2


async def test_a_list_of_prompts_gives_choices_in_its_order(make_house: Any) -> None:
    house = await make_house(Script(replies=[Reply(text="a"), Reply(text="b"), Reply(text="c"), Reply(text="d")]))

    _, body, _ = await house.post(COMPLETION_PATH, {"model": "bytes", "prompt": ["x", "yy"], "n": 2})

    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [(0, "a"), (1, "b"), (2, "c"), (3, "d")]
    assert body["usage"]["prompt_tokens"] == 3
    assert [len(submit.prompt_ids) for submit in house.worker.received] == [1, 1, 2, 2]


@pytest.mark.parametrize(
    "prompt", ["Once", ["Once"], list(b"Once"), [list(b"Once")]], ids=["text", "texts", "ids", "lists"]
)
async def test_every_form_of_prompt_counts_the_same(make_house: Any, prompt: Any) -> None:
    house = await make_house()

    _, body, _ = await house.post(COMPLETION_PATH, {"model": "bytes", "prompt": prompt})

    assert body["usage"]["prompt_tokens"] == 4


async def test_chat_logprobs_join_to_the_content(make_house: Any) -> None:
    house = await make_house(Script(default=Reply(text="東 ok")))

    _, body, _ = await house.post(CHAT_PATH, {**CHAT, "logprobs": True, "top_logprobs": 3})

    content = body["choices"][0]["logprobs"]["content"]
    text = body["choices"][0]["message"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content) == text.encode()
    assert all(len(entry["top_logprobs"]) == 3 for entry in content)
    assert content[-1]["logprob"] == -0.5


async def test_chat_logprobs_without_alternatives(make_house: Any) -> None:
    house = await make_house(Script(default=Reply(text="ok")))

    frames = await house.stream(CHAT_PATH, {**CHAT, "logprobs": True})

    entries = [
        entry
        for chunk in chunks_of(frames)
        for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert [entry["top_logprobs"] for entry in entries] == [[], []]


async def test_logprobs_end_where_the_text_ends_at_a_stop_string(make_house: Any) -> None:
    house = await make_house(Script(default=Reply(text="Hello world")))

    _, body, _ = await house.post(CHAT_PATH, {**CHAT, "logprobs": True, "stop": " wor"})

    entries = body["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == body["choices"][0]["message"]["content"] == "Hello"


async def test_legacy_logprobs_have_four_columns(make_house: Any) -> None:
    house = await make_house(Script(default=Reply(text="ab")))

    _, body, _ = await house.post(COMPLETION_PATH, {**COMPLETION, "logprobs": 2})

    assert body["choices"][0]["logprobs"] == {
        "text_offset": [0, 1],
        "token_logprobs": [-0.5, -0.5],
        "tokens": ["a", "b"],
        "top_logprobs": [{"a": -0.5, "b": -1.5}, {"b": -0.5, "c": -1.5}],
    }


async def test_echo_with_logprobs_scores_the_prompt(make_house: Any) -> None:
    house = await make_house(Script(default=Reply(text="!")))
    body = {"model": "bytes", "prompt": "Grass", "echo": True, "logprobs": 1, "max_tokens": 1}

    _, answer, _ = await house.post(COMPLETION_PATH, body)

    choice = answer["choices"][0]
    columns = choice["logprobs"]
    assert choice["text"] == "Grass!"
    assert {len(column) for column in columns.values()} == {6}
    assert columns["token_logprobs"][0] is None
    assert columns["top_logprobs"][0] is None
    assert all(value <= 0 for value in columns["token_logprobs"][1:])
    assert "".join(columns["tokens"]) == "Grass!"
    assert answer["usage"]["completion_tokens"] == 1


async def test_echo_alone_generates_nothing(make_house: Any) -> None:
    house = await make_house()
    body = {"model": "bytes", "prompt": "Grass", "echo": True, "logprobs": 1, "max_tokens": 0}

    _, answer, _ = await house.post(COMPLETION_PATH, body)

    assert answer["choices"][0]["text"] == "Grass"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == 5
    assert answer["usage"]["completion_tokens"] == 0


async def test_streamed_text_offsets_count_the_echoed_prompt(make_house: Any) -> None:
    house = await make_house(Script(default=Reply(text="abcd", inter_token_s=0.0005)))
    body = {"model": "bytes", "prompt": "Once", "echo": True, "logprobs": 1, "max_tokens": 4}

    frames = await house.stream(COMPLETION_PATH, body)
    _, whole, _ = await house.post(COMPLETION_PATH, body)

    logprobs = [chunk["choices"][0]["logprobs"] for chunk in chunks_of(frames)]
    offsets = [offset for entry in logprobs if entry for offset in entry["text_offset"]]
    assert offsets == whole["choices"][0]["logprobs"]["text_offset"] == list(range(8))


async def test_ids_outside_the_vocabulary_cost_no_answer(make_house: Any) -> None:
    house = await make_house(Script(default=Reply(ids=[72, 105, 99_999])))

    status, body, _ = await house.post(CHAT_PATH, {**CHAT, "logprobs": True, "top_logprobs": 2})

    assert status == 200
    assert body["choices"][0]["message"]["content"] == "Hi"


async def test_the_workers_end_of_text_is_no_text(make_house: Any) -> None:
    house = await make_house(Script(default=Reply(ids=[72, 105, 7, 72]), eos_token_ids=(7,)))

    _, body, _ = await house.post(CHAT_PATH, CHAT)

    assert body["choices"][0]["message"]["content"] == "Hi"
    assert body["choices"][0]["finish_reason"] == "stop"


async def test_unknown_fields_are_named_and_nulls_are_absent(make_house: Any) -> None:
    house = await make_house()
    extra = {"store": True, "metadata": {"a": "b"}, "flavour": 1, "temperature": None, "tools": None, "nothing": None}

    status, _, headers = await house.post(CHAT_PATH, {**CHAT, **extra})

    assert status == 200
    assert headers["x-headrace-ignored-fields"] == "store,metadata,flavour"


async def test_unseeded_requests_get_different_seeds(make_house: Any) -> None:
    house = await make_house()

    for _ in range(3):
        await house.post(CHAT_PATH, CHAT)

    assert len({submit.sampling.seed for submit in house.worker.received}) == 3
