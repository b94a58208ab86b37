"""Chats that show what a chat template does: tools, calls, parts, thinking, and text that needs care.

Used to compare our sandbox with transformers (``scripts/check_templates``) and with what that gave (the goldens).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Final

NOW: Final = (2026, 1, 2, 3, 4, 5)
"""The moment that templates are told when goldens are made and compared."""

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": 'Get "the" <weather> & more é',
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "City"}, "n": {"type": ["integer", "null"]}},
            "required": ["city"],
        },
    },
}
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "What is the weather in Paris?"},
]
HARD: list[dict[str, Any]] = [{"role": "user", "content": "  Hi <b>\"q\" 'z' & é 🦊\n  {{ x }}"}]
THINK: list[dict[str, Any]] = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "<think>\nhmm\n</think>\n\n2"},
    {"role": "user", "content": "more"},
]
PARTS: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "part one"}, {"type": "text", "text": " two"}]}
]


def with_call(content: str | None, arguments: object) -> list[dict[str, Any]]:
    """Returns a chat in which a tool was called with these arguments, and answered."""
    call = {"id": "call12345", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    return [
        *CHAT,
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call12345", "name": "get_weather", "content": '{"t": 20}'},
        {"role": "user", "content": "thanks"},
    ]


CASES: Final[dict[str, dict[str, Any]]] = {
    "chat": {"messages": CHAT},
    "chat_tools": {"messages": CHAT, "tools": [TOOL]},
    "chat_closed": {"messages": CHAT, "add_generation_prompt": False},
    "hard": {"messages": HARD},
    "hard_tools": {"messages": HARD, "tools": [TOOL]},
    "call_null": {"messages": with_call(None, {"city": "Paris", "n": 1.5}), "tools": [TOOL]},
    "call_empty": {"messages": with_call("", {"city": "Paris", "ok": True}), "tools": [TOOL]},
    "call_string": {"messages": with_call("", '{"city": "Paris"}'), "tools": [TOOL]},
    "think": {"messages": THINK},
    "no_think": {"messages": THINK, "enable_thinking": False},
    "parts": {"messages": PARTS},
}


def variables_of(case: Mapping[str, Any]) -> dict[str, Any]:
    """Returns everything that a template sees of a case."""
    given = {"tools": None, "documents": None, "add_generation_prompt": True, **case}
    return given | {"bos_token": "<s>", "eos_token": "</s>"}


def fingerprint(text: str) -> str:
    """Returns a short hash of a rendering, as the goldens hold it."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
