"""Token ids on the wire: bad words, ids of prompt and answer, names by id, which end of a prompt is cut."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from headrace.protocol.openapi import build_document
from headrace.testing.mock_worker import Reply, Script

CHAT = {"model": "bytes", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "bytes", "prompt": "abcd"}
SAID = "h\u00e9 ho"
IDS = list(SAID.encode())
PATHS = ("/v1/chat/completions", "/v1/completions")


def chunks_of(frames: list[str]) -> list[Any]:
    assert frames[-1] == "[DONE]"
    return [json.loads(frame) for frame in frames[:-1]]


@pytest.mark.parametrize("path", PATHS)
async def test_ids_of_prompt_and_answer_come_where_they_are_wanted(make_house: Any, path: str) -> None:
    house = await make_house(Script(default=Reply(text=SAID)))
    body = (CHAT if "chat" in path else TEXT) | {"return_token_ids": True, "max_tokens": 9}

    _, whole, _ = await house.post(path, body)
    chunks = chunks_of(await house.stream(path, body))

    assert whole["choices"][0]["token_ids"] == IDS
    assert [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", [])] == IDS
    holders = [whole, *chunks] if "chat" in path else [item["choices"][0] for item in (whole, *chunks)]
    prompts = [holder["prompt_token_ids"] for holder in holders if "prompt_token_ids" in holder]
    assert prompts == [house.worker.received[0].prompt_ids] * 2
    assert "prompt_token_ids" in holders[1]


async def test_ids_are_null_where_nobody_asks_for_them(make_house: Any) -> None:
    house = await make_house(Script(default=Reply(text=SAID)))

    _, text, _ = await house.post("/v1/completions", TEXT | {"return_token_ids": False})
    _, chat, _ = await house.post("/v1/chat/completions", CHAT)
    chunks = chunks_of(await house.stream("/v1/completions", TEXT))

    names = ("token_ids", "prompt_token_ids", "prompt_logprobs")
    assert [text["choices"][0][name] for name in names] == [None] * 3
    assert [chat["choices"][0]["token_ids"], chat["prompt_token_ids"], chat["prompt_logprobs"]] == [None] * 3
    assert not any("token_ids" in chunk["choices"][0] for chunk in chunks)


async def test_the_chosen_token_stands_before_the_alternatives(make_house: Any) -> None:
    house = await make_house(Script(default=Reply(text="ab")))

    _, text, _ = await house.post("/v1/completions", TEXT | {"logprobs": 3})

    tops = text["choices"][0]["logprobs"]["top_logprobs"]
    assert [next(iter(top)) for top in tops] == ["a", "b"]


async def test_the_chosen_token_is_among_the_alternatives_even_of_none(make_house: Any) -> None:
    house = await make_house(Script(default=Reply(text="ab")))

    _, text, _ = await house.post("/v1/completions", TEXT | {"logprobs": 0})

    assert [list(top) for top in text["choices"][0]["logprobs"]["top_logprobs"]] == [["a"], ["b"]]


async def test_ids_stop_where_a_stop_string_ends_the_answer_and_an_echo_has_none(make_house: Any) -> None:
    house = await make_house(Script(default=Reply(text="ab. cd")))
    body = TEXT | {"return_token_ids": True, "stop": ".", "echo": True, "max_tokens": 9}

    _, whole, _ = await house.post("/v1/completions", body)
    chunks = chunks_of(await house.stream("/v1/completions", body))

    assert whole["choices"][0]["text"] == "abcdab"
    assert whole["choices"][0]["token_ids"] == list(b"ab.")
    assert [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]] == list(b"ab.")


async def test_logprobs_can_name_tokens_by_their_id(make_house: Any) -> None:
    house = await make_house(Script(default=Reply(text=SAID)))
    by_id = {"return_tokens_as_token_ids": True, "max_tokens": 9}

    _, text, _ = await house.post("/v1/completions", TEXT | by_id | {"logprobs": 1})
    _, chat, _ = await house.post("/v1/chat/completions", CHAT | by_id | {"logprobs": True, "top_logprobs": 1})

    names = [f"token_id:{token}" for token in IDS]
    assert text["choices"][0]["logprobs"]["tokens"] == names
    assert [next(iter(top)) for top in text["choices"][0]["logprobs"]["top_logprobs"]] == names
    assert [entry["token"] for entry in chat["choices"][0]["logprobs"]["content"]] == names


@pytest.mark.parametrize("path", PATHS)
async def test_bad_words_reach_the_worker_as_tokens(make_house: Any, path: str) -> None:
    house = await make_house(Script())

    status, _, _ = await house.post(path, (CHAT if "chat" in path else TEXT) | {"bad_words": ["ox", " é"]})

    assert status == 200
    # With a byte for a token a blank is a token of its own, so only the plain forms have a first token to differ in.
    assert house.worker.received[0].bad_words == [list(b"ox"), list("é".encode())]


@pytest.mark.parametrize("words", ["x", [""], ["  "], [5], ["x" * 257], ["x"] * 65], ids=str)
async def test_wrong_bad_words_are_refused_by_name(make_house: Any, words: Any) -> None:
    house = await make_house(Script())

    status, body, _ = await house.post("/v1/completions", TEXT | {"bad_words": words})

    assert (status, body["error"]["param"]) == (400, "bad_words")


async def test_a_prompt_is_cut_at_the_side_that_is_named(make_house: Any) -> None:
    house = await make_house(Script())

    for side in ("left", "right", None):
        await house.post("/v1/completions", TEXT | {"truncate_prompt_tokens": 2, "truncation_side": side})
    status, body, _ = await house.post("/v1/completions", TEXT | {"truncation_side": "middle"})

    assert [bytes(submit.prompt_ids) for submit in house.worker.received] == [b"cd", b"ab", b"cd"]
    assert (status, body["error"]["param"]) == (400, "truncation_side")


async def test_continuous_usage_is_in_every_chunk_and_begins_at_nothing(make_house: Any) -> None:
    house = await make_house(Script(default=Reply(text="Hello")))
    options = {"include_usage": True, "continuous_usage_stats": True}

    chunks = chunks_of(await house.stream("/v1/chat/completions", CHAT | {"stream_options": options}))

    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts[0] == 0
    assert counts == sorted(counts)
    assert counts[-1] == 5
    assert chunks[-1]["choices"] == []


async def test_pieces_of_tokens_are_texts_or_bytes(make_house: Any) -> None:
    house = await make_house(Script())

    _, body, _ = await house.post("/tokenize", {"content": "aé", "with_pieces": True})

    assert body["tokens"] == [
        {"id": 97, "piece": "a"},
        {"id": 195, "piece": [195]},
        {"id": 169, "piece": [169]},
    ]
    document = build_document("1")
    components: Any = document["components"]
    jsonschema.validate(body, {**components["schemas"]["Tokens"], "components": components})


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({}, id="plain"),
        pytest.param(
            {"return_token_ids": True, "prompt_logprobs": 1, "truncate_prompt_tokens": 3}, id="ids-and-scores"
        ),
        pytest.param({"logprobs": 2, "echo": True}, id="echo"),
        pytest.param({"max_tokens": 0, "prompt_logprobs": 2}, id="prompt-alone"),
    ],
)
@pytest.mark.parametrize("path", PATHS)
async def test_answers_are_as_the_document_describes_them(make_house: Any, path: str, more: dict[str, Any]) -> None:
    house = await make_house(Script(default=Reply(text=SAID)))
    if "chat" in path:
        tops = {"logprobs": True, "top_logprobs": 2} if "logprobs" in more else {}
        more = {**more, "max_tokens": 9, "echo": False, **tops}
    document: Any = build_document("1")
    kind = "ChatAnswer" if "chat" in path else "CompletionAnswer"

    status, body, _ = await house.post(path, (CHAT if "chat" in path else TEXT) | {"max_tokens": 9} | more)

    assert status == 200
    shape = {**document["components"]["schemas"][kind], "components": document["components"]}
    jsonschema.validate(body, shape)
    assert set(body) == set(shape["properties"])
    assert set(body["choices"][0]) == set(shape["properties"]["choices"]["items"]["properties"])


@pytest.mark.parametrize("origin", ["http://localhost:3000", "http://127.0.0.1", "http://[::1]:9"])
async def test_pages_of_this_machine_may_ask_and_call(make_house: Any, origin: str) -> None:
    house = await make_house(Script())
    question = {"origin": origin, "access-control-request-method": "POST"}

    async with house.client.options(house.url("/v1/completions"), headers=question) as asked:
        assert asked.status == 200
        assert asked.headers["access-control-allow-origin"] == origin
        assert "POST" in asked.headers["access-control-allow-methods"]
    status, _, headers = await house.post("/v1/completions", TEXT, origin=origin)
    assert (status, headers["access-control-allow-origin"]) == (200, origin)
    async with house.client.get(house.url("/v1/models"), headers={"origin": origin}) as listed:
        assert listed.headers["access-control-allow-origin"] == origin


@pytest.mark.parametrize("origin", ["http://localhost.evil.example", "http://evil.example", "null", "localhost", ""])
async def test_pages_of_other_sites_are_promised_nothing_and_may_not_call(make_house: Any, origin: str) -> None:
    house = await make_house(Script())
    question = {"origin": origin, "access-control-request-method": "POST"}

    async with house.client.options(house.url("/v1/completions"), headers=question) as asked:
        assert asked.status == 200
        assert [name for name in asked.headers if name.lower().startswith("access-control")] == []
        assert asked.headers["vary"] == "origin"
    status, body, headers = await house.post("/v1/completions", TEXT, origin=origin)
    assert (status, body["error"]["code"]) == (403, "origin_not_allowed")
    assert "access-control-allow-origin" not in headers
