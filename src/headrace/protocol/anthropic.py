"""Anthropic's Messages: its requests, read into the same form that a chat completion has.

What a request says twice over (content blocks, a system prompt beside the messages, tools with ``input_schema``) is
brought into OpenAI's shape here, so that everything behind this module is one path. Source: Anthropic's API reference.
"""

from __future__ import annotations

import json
from typing import Final

from headrace.base.errors import RequestError
from headrace.protocol.fields import Fields
from headrace.protocol.messages import MAX_MESSAGES, MAX_TOOLS
from headrace.protocol.openai import MAX_MAX_TOKENS, MAX_STOP_CHARS, MAX_STOPS, ChatRequest, chat_from_values
from headrace.protocol.strict_json import decode_object

# Fields that change no answer of a model served here.
_HARMLESS: Final = frozenset({"anthropic_version", "anthropic_beta", "cache_control"})
_MAX_TEXT: Final = 2**26


def parse_message(body: bytes) -> ChatRequest:
    """Reads a ``/v1/messages`` request.

    Raises:
        RequestError: naming the field, what it was and what is allowed.
    """
    return _parse(body, needs_max_tokens=True)


def parse_count(body: bytes) -> ChatRequest:
    """Reads a ``/v1/messages/count_tokens`` request.

    Raises:
        RequestError: as for ``parse_message``.
    """
    return _parse(body, needs_max_tokens=False)


def _parse(body: bytes, *, needs_max_tokens: bool) -> ChatRequest:
    fields = Fields(decode_object(body))
    values: dict[str, object] = {
        "model": fields.take("model"),
        "messages": _take_system(fields) + _take_messages(fields),
        "stream": fields.flag("stream"),
        "temperature": fields.number("temperature", 1.0, 0.0, 1.0),
        "top_p": fields.number("top_p", 1.0, 0.0, 1.0, is_low_open=True),
        "top_k": fields.integer("top_k", 0, 2**31 - 1),
    }
    max_tokens = fields.integer("max_tokens", 1, MAX_MAX_TOKENS)
    if max_tokens is None and needs_max_tokens:
        raise fields.missing("max_tokens")
    values["max_tokens"] = max_tokens
    stops = fields.items("stop_sequences", MAX_STOPS) or []
    for stop in stops:
        if not isinstance(stop, str) or not 0 < len(stop) <= MAX_STOP_CHARS:
            raise fields.wrong("stop_sequences", stop, f"a list of texts of 1 to {MAX_STOP_CHARS} characters")
    values["stop"] = stops
    values["tools"] = _take_tools(fields)
    values["response_format"] = _take_format(fields)
    _take_choice(fields, values)
    _take_thinking(fields, values)
    fields.mapping("metadata")
    fields.text("service_tier", 64)
    fields.take_all(_HARMLESS)
    return chat_from_values({name: value for name, value in values.items() if value is not None}, fields.unknown())


def _take_system(fields: Fields) -> list[dict[str, object]]:
    value = fields.take("system")
    if value is None:
        return []
    text = value if isinstance(value, str) else _text_of("system", value)
    return [{"role": "system", "content": text}] if text else []


def _take_messages(fields: Fields) -> list[dict[str, object]]:
    items = fields.items("messages", MAX_MESSAGES)
    if items is None:
        raise fields.missing("messages")
    if not items:
        raise RequestError("messages is empty: send at least one message", param="messages", code="empty_prompt")
    messages: list[dict[str, object]] = []
    for index, item in enumerate(items):
        path = f"messages[{index}]"
        if not isinstance(item, dict):
            raise RequestError(f"{path} must be an object with role and content", param=path)
        inner = Fields(item, path + ".")
        role = inner.take("role")
        if role not in ("user", "assistant", "system"):
            raise inner.wrong("role", role, '"user" or "assistant"')
        content = inner.take("content")
        if content is None:
            raise inner.missing("content")
        if isinstance(content, str):
            messages.append({"role": role, "content": content})
        elif isinstance(content, list):
            messages += _turns(str(role), path + ".content", content)
        else:
            raise inner.wrong("content", content, "text or a list of blocks")
    return messages


def _turns(role: str, path: str, blocks: list[object]) -> list[dict[str, object]]:
    """Gives the chat messages of one message's blocks: results of tools are messages of their own."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, object]] = []
    results: list[dict[str, object]] = []
    for index, block in enumerate(blocks):
        name = f"{path}[{index}]"
        if not isinstance(block, dict):
            raise RequestError(f"{name} must be an object with type", param=name)
        inner = Fields(block, name + ".")
        match inner.take("type"):
            case "text":
                texts.append(_required_text(inner, "text"))
            case "thinking" if role == "assistant":
                thoughts.append(_required_text(inner, "thinking"))
            case "redacted_thinking" if role == "assistant":
                pass
            case "tool_use" if role == "assistant":
                arguments = inner.mapping("input") or {}
                function = {
                    "name": _required_text(inner, "name"),
                    "arguments": json.dumps(arguments, ensure_ascii=False),
                }
                calls.append({"id": _required_text(inner, "id"), "type": "function", "function": function})
            case "tool_result" if role == "user":
                value = inner.take("content")
                text = value if isinstance(value, str) else _text_of(name + ".content", value or [])
                results.append({"role": "tool", "tool_call_id": _required_text(inner, "tool_use_id"), "content": text})
            case kind:
                raise inner.wrong("type", kind, "a block that this model reads: text, tool_use or tool_result")
    message: dict[str, object] = {"role": role, "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return results if results and not texts else [*results, message]


def _text_of(path: str, value: object) -> str:
    if not isinstance(value, list):
        raise RequestError(f"{path} must be text or a list of text blocks", param=path)
    texts = [block.get("text") if isinstance(block, dict) and block.get("type") == "text" else None for block in value]
    if not all(isinstance(text, str) for text in texts):
        raise RequestError(f"{path} must be text or a list of text blocks: this model reads no others", param=path)
    return "".join(str(text) for text in texts)


def _required_text(fields: Fields, name: str) -> str:
    text = fields.text(name, _MAX_TEXT)
    if text is None:
        raise fields.missing(name)
    return text


def _take_tools(fields: Fields) -> list[dict[str, object]] | None:
    items = fields.items("tools", MAX_TOOLS)
    if not items:
        return None
    tools: list[dict[str, object]] = []
    for index, item in enumerate(items):
        path = f"tools[{index}]"
        if not isinstance(item, dict):
            raise RequestError(f"{path} must be an object", param="tools")
        inner = Fields(item, path + ".")
        if inner.take("type") not in (None, "custom"):
            raise inner.wrong("type", item.get("type"), '"custom": tools of the vendor do not run here')
        function: dict[str, object] = {"name": _required_text(inner, "name")}
        description = inner.text("description", _MAX_TEXT)
        if description is not None:
            function["description"] = description
        schema = inner.mapping("input_schema")
        if schema is None:
            raise inner.missing("input_schema")
        function["parameters"] = schema
        tools.append({"type": "function", "function": function})
    return tools


def _take_format(fields: Fields) -> dict[str, object] | None:
    """Takes ``output_config.format``, or the older ``output_format``: JSON of a schema."""
    config = fields.mapping("output_config")
    holder = fields if config is None else Fields(config, "output_config.")
    name = "output_format" if config is None else "format"
    wish = holder.mapping(name)
    if wish is None:
        return None
    inner = Fields(wish, holder.path_of(name) + ".")
    kind = inner.take("type")
    if kind != "json_schema":
        raise inner.wrong("type", kind, '"json_schema"')
    schema = inner.take("schema")
    if schema is None:
        raise inner.missing("schema")
    return {"type": "json_schema", "json_schema": {"schema": schema}}


def _take_choice(fields: Fields, values: dict[str, object]) -> None:
    choice = fields.mapping("tool_choice")
    if choice is None:
        return
    inner = Fields(choice, "tool_choice.")
    match inner.take("type"):
        case "auto":
            values["tool_choice"] = "auto" if values["tools"] else None
        case "any":
            values["tool_choice"] = "required"
        case "none":
            values["tool_choice"] = "none"
        case "tool":
            name = _required_text(inner, "name")
            values["tool_choice"] = {"type": "function", "function": {"name": name}}
        case kind:
            raise inner.wrong("type", kind, '"auto", "any", "tool" or "none"')
    if inner.flag("disable_parallel_tool_use"):
        values["parallel_tool_calls"] = False


def _take_thinking(fields: Fields, values: dict[str, object]) -> None:
    thinking = fields.mapping("thinking")
    if thinking is None:
        return
    inner = Fields(thinking, "thinking.")
    kind = inner.take("type")
    if kind not in ("enabled", "disabled", "adaptive"):
        raise inner.wrong("type", kind, '"enabled", "adaptive" or "disabled"')
    inner.integer("budget_tokens", 0, MAX_MAX_TOKENS)
    # The name that templates of hybrid models read; one that does not is listed among the ignored fields.
    values["chat_template_kwargs"] = {"enable_thinking": kind != "disabled"}
