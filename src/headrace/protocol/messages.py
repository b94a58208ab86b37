"""Chat messages and tools: checked, and brought into the one form that chat templates expect.

Text parts are joined, null content of an assistant turn becomes empty text, tool-call arguments become objects where
they are JSON, and ``developer`` is ``system`` (which is what templates know).
"""

from __future__ import annotations

import json
from typing import Final

from headrace.base.errors import RequestError
from headrace.protocol.fields import Fields
from headrace.protocol.strict_json import shown

MAX_MESSAGES: Final = 4096
MAX_TOOLS: Final = 128
_NAME_CHARS: Final = 256
_MAX_TEXT: Final = 2**26  # the body limit is the real one
_ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function")


def parse_messages(fields: Fields) -> list[dict[str, object]]:
    """Takes ``messages``, ready for a chat template.

    Raises:
        RequestError: naming the message and the field.
    """
    items = fields.items("messages", MAX_MESSAGES)
    if items is None:
        raise fields.missing("messages")
    if not items:
        raise RequestError("messages is empty: send at least one message", param="messages", code="empty_prompt")
    return [_parse_message(f"messages[{index}]", item) for index, item in enumerate(items)]


def parse_tools(fields: Fields) -> list[dict[str, object]] | None:
    """Takes ``tools``: OpenAI's function tools, passed on as they are; None where there are none."""
    items = fields.items("tools", MAX_TOOLS)
    if not items:
        return None
    tools: list[dict[str, object]] = []
    names: set[str] = set()
    for index, item in enumerate(items):
        path = f"tools[{index}]"
        if not isinstance(item, dict):
            raise RequestError(f"{path} must be an object", param="tools")
        tool = Fields(item, path + ".")
        if tool.take("type") != "function":
            raise tool.wrong("type", item.get("type"), '"function"')
        function = tool.mapping("function")
        if function is None:
            raise tool.missing("function")
        inner = Fields(function, path + ".function.")
        name = inner.text("name", _NAME_CHARS)
        if not name:
            raise inner.missing("name")
        if name in names:
            raise RequestError(f"tools holds two functions named {shown(name)}", param="tools")
        names.add(name)
        inner.text("description", _MAX_TEXT)
        inner.mapping("parameters")
        tools.append(item)
    return tools


def _parse_message(path: str, item: object) -> dict[str, object]:
    if not isinstance(item, dict):
        raise RequestError(f"{path} must be an object with role and content", param=path)
    fields = Fields(item, path + ".")
    role = fields.take("role")
    if role is None:
        raise fields.missing("role")
    if role not in _ROLES:
        raise fields.wrong("role", role, "one of " + ", ".join(_ROLES))
    message: dict[str, object] = {"role": "system" if role == "developer" else role}
    calls = _parse_calls(fields) if role == "assistant" else None
    message["content"] = _parse_content(fields, can_be_absent=role == "assistant")
    if calls:
        message["tool_calls"] = calls
    if role == "assistant":
        # Both spellings are in use; templates of reasoning models read this one.
        reasoning = fields.text("reasoning_content", _MAX_TEXT) or fields.text("reasoning", _MAX_TEXT)
        if reasoning is not None:
            message["reasoning_content"] = reasoning
    for name in ("name", "tool_call_id"):
        text = fields.text(name, _NAME_CHARS)
        if text is not None:
            message[name] = text
    return message


def _parse_content(fields: Fields, *, can_be_absent: bool) -> str:
    value = fields.take("content")
    if isinstance(value, str):
        return value
    if value is None:
        if can_be_absent:
            return ""
        raise fields.missing("content")
    if not isinstance(value, list):
        raise fields.wrong("content", value, "text or a list of parts")
    texts: list[str] = []
    for index, part in enumerate(value):
        name = f"content[{index}]"
        if not isinstance(part, dict):
            raise fields.wrong(name, part, "an object with type and text")
        kind = part.get("type")
        if kind not in ("text", "input_text", "output_text", "refusal"):
            raise fields.wrong(
                name + ".type", kind, '"text": this model reads no other parts', code="unsupported_parameter"
            )
        text = part.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            raise fields.wrong(name + ".text", text, "a string")
        texts.append(text)
    return "".join(texts)


def _parse_calls(fields: Fields) -> list[dict[str, object]] | None:
    items = fields.items("tool_calls", MAX_TOOLS)
    if items is None:
        return None
    calls: list[dict[str, object]] = []
    for index, item in enumerate(items):
        name = f"tool_calls[{index}]"
        function = item.get("function") if isinstance(item, dict) else None
        if not isinstance(item, dict) or not isinstance(function, dict):
            raise fields.wrong(name, item, "an object with id, type and function")
        if not isinstance(function.get("name"), str):
            raise fields.wrong(name + ".function.name", function.get("name"), "a string")
        arguments = function.get("arguments")
        if not isinstance(arguments, str):
            raise fields.wrong(name + ".function.arguments", arguments, "a string")
        identity = item.get("id")
        if identity is not None and not isinstance(identity, str):
            raise fields.wrong(name + ".id", identity, "a string")
        calls.append(
            {
                "id": identity or "",
                "type": "function",
                "function": {"name": function["name"], "arguments": _as_object(arguments)},
            }
        )
    return calls


def _as_object(arguments: str) -> object:
    """Gives the arguments as an object, which templates print with ``tojson``; as they are where they are not JSON."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments
