"""Tools, thoughts and wished-for forms through a real front, with a worker that plays what models write."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.protocol.frames import GrammarKind
from headrace.testing.mock_worker import Reply, Script
from headrace.text.message import Dialect
from headrace.text.reasoning import Marks
from headrace.text.tool_format import HERMES, LLAMA3

CHAT_PATH = "/v1/chat/completions"
TOOL = {
    "type": "function",
    "function": {
        "name": "set_lamp",
        "description": "switch a lamp",
        "parameters": {
            "type": "object",
            "properties": {"room": {"type": "string"}, "on": {"type": "boolean"}},
            "required": ["room", "on"],
        },
    },
}
CHAT = {"model": "bytes", "messages": [{"role": "user", "content": "Lamp on in the hall"}], "tools": [TOOL]}
ARGUMENTS = '{"room": "Håll", "on": true}'
WRITTEN = f'Of course.\n<tool_call>\n{{"name": "set_lamp", "arguments": {ARGUMENTS}}}\n</tool_call>'
DIALECT = Dialect(HERMES, Marks("<think>", "</think>"))


def joined(frames: list[str]) -> dict[str, Any]:
    """Joins a stream's chunks as a client does."""
    assert frames[-1] == "[DONE]"
    chunks = [json.loads(frame) for frame in frames[:-1]]
    message: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "finish": None}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        delta = choice["delta"]
        message["content"] += delta.get("content") or ""
        message["reasoning"] += delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls", []):
            if "id" in call:
                assert call["type"] == "function"
                assert call["index"] == len(message["calls"])
                message["calls"].append([call["function"]["name"], ""])
            message["calls"][call["index"]][1] += call["function"]["arguments"]
        message["finish"] = choice["finish_reason"] or message["finish"]
    return message


async def test_a_call_is_parted_from_the_text_streamed_or_not(make_house: Any) -> None:
    house = await make_house(Script(default=Reply(text=WRITTEN)), dialect=DIALECT)

    status, body, _ = await house.post(CHAT_PATH, CHAT)
    streamed = joined(await house.stream(CHAT_PATH, CHAT))

    assert status == 200
    (choice,) = body["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Of course."
    assert call["type"] == "function"
    assert call["id"]
    assert call["function"] == {"name": "set_lamp", "arguments": ARGUMENTS}
    assert streamed == {
        "content": "Of course.",
        "reasoning": "",
        "calls": [["set_lamp", ARGUMENTS]],
        "finish": "tool_calls",
    }


async def test_arguments_stream_as_they_are_made(make_house: Any) -> None:
    house = await make_house(Script(default=Reply(text=WRITTEN)), dialect=DIALECT)

    frames = await house.stream(CHAT_PATH, CHAT)

    parts = [
        call["function"]["arguments"]
        for frame in frames[:-1]
        for call in json.loads(frame)["choices"][0]["delta"].get("tool_calls", [])
    ]
    assert len(parts) > len(ARGUMENTS) / 2  # a token is a byte here: no lump


async def test_a_call_without_text_has_null_content(make_house: Any) -> None:
    text = '{"name": "set_lamp", "parameters": {}}'
    house = await make_house(Script(default=Reply(text=text)), dialect=Dialect(LLAMA3, None))

    _, body, _ = await house.post(CHAT_PATH, CHAT)

    assert body["choices"][0]["message"]["content"] is None
    assert body["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] == "{}"


async def test_a_call_that_is_cut_ends_by_length_with_what_there_is(make_house: Any) -> None:
    house = await make_house(Script(default=Reply(text=WRITTEN)), dialect=DIALECT)
    limit = len(WRITTEN.encode()) - 20

    _, body, _ = await house.post(CHAT_PATH, {**CHAT, "max_tokens": limit})
    streamed = joined(await house.stream(CHAT_PATH, {**CHAT, "max_tokens": limit}))

    (choice,) = body["choices"]
    assert choice["finish_reason"] == streamed["finish"] == "length"
    partial = choice["message"]["tool_calls"][0]["function"]["arguments"]
    assert partial == streamed["calls"][0][1]
    assert ARGUMENTS.startswith(partial)
    assert partial


async def test_a_stop_string_flushes_what_was_held_back(make_house: Any) -> None:
    house = await make_house(Script(default=Reply(text="Well <tool_c! and on")), dialect=DIALECT)

    _, body, _ = await house.post(CHAT_PATH, {**CHAT, "stop": ["!"]})
    streamed = joined(await house.stream(CHAT_PATH, {**CHAT, "stop": ["!"]}))

    assert body["choices"][0]["message"]["content"] == streamed["content"] == "Well <tool_c"
    assert streamed["finish"] == "stop"


async def test_without_tools_marks_are_text_and_with_none_too(make_house: Any) -> None:
    house = await make_house(Script(default=Reply(text=WRITTEN)), dialect=DIALECT)

    for body in ({**CHAT, "tools": None}, {**CHAT, "tool_choice": "none"}):
        _, answer, _ = await house.post(CHAT_PATH, body)
        assert answer["choices"][0]["message"]["content"] == WRITTEN
        assert "tool_calls" not in answer["choices"][0]["message"]


async def test_thoughts_come_apart(make_house: Any) -> None:
    house = await make_house(Script(default=Reply(text="<think>\nA lamp.\n</think>\n\nIt is on.")), dialect=DIALECT)

    _, body, _ = await house.post(CHAT_PATH, {**CHAT, "logprobs": True})
    streamed = joined(await house.stream(CHAT_PATH, CHAT))

    message = body["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("A lamp.", "It is on.")
    assert (streamed["reasoning"], streamed["content"], streamed["finish"]) == ("A lamp.", "It is on.", "stop")
    assert len(body["choices"][0]["logprobs"]["content"]) == body["usage"]["completion_tokens"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "set_lamp"}}])
