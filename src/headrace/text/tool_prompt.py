"""Tools for models whose chat template knows none: as a system message, and past calls as text.

The form is the generic one of ``tool_format``; docs/guides/tools.md shows it to users word for word.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Final

_HEAD: Final = (
    "You can call these functions. Each is described by a JSON object, its arguments by a JSON Schema:\n\n{tools}\n\n"
    'To call a function, answer with one JSON object inside <tool_call> tags, with the keys "name" and "arguments":\n\n'
    '<tool_call>\n{{"name": "function_name", "arguments": {{"key": "value"}}}}\n</tool_call>\n\n'
    "You may call several functions, each in tags of its own. The results come back inside <tool_response> tags. "
    "If no function helps, answer in plain text."
)


def has_tool_turns(messages: Sequence[Mapping[str, object]]) -> bool:
    """Whether a conversation holds calls or their results."""
    return any(message.get("role") in ("tool", "function") or message.get("tool_calls") for message in messages)


def write_tools(
    messages: Sequence[Mapping[str, object]], tools: Sequence[Mapping[str, object]] | None, *, has_system: bool = True
) -> list[dict[str, object]]:
    """Gives the conversation with its tools, calls and results as plain text.

    Args:
        has_system: the template takes a system message; else its text goes before the first user message.
    """
    turns: list[dict[str, object]] = []
    for message in messages:
        role = message.get("role")
        if role in ("tool", "function"):
            text = f"<tool_response>\n{_text(message)}\n</tool_response>"
            if turns and turns[-1].get("is_result"):
                turns[-1]["content"] = f"{turns[-1]['content']}\n{text}"
            else:
                turns.append({"role": "user", "content": text, "is_result": True})
        elif message.get("tool_calls"):
            calls = message["tool_calls"]
            assert isinstance(calls, list)
            texts = [_text(message), *map(_call_text, calls)]
            turns.append({"role": "assistant", "content": "\n".join(filter(None, texts))})
        else:
            turns.append({**message})
    for turn in turns:
        turn.pop("is_result", None)
    if tools:
        _put_first(
            turns, _HEAD.format(tools="\n".join(json.dumps(_described(tool), ensure_ascii=False) for tool in tools))
        )
    return turns if has_system else _without_system(turns)


def _put_first(turns: list[dict[str, object]], text: str) -> None:
    if turns and turns[0].get("role") == "system":
        turns[0] = {"role": "system", "content": f"{_text(turns[0])}\n\n{text}"}
    else:
        turns.insert(0, {"role": "system", "content": text})


def _without_system(turns: list[dict[str, object]]) -> list[dict[str, object]]:
    if len(turns) < 2 or turns[0].get("role") != "system" or turns[1].get("role") != "user":
        return turns
    return [{**turns[1], "content": f"{_text(turns[0])}\n\n{_text(turns[1])}"}, *turns[2:]]


def _text(message: Mapping[str, object]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""


def _described(tool: Mapping[str, object]) -> object:
    return tool.get("function", tool)


def _call_text(call: Mapping[str, object]) -> str:
    function = call["function"]
    assert isinstance(function, Mapping)
    body = json.dumps({"name": function["name"], "arguments": function["arguments"]}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"
