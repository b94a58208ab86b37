"""Anthropic's Messages and the token endpoints through a real front."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.testing.mock_worker import Fault, Reply, Script
from headrace.text.message import Dialect
from headrace.text.reasoning import Marks
from headrace.text.tool_format import HERMES

PATH = "/v1/messages"
DIALECT = Dialect(HERMES, Marks("<think>", "</think>"))
TOOL = {
    "name": "set_lamp",
    "description": "switch a lamp",
    "input_schema": {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]},
}
MESSAGE = {"model": "bytes", "max_tokens": 200, "messages": [{"role": "user", "content": "Hi"}]}
WRITTEN = '<think>Hm.</think>Yes.<tool_call>{"name": "set_lamp", "arguments": {"on": true}}</tool_call>'


async def events_of(house: Any, body: dict[str, Any]) -> list[tuple[str, Any]]:
    async with house.client.post(house.url(PATH), json={**body, "stream": True}) as response:
        text = (await response.read()).decode()
    events = []
    for frame in text.split("\n\n"):
        lines = frame.split("\n")
        if lines[0].startswith("event: "):
            events.append((lines[0][7:], json.loads(lines[1].removeprefix("data: "))))
    return events


async def test_a_message_is_made_of_blocks(make_house: Any) -> None:
    house = await make_house(Script(default=Reply(text=WRITTEN, cached_tokens=3)), dialect=DIALECT)

    status, body, headers = await house.post(PATH, {**MESSAGE, "tools": [TOOL]})

    assert status == 200
    assert headers["x-request-id"]
    assert body["type"] == "message"
    assert body["role"] == "assistant"
    assert [block["type"] for block in body["content"]] == ["thinking", "text", "tool_use"]
    assert body["content"][0]["thinking"] == "Hm."
    assert body["content"][1]["text"] == "Yes."
    assert body["content"][2]["input"] == {"on": True}
    assert (body["stop_reason"], body["stop_sequence"]) == ("tool_use", None)
    assert body["usage"]["cache_read_input_tokens"] == 3
    prompt_tokens = len(house.worker.received[0].prompt_ids)
    assert body["usage"]["input_tokens"] + 3 == prompt_tokens


async def test_a_streamed_message_joins_to_the_whole_one(make_house: Any) -> None:
    house = await make_house(Script(default=Reply(text=WRITTEN)), dialect=DIALECT)

    events = await events_of(house, {**MESSAGE, "tools": [TOOL]})

    names = [name for name, _ in events]
    assert names[0] == "message_start"
    assert names[-2:] == ["message_delta", "message_stop"]
    assert all(name == data["type"] for name, data in events)
    starts = [data for name, data in events if name == "content_block_start"]
    assert [start["content_block"]["type"] for start in starts] == ["thinking", "text", "tool_use"]
    assert [start["index"] for start in starts] == [0, 1, 2]
    assert names.count("content_block_stop") == 3
    deltas = [data["delta"] for name, data in events if name == "content_block_delta"]
    assert "".join(delta.get("text", "") for delta in deltas) == "Yes."
    assert "".join(delta.get("thinking", "") for delta in deltas) == "Hm."
    assert json.loads("".join(delta.get("partial_json", "") for delta in deltas)) == {"on": True}
    assert events[-2][1]["delta"]["stop_reason"] == "tool_use"
    assert events[-2][1]["usage"]["output_tokens"] > 0
    assert events[0][1]["message"]["usage"]["input_tokens"] > 0


async def test_a_conversation_with_results_and_a_system_prompt_is_read(make_house: Any) -> None:
    house = await make_house()
    body = {
        **MESSAGE,
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Lamp on"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm", "signature": ""},
                    {"type": "text", "text": "Ok."},
                    {"type": "tool_use", "id": "t1", "name": "set_lamp", "input": {"on": True}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "done"}]},
        ],
        "tools": [TOOL],
        "metadata": {"user_id": "u"},
        "thinking": {"type": "disabled"},
    }

    status, answer, _ = await house.post(PATH, body)
    counted = await house.post(PATH + "/count_tokens", {k: v for k, v in body.items() if k != "max_tokens"})

    prompt = bytes(house.worker.received[0].prompt_ids).decode()
    assert status == 200, answer
    assert prompt.startswith("system: Be brief.")
    assert "Ok." in prompt
    assert '"name": "set_lamp"' in prompt
    assert "done" in prompt
    assert counted[1] == {"input_tokens": answer["usage"]["input_tokens"]}


@pytest.mark.parametrize(
    ("text", "fields", "reason", "sequence"),
    [
        pytest.param("ab", {}, "end_turn", None, id="end"),
        pytest.param("abc", {"max_tokens": 2}, "max_tokens", None, id="length"),
        pytest.param("a END b", {"stop_sequences": ["END"]}, "stop_sequence", "END", id="stop"),
    ],
)
async def test_a_stop_reason_says_why(make_house: Any, text: str, fields: Any, reason: str, sequence: Any) -> None:
    house = await make_house(Script(default=Reply(text=text)))

    _, body, _ = await house.post(PATH, {**MESSAGE, **fields})
    events = await events_of(house, {**MESSAGE, **fields})

    assert (body["stop_reason"], body["stop_sequence"]) == (reason, sequence)
    assert events[-2][1]["delta"] == {"stop_reason": reason, "stop_sequence": sequence}


@pytest.mark.parametrize(
    ("fields", "status", "kind"),
    [
        pytest.param({"max_tokens": None}, 400, "invalid_request_error", id="max-tokens"),
        pytest.param({"model": "nobody"}, 404, "not_found_error", id="model"),
        pytest.param({"messages": []}, 400, "invalid_request_error", id="messages"),
        pytest.param({"messages": [{"role": "tool", "content": "x"}]}, 400, "invalid_request_error", id="role"),
        pytest.param({"temperature": 1.5}, 400, "invalid_request_error", id="temperature"),
        pytest.param({"tool_choice": {"type": "any"}}, 400, "invalid_request_error", id="choice"),
        pytest.param({"tools": [{"name": "x"}]}, 400, "invalid_request_error", id="tool"),
        pytest.param(
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            400, "invalid_request_error", id="image",
        ),
    ],
)  # fmt: skip
async def test_errors_have_the_vendors_shape(make_house: Any, fields: Any, status: int, kind: str) -> None:
    house = await make_house()

    answered, body, _ = await house.post(PATH, {**MESSAGE, **fields})

    assert answered == status
    assert body["type"] == "error"
    assert body["error"]["type"] == kind
    assert body["error"]["message"]


async def test_a_failure_in_a_stream_is_an_error_event_and_no_end(make_house: Any) -> None:
    house = await make_house(Script(default=Reply(fault=Fault.NAN, fault_at_token=3)))

    events = await events_of(house, MESSAGE)

    assert events[-1][0] == "error"
    assert events[-1][1]["error"]["type"] == "api_error"
    assert "message_stop" not in [name for name, _ in events]


@pytest.mark.parametrize(
    ("method", "path", "headers", "status", "kind"),
    [
        pytest.param("GET", PATH, {}, 405, "invalid_request_error", id="method"),
        pytest.param("POST", PATH, {"origin": "http://evil.example"}, 403, "permission_error", id="origin"),
        pytest.param("POST", PATH + "/nothing", {}, 404, "not_found_error", id="route"),
        pytest.param("POST", "/messages", {"content-type": "text/plain"}, 415, "invalid_request_error", id="media"),
        pytest.param("POST", PATH + "/count_tokens", {"host": "evil.example"}, 403, "permission_error", id="host"),
    ],
)
async def test_whatever_refuses_speaks_anthropic_under_its_routes(
    make_house: Any, method: str, path: str, headers: dict[str, str], status: int, kind: str
) -> None:
    house = await make_house()

    async with house.client.request(method, house.url(path), data=b"{}", headers=headers) as answer:
        body = await answer.json()

    assert answer.status == status
    assert body["type"] == "error"
    assert body["error"].keys() == {"type", "message"}
    assert body["error"]["type"] == kind
    assert body["request_id"] == answer.headers["x-request-id"]


async def test_the_official_client_finds_the_requests_id(make_house: Any) -> None:
    house = await make_house()

    _, _, headers = await house.post(PATH, MESSAGE)

    assert headers["request-id"] == headers["x-request-id"]


async def test_texts_and_conversations_are_tokenized_as_they_would_be_run(make_house: Any) -> None:
    house = await make_house()

    _, text, _ = await house.post("/tokenize", {"model": "bytes", "prompt": "añb", "return_token_strs": True})
    _, chat, _ = await house.post("/tokenize", {"messages": MESSAGE["messages"]})
    _, answer, _ = await house.post("/v1/chat/completions", dict(MESSAGE))
    _, back, _ = await house.post("/detokenize", {"model": "bytes", "tokens": list(map(float, text["tokens"]))})

    assert text["tokens"] == list("añb".encode())
    assert text["count"] == 4
    assert text["max_model_len"] == 4096
    assert text["token_strs"] == ["<61>", "<c3>", "<b1>", "<62>"]  # as the vocabulary writes them
    assert chat["count"] == answer["usage"]["prompt_tokens"]
    assert back == {"prompt": "añb"}
    assert (await house.post("/detokenize", {"tokens": text["tokens"]}))[1] == {"prompt": "añb", "content": "añb"}


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/tokenize", {}, 400),
        ("/tokenize", {"prompt": 5}, 400),
        ("/tokenize", {"prompt": "x", "model": "nobody"}, 404),
        ("/tokenize", {"messages": [{}]}, 400),
        ("/tokenize", {"prompt": "x" * 40_000}, 400),
        ("/detokenize", {}, 400),
        ("/detokenize", {"tokens": ["x"]}, 400),
        ("/detokenize", {"tokens": [2**17]}, 400),
        ("/detokenize", {"tokens": [-1]}, 400),
    ],
    ids=str,
)
async def test_token_endpoints_refuse_what_they_cannot_read(make_house: Any, path: str, body: Any, status: int) -> None:
    house = await make_house()

    answered, answer, _ = await house.post(path, body)

    assert answered == status
    assert answer["error"]["message"]


async def test_the_model_and_the_version_may_be_left_out(make_house: Any) -> None:
    house = await make_house()
    chat = {"messages": MESSAGE["messages"]}

    for path in ("/v1/chat/completions", "/chat/completions"):
        status, body, _ = await house.post(path, chat)
        assert (status, body["model"]) == (200, "tests/bytes")
    assert (await house.post("/v1/messages/count_tokens", chat))[0] == 200
    assert (await house.post("/completions", {"prompt": "x"}))[0] == 200
    assert (await house.get("/models"))[0] == 200


async def test_tokenizer_info_says_how_messages_are_written(make_house: Any) -> None:
    house = await make_house(dialect=DIALECT)

    status, text, _ = await house.get("/tokenizer_info")

    info = json.loads(text)
    assert status == 200
    assert info["tool_format"] == "hermes"
    assert info["reasoning_marks"] == ["<think>", "</think>"]
    assert info["max_model_len"] == 4096


async def test_the_openapi_document_names_exactly_the_routes_that_are_served(make_house: Any) -> None:
    house = await make_house()

    status, text, _ = await house.get("/openapi.json")

    assert status == 200
    described = set(json.loads(text)["paths"])
    app = house.front.listener._config.app
    unversioned = {path.removeprefix("/v1") for path in described}
    assert {path.replace("{model:path}", "{model}") for path in app._known_paths} - unversioned <= described
    for path, item in json.loads(text)["paths"].items():
        for method in item:
            async with house.client.request(method, house.url(path.replace("{model}", "bytes"))) as response:
                assert response.status not in (404, 405), path


@pytest.mark.parametrize("name", ["output_config", "output_format"])
async def test_a_schema_of_the_vendor_becomes_a_grammar(make_house: Any, name: str) -> None:
    house = await make_house(Script())
    wish = {"type": "json_schema", "schema": {"type": "object", "properties": {"a": {"const": 1}}}}
    body = {"max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}

    status, _, _ = await house.post(PATH, body | {name: {"format": wish} if name == "output_config" else wish})
    bad, answer, _ = await house.post(PATH, body | {name: {"format": {"type": "xml"}, "type": "xml"}})

    assert status == 200
    assert '"const": 1' in house.worker.received[0].grammar.source
    assert bad == 400
    assert name in answer["error"]["message"]


async def test_a_streamed_message_begins_with_no_output_counted(make_house: Any) -> None:
    house = await make_house(Script(default=Reply(text="Hello")))
    body = {"max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}

    events = [json.loads(frame.partition("data: ")[2]) for frame in await house.stream(PATH, body)]

    assert events[0]["message"]["usage"]["output_tokens"] == 0
    assert events[-2]["usage"]["output_tokens"] == 5