async def test_a_forced_call_is_a_grammar_for_the_worker(make_house: Any, choice: Any) -> None:
    text = f'<tool_call>\n{{"name": "set_lamp", "arguments": {ARGUMENTS}}}\n</tool_call>'
    house = await make_house(Script(default=Reply(text=text)), dialect=DIALECT)

    _, body, _ = await house.post(CHAT_PATH, {**CHAT, "tool_choice": choice})

    (submit,) = house.worker.received
    assert submit.grammar.kind is GrammarKind.LARK
    assert "set_lamp" in submit.grammar.source
    assert body["choices"][0]["finish_reason"] == "tool_calls"
    assert body["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] == ARGUMENTS


async def test_a_wished_form_reaches_the_worker_and_a_bad_one_does_not(make_house: Any) -> None:
    house = await make_house()
    plain = {**CHAT, "tools": None}
    bad = {"type": "object", "properties": {"a": {"$ref": "#/$defs/Nope"}}, "required": ["a"]}

    status, body, _ = await house.post(
        CHAT_PATH, {**plain, "response_format": {"type": "json_schema", "json_schema": {"name": "bad", "schema": bad}}}
    )
    good = await house.post(CHAT_PATH, {**plain, "response_format": {"type": "json_object"}, "n": 2})

    assert (status, body["error"]["code"]) == (400, "invalid_grammar")
    assert "#/$defs/Nope" in body["error"]["message"] or "/$defs/Nope" in body["error"]["message"]
    assert body["error"]["param"] == "response_format.json_schema.schema"
    assert good[0] == 200
    assert [submit.grammar.kind for submit in house.worker.received] == [GrammarKind.JSON] * 2


async def test_a_grammar_bomb_is_a_400_and_stalls_nobody(make_house: Any) -> None:
    import asyncio

    house = await make_house()
    bomb = {**CHAT, "tools": None, "guided_json": {"type": "integer", "multipleOf": 99_999_999}}
    loop = asyncio.get_running_loop()

    bombing = asyncio.ensure_future(house.post(CHAT_PATH, bomb))
    worst_s = 0.0
    num_answers = 0
    while not bombing.done():
        began_s = loop.time()
        assert (await house.get("/livez"))[0] == 200
        worst_s = max(worst_s, loop.time() - began_s)
        num_answers += 1
        await asyncio.sleep(0.005)
    status, body, _ = await bombing

    assert (status, body["error"]["code"]) == (400, "grammar_too_expensive")
    assert num_answers > 10
    assert worst_s < 0.2 + 0.5 * is_busy()


def is_busy() -> bool:
    import os

    return os.getloadavg()[0] > 3


async def test_past_calls_and_results_reach_a_template_that_knows_no_tools(make_house: Any) -> None:
    house = await make_house()
    turn = {
        "role": "assistant",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "set_lamp", "arguments": ARGUMENTS}}],
    }
    result = {"role": "tool", "tool_call_id": "c1", "content": "done"}
    counts = set()
    for content in ({}, {"content": None}, {"content": ""}):
        body = {**CHAT, "messages": [*CHAT["messages"], {**turn, **content}, result]}  # type: ignore[misc]
        status, answer, _ = await house.post(CHAT_PATH, body)
        assert status == 200
        counts.add(answer["usage"]["prompt_tokens"])

    prompt = bytes(house.worker.received[-1].prompt_ids).decode()
    assert len(counts) == 1
    assert "set_lamp" in prompt
    assert "switch a lamp" in prompt
    assert "<tool_response>\ndone\n</tool_response>" in prompt


