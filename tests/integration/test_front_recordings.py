"""What big models really write, played by the mock worker through a real front: whole, streamed, and cut by a death."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.testing.mock_worker import Fault, Reply, Script
from headrace.testing.recordings import Recording, recorded_script
from headrace.text.message import Dialect
from headrace.text.reasoning import THINK_MARKS
from headrace.text.tool_format import HERMES

CHAT, TEXT, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
ASK = {"model": "bytes", "messages": [{"role": "user", "content": "Hi"}]}
FORMS = ("hermes", "llama3", "mistral", "gemma", "gemma4", "generic")
WRITTEN = '<think>Hm.</think>Yés.<tool_call>{"name": "set_lamp", "arguments": {"on": true}}</tool_call>'
TOOL = {"name": "set_lamp", "parameters": {"type": "object", "properties": {"on": {"type": "boolean"}}}}
SCHEMA = {"type": "object", "properties": {"on": {"type": "boolean"}}}


def expected(recording: Recording) -> dict[str, Any]:
    return {
        "thought": recording.thought,
        "text": recording.text,
        "calls": [list(call) for call in recording.calls],
    }


def of_chat(message: dict[str, Any]) -> dict[str, Any]:
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls", [])]
    return {"thought": message.get("reasoning_content", ""), "text": message["content"] or "", "calls": calls}


def of_chunks(frames: list[str]) -> dict[str, Any]:
    assert frames[-1] == "[DONE]"
    joined: dict[str, Any] = {"thought": "", "text": "", "calls": []}
    for chunk in map(json.loads, frames[:-1]):
        delta = chunk["choices"][0]["delta"]
        joined["thought"] += delta.get("reasoning_content", "")
        joined["text"] += delta.get("content", "")
        for call in delta.get("tool_calls", []):
            if "id" in call:
                joined["calls"].append([call["function"]["name"], ""])
            joined["calls"][call["index"]][1] += call["function"]["arguments"]
    return joined


def of_events(frames: list[str]) -> dict[str, Any]:
    joined: dict[str, Any] = {"thought": "", "text": "", "calls": []}
    for event in (json.loads(frame.partition("data: ")[2]) for frame in frames):
        if event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
            joined["calls"].append([event["content_block"]["name"], ""])
        delta = event.get("delta", {})
        joined["thought"] += delta.get("thinking", "")
        joined["text"] += delta.get("text", "")
        if "partial_json" in delta:
            joined["calls"][-1][1] += delta["partial_json"]
    assert event["type"] == "message_stop"
    return joined


@pytest.mark.parametrize("form", FORMS)
async def test_recorded_outputs_become_the_same_message_by_every_way(make_house: Any, form: str) -> None:
    chosen, script = recorded_script(form)
    house = await make_house(script, dialect=chosen[0].dialect)

    for way in ("whole", "streamed", "messages"):
        await house.restart_worker(script)
        await house.replica.wait_ready()
        for recording in chosen:
            if way == "messages":
                tools = [
                    {"name": tool["function"]["name"], "input_schema": {"type": "object"}} for tool in recording.tools
                ]
                got = of_events(await house.stream(MESSAGES, ASK | {"tools": tools, "max_tokens": 900}))
            elif way == "streamed":
                got = of_chunks(await house.stream(CHAT, ASK | {"tools": recording.tools}))
            else:
                _, body, _ = await house.post(CHAT, ASK | {"tools": recording.tools})
                got = of_chat(body["choices"][0]["message"])
            assert got == expected(recording), (way, recording.written)


# A request's ways to an answer: with tools, with a grammar, with neither.
DEATHS = {
    "chat": (CHAT, ASK),
    "chat-tools": (CHAT, ASK | {"tools": [{"type": "function", "function": TOOL}]}),
    "chat-forced": (CHAT, ASK | {"tools": [{"type": "function", "function": TOOL}], "tool_choice": "required"}),
    "chat-grammar": (CHAT, ASK | {"structured_outputs": {"json": SCHEMA}}),
    "chat-logprobs": (CHAT, ASK | {"logprobs": True, "stop": ["zz"], "stream_options": {"include_usage": True}}),
    "text": (TEXT, {"model": "bytes", "prompt": "Hi"}),
    "text-echo": (TEXT, {"model": "bytes", "prompt": "Hi", "echo": True, "logprobs": 1, "n": 2}),
    "text-grammar": (TEXT, {"model": "bytes", "prompt": "Hi", "guided_regex": ".*"}),
    "messages": (MESSAGES, ASK),
    "messages-tools": (MESSAGES, ASK | {"tools": [{"name": "set_lamp", "input_schema": SCHEMA}]}),
    "messages-grammar": (MESSAGES, ASK | {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
}


@pytest.mark.parametrize("name", DEATHS)
async def test_a_worker_that_dies_at_any_byte_ends_a_stream_with_an_error_and_nothing_else(
    make_house: Any, name: str
) -> None:
    path, body = DEATHS[name]
    written = (
        WRITTEN if "forced" not in name and "grammar" not in name else '{"name": "set_lamp", "arguments": {"on": true}}'
    )
    house = await make_house(dialect=Dialect(HERMES, THINK_MARKS))

    # Before its first token a request waits for another worker; a byte is a token of the mock's vocabulary.
    for count in range(1, len(written.encode())):
        await house.restart_worker(Script(default=Reply(text=written, fault=Fault.CRASH, fault_at_token=count)))
        await house.replica.wait_ready()
        # Another one each time: a request that was there at two deaths is quarantined.
        asked = (
            {"prompt": f"Hi {count}"} if path == TEXT else {"messages": [{"role": "user", "content": f"Hi {count}"}]}
        )
        request = {**body, **asked, "max_tokens": 200, "stream": True}
        async with house.client.post(house.url(path), json=request) as response:
            text = (await response.read()).decode()

        assert response.status in (200, 500), (count, text)  # 500 where nothing had been said yet
        assert "[DONE]" not in text, count
        assert "message_stop" not in text, count
        assert "message_delta" not in text, count
        assert '"finish_reason":"' not in text, count
        assert text.count('"error":{') == 1, (count, text)
        if response.status == 200:
            *_, last, end = text.split("\n\n")
            assert end == ""
            assert '"error":{' in last
