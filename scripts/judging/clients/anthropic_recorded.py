from __future__ import annotations

import anthropic
from common import KEY, URL
from recordings import HI, reads

client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0)


def asked(recording) -> dict:
    tools = [{"name": tool["function"]["name"], "input_schema": {"type": "object"}} for tool in recording["tools"]]
    return {"model": recording["model"], "max_tokens": 2000, "messages": HI, "tools": tools}


def found(message, recording) -> dict:
    assert message.stop_reason == ("tool_use" if recording["calls"] else "end_turn"), message.stop_reason
    joined = {"text": "", "thought": "", "calls": []}
    for block in message.content:
        match block.type:
            case "text":
                joined["text"] += block.text
            case "thinking":
                joined["thought"] += block.thinking
            case "tool_use":
                joined["calls"].append((block.name, block.input))
    return joined


@reads()
def whole(recording) -> dict:
    return found(client.messages.create(**asked(recording)), recording)


@reads()
def streamed(recording) -> dict:
    with client.messages.stream(**asked(recording)) as stream:
        for _ in stream:
            pass
        return found(stream.get_final_message(), recording)