async def test_a_final_message_is_continued_and_echoed_where_asked(make_house: Any) -> None:
    house = await make_house(Script(default=Reply(text=" turns.")))
    messages = [{"role": "user", "content": "Go on"}, {"role": "assistant", "content": "The mill"}]
    body = {"model": "bytes", "messages": messages, "continue_final_message": True, "add_generation_prompt": False}

    _, plain, _ = await house.post(CHAT_PATH, body)
    _, echoed, _ = await house.post(CHAT_PATH, {**body, "echo": True})
    both = await house.post(CHAT_PATH, {**body, "add_generation_prompt": True})

    assert plain["choices"][0]["message"]["content"] == " turns."
    assert echoed["choices"][0]["message"]["content"] == "The mill turns."
    assert (both[0], both[1]["error"]["param"]) == (400, "continue_final_message")


async def test_a_prompt_is_cut_only_where_asked_and_says_so(make_house: Any) -> None:
    house = await make_house()
    body = {"model": "bytes", "prompt": "0123456789", "max_tokens": 2}

    _, whole, _ = await house.post("/v1/completions", body)
    _, cut, _ = await house.post("/v1/completions", {**body, "truncate_prompt_tokens": 4})

    assert "truncated_tokens" not in whole["usage"]["prompt_tokens_details"]
    assert bytes(house.worker.received[1].prompt_ids) == b"6789"
    assert cut["usage"]["prompt_tokens"] == 4
    assert cut["usage"]["prompt_tokens_details"]["truncated_tokens"] == 6


async def test_prompt_logprobs_have_an_entry_for_each_prompt_token(make_house: Any) -> None:
    house = await make_house()

    _, body, _ = await house.post(
        "/v1/completions", {"model": "bytes", "prompt": "abc", "max_tokens": 1, "prompt_logprobs": 2}
    )
    streamed = await house.post(
        "/v1/completions", {"model": "bytes", "prompt": "a", "prompt_logprobs": 1, "stream": True}
    )

    first, second, third = body["choices"][0]["prompt_logprobs"]
    assert first is None
    assert second["98"] == {"logprob": -0.5, "rank": 1, "decoded_token": "b"}
    assert set(third) == {"99", "100"}
    assert streamed[1]["error"]["param"] == "prompt_logprobs"


async def test_the_best_of_several_is_answered(make_house: Any) -> None:
    replies = [Reply(text="a long answer"), Reply(text="short"), Reply(text="middling")]
    house = await make_house(Script(replies=replies))

    _, body, _ = await house.post(
        "/v1/completions", {"model": "bytes", "prompt": "x", "max_tokens": 50, "best_of": 3, "n": 2}
    )

    # The mock gives each token the same probability: the shortest is the likeliest.
    assert [choice["text"] for choice in body["choices"]] == ["short", "middling"]
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert body["choices"][0]["logprobs"] is None


async def test_a_stop_string_stays_where_asked(make_house: Any) -> None:
    house = await make_house(Script(default=Reply(text="one, two, three")))
    body = {"model": "bytes", "prompt": "x", "max_tokens": 50, "stop": ["two"], "include_stop_str_in_output": True}

    _, whole, _ = await house.post("/v1/completions", body)
    frames = await house.stream("/v1/completions", body)

    assert whole["choices"][0]["text"] == "one, two"
    assert "".join(json.loads(frame)["choices"][0]["text"] for frame in frames[:-1]) == "one, two"


@pytest.mark.parametrize(
    ("more", "without", "text"),
    [
        pytest.param({"stop_token_ids": [ord("t")]}, "one, ", "one, t", id="id"),
        pytest.param({"stop_token_ids": [ord("t")], "stop": ["two"]}, "one, ", "one, t", id="id-begins-a-stop"),
        pytest.param({"stop_token_ids": [ord("t")], "stop": [" t"]}, "one, ", "one, t", id="id-ends-a-stop"),
        pytest.param({"max_tokens": 3}, "one", "one", id="length"),
        pytest.param({}, "one, two", "one, two", id="end-without-text"),
    ],
)
async def test_the_text_of_a_stop_id_stays_where_asked(make_house: Any, more: Any, without: str, text: str) -> None:
    house = await make_house(Script(default=Reply(text="one, two"), eos_token_ids=(256,)))  # which has no text
    body = {"model": "bytes", "prompt": "x", "max_tokens": 50, "logprobs": 1, "return_token_ids": True, **more}

    _, plain, _ = await house.post("/v1/completions", body)
    body["include_stop_str_in_output"] = True
    _, whole, _ = await house.post("/v1/completions", body)
    chunks = [json.loads(frame)["choices"][0] for frame in (await house.stream("/v1/completions", body))[:-1]]

    (choice,) = whole["choices"]
    assert plain["choices"][0]["text"] == without
    assert choice["text"] == "".join(chunk["text"] for chunk in chunks) == text
    assert choice["token_ids"] == [token for chunk in chunks for token in chunk["token_ids"]] == list(text.encode())
    assert "".join(choice["logprobs"]["tokens"]) == text
    assert None not in choice["logprobs"]["token_logprobs"]
    assert whole["usage"]["completion_tokens"] == len(text)


async def test_a_scored_prompt_needs_no_answer(make_house: Any) -> None:
    house = await make_house()

    _, body, _ = await house.post(
        "/v1/completions", {"model": "bytes", "prompt": "abc", "max_tokens": 0, "prompt_logprobs": 1}
    )

    (choice,) = body["choices"]
    assert (choice["text"], choice["finish_reason"], len(choice["prompt_logprobs"])) == ("", "length", 3)
    assert body["usage"]["completion_tokens"] == 0


async def test_a_result_of_a_call_that_is_not_there_goes_to_the_template(make_house: Any) -> None:
    house = await make_house()
    messages = [*CHAT["messages"], {"role": "tool", "tool_call_id": "call_gone", "content": "42"}]

    status, _, _ = await house.post("/v1/chat/completions", {**CHAT, "messages": messages})

    assert status == 200
    assert b"42" in bytes(house.worker.received[0].prompt_ids)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("more", "finish", "stop"),
    [
        ({}, "stop", None),
        ({"stop": ["two", ", th"]}, "stop", "two"),
        ({"stop_token_ids": [5, ord("t")]}, "stop", ord("t")),
        ({"stop_token_ids": [ord("t")], "stop": "ne"}, "stop", "ne"),
        ({"stop_token_ids": [5]}, "stop", None),
        ({"stop": "two", "max_tokens": 3}, "length", None),
    ],
)
async def test_what_stopped_an_answer_is_told(make_house: Any, path: str, more: Any, finish: str, stop: Any) -> None:
    house = await make_house(Script(default=Reply(text="one, two, three")))
    asked = {"prompt": "x"} if path == "/v1/completions" else {"messages": CHAT["messages"]}
    body = {"model": "bytes", "max_tokens": 50, **asked, **more}

    _, whole, _ = await house.post(path, body)
    frames = await house.stream(path, body)

    (choice,) = whole["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == (finish, stop)
    said = [json.loads(frame)["choices"][0] for frame in frames[:-1]]
    assert (said[-1]["finish_reason"], said[-1]["stop_reason"]) == (finish, stop)
    assert all("stop_reason" not in choice for choice in said[:-1])


@pytest.mark.parametrize("is_stream", [False, True])
async def test_thoughts_are_counted_and_shown_only_where_they_are_wanted(make_house: Any, is_stream: bool) -> None:
    written = "<think>abc</think>xy"
    house = await make_house(Script(default=Reply(text=written)), dialect=DIALECT)
    chat = {"model": "bytes", "messages": CHAT["messages"], "stream_options": {"include_usage": is_stream}}

    answers = []
    for shown in (True, False):
        body = chat | {"include_reasoning": shown}
        if is_stream:
            frames = await house.stream(CHAT_PATH, body)
            *chunks, last = [json.loads(frame) for frame in frames[:-1]]
            deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
            thought = "".join(delta.get("reasoning", "") for delta in deltas) or None
            assert thought == ("".join(delta.get("reasoning_content", "") for delta in deltas) or None)
            text = "".join(delta.get("content", "") for delta in deltas)
        else:
            _, last, _ = await house.post(CHAT_PATH, body)
            message = last["choices"][0]["message"]
            thought, text = message.get("reasoning"), message["content"]
        answers.append((thought, text, last["usage"]["completion_tokens_details"]["reasoning_tokens"]))

    counted = len("<think>abc</think>")  # a byte is a token
    assert answers == [("abc", "xy", counted), (None, "xy", counted)]
