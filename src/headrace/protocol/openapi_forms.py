"""The forms inside request fields of ``/openapi.json``: messages, tools, choices of them, and wishes for an answer.

Each says what the readers take, so that what a tool makes of the document is answered and not refused.
"""

from __future__ import annotations

from typing import Final

from headrace.protocol.messages import MAX_TOOLS
from headrace.protocol.structured import MAX_CHOICES

Schema = dict[str, object]

_TEXT: Final[Schema] = {"type": "string"}
_NAME: Final[Schema] = {"type": ["string", "null"], "maxLength": 256}
_SCHEMA: Final[Schema] = {"type": "object", "description": "A JSON Schema."}
_NULL: Final[Schema] = {"type": "null"}
SCHEMA_OR_TEXT: Final[list[Schema]] = [
    {"type": ["object", "boolean", "null"]},
    {"type": "string", "contentMediaType": "application/json"},
]


def _closed(properties: dict[str, Schema], required: list[str]) -> Schema:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _kind(*names: str) -> Schema:
    return {"enum": list(names)} if len(names) > 1 else {"const": names[0]}


def _wish(name: str, holder: str, properties: dict[str, Schema]) -> Schema:
    return _closed({"type": {"const": name}, holder: _closed(properties, ["schema"])}, ["type", holder])


_PARTS: Final[Schema] = {
    "type": "array",
    "items": {
        "anyOf": [
            _closed({"type": _kind("text", "input_text", "output_text"), "text": _TEXT}, ["type", "text"]),
            _closed({"type": _kind("refusal"), "refusal": _TEXT}, ["type", "refusal"]),
        ]
    },
}
CONTENT: Final[Schema] = {"anyOf": [_TEXT, _PARTS], "description": "Text, or parts of it, which are joined."}
CALLS: Final[Schema] = {
    "type": ["array", "null"],
    "items": {"$ref": "#/components/schemas/ToolCall"},
    "maxItems": MAX_TOOLS,
    "description": "Calls that the assistant made.",
}

MESSAGE: Final[Schema] = {
    "anyOf": [
        {
            "type": "object",
            "properties": {
                "role": _kind("system", "developer", "user", "tool", "function"),
                "content": CONTENT,
                "name": {**_NAME, "description": "Whose message it is."},
                "tool_call_id": {
                    **_NAME,
                    "description": "The call that a tool's message answers. The template shows it as it is: that call "
                    "may be one of those that the client has left out.",
                },
            },
            "required": ["role", "content"],
        },
        {
            "type": "object",
            "properties": {
                "role": _kind("assistant"),
                "content": {"anyOf": [_NULL, CONTENT]},
                "name": _NAME,
                "tool_calls": CALLS,
                "reasoning_content": {"type": ["string", "null"], "description": "What the assistant thought."},
                "reasoning": {"type": ["string", "null"], "description": "The same, as others spell it."},
            },
            "required": ["role"],
        },
    ]
}

_FUNCTION: Final = _closed({"name": {"type": "string", "minLength": 1, "maxLength": 256}}, ["name"])
_NAMED: Final = _closed({"type": _kind("function"), "function": _FUNCTION}, ["type", "function"])
TOOL_CHOICE: Final[Schema] = {
    "anyOf": [
        _NULL,
        _kind("none", "auto", "required"),
        _NAMED,
        _closed(
            {
                "type": _kind("allowed_tools"),
                "allowed_tools": _closed(
                    {"mode": _kind("auto", "required"), "tools": {"type": "array", "items": _NAMED, "minItems": 1}},
                    ["mode", "tools"],
                ),
            },
            ["type", "allowed_tools"],
        ),
    ],
    "description": '`"none"`, `"auto"`, or, of `tools`: `"required"`, a named function, or `allowed_tools`. A forced '
    "call is kept to its schema by a grammar.",
}

_JSON: Final[dict[str, Schema]] = {
    "name": _NAME,
    "description": {"type": ["string", "null"]},
    "strict": {"type": ["boolean", "null"]},
    "schema": _SCHEMA,
}
RESPONSE_FORMAT: Final[Schema] = {
    "anyOf": [
        _NULL,
        _closed({"type": _kind("text")}, ["type"]),
        _closed({"type": _kind("json_object")}, ["type"]),
        _wish("json_schema", "json_schema", _JSON),
    ],
    "description": '`{"type": "text" | "json_object" | "json_schema", …}`. Of this, `structured_outputs`, `guided_…`, '
    "`grammar` and `json_schema` only one may be there, and then no `allowed_token_ids`.",
}
_CHOICES: Final[Schema] = {
    "type": "array",
    "items": {"type": "string", "minLength": 1},
    "minItems": 1,
    "maxItems": MAX_CHOICES,
}
STRUCTURED: Final[Schema] = {
    "anyOf": [
        _NULL,
        _closed({"json": _SCHEMA}, ["json"]),
        _closed({"regex": {"type": "string", "minLength": 1}}, ["regex"]),
        _closed({"choice": _CHOICES}, ["choice"]),
        _closed({"grammar": {"type": "string", "minLength": 1}}, ["grammar"]),
        _closed({"json_object": {"type": "boolean"}}, ["json_object"]),
    ],
    "description": "One of `json`, `regex`, `choice`, `grammar`, `json_object`.",
}

_TEXT_BLOCK: Final = _closed({"type": _kind("text"), "text": _TEXT}, ["type", "text"])
_TEXT_BLOCKS: Final[Schema] = {"type": "array", "items": _TEXT_BLOCK}
_RESULT: Final = _closed(
    {
        "type": _kind("tool_result"),
        "tool_use_id": _TEXT,
        "content": {"anyOf": [_NULL, _TEXT, _TEXT_BLOCKS]},
        "is_error": {"type": "boolean"},
    },
    ["type", "tool_use_id"],
)
_USE: Final = _closed(
    {"type": _kind("tool_use"), "id": _TEXT, "name": _TEXT, "input": {"type": "object"}}, ["type", "id", "name"]
)
_THOUGHT: Final = _closed({"type": _kind("thinking"), "thinking": _TEXT, "signature": _TEXT}, ["type", "thinking"])


def _turn(role: str, *blocks: Schema) -> Schema:
    content: Schema = {"anyOf": [_TEXT, {"type": "array", "items": {"anyOf": list(blocks)}}]}
    return {"type": "object", "properties": {"role": _kind(role), "content": content}, "required": ["role", "content"]}


TURN: Final[Schema] = {
    "anyOf": [_turn("user", _TEXT_BLOCK, _RESULT), _turn("assistant", _TEXT_BLOCK, _USE, _THOUGHT)],
}
SYSTEM: Final[Schema] = {"anyOf": [_NULL, _TEXT, _TEXT_BLOCKS], "description": "Text or text blocks."}
MESSAGE_TOOL: Final[Schema] = {
    "type": "object",
    "properties": {
        "type": {"enum": ["custom", None]},
        "name": {"type": "string", "minLength": 1, "maxLength": 256},
        "description": {"type": ["string", "null"]},
        "input_schema": _SCHEMA,
    },
    "required": ["name", "input_schema"],
}
MESSAGE_CHOICE: Final[Schema] = {
    "anyOf": [
        _NULL,
        {
            "type": "object",
            "properties": {
                "type": _kind("auto", "any", "none"),
                "disable_parallel_tool_use": {"type": ["boolean", "null"]},
            },
            "required": ["type"],
        },
        {"type": "object", "properties": {"type": _kind("tool"), "name": _TEXT}, "required": ["type", "name"]},
    ],
    "description": '`{"type": "auto" | "none"}`, or, of `tools`: `"any" | "tool"`.',
}
_FORMAT: Final = _closed({"type": _kind("json_schema"), "schema": _SCHEMA}, ["type", "schema"])
OUTPUT_FORMAT: Final[Schema] = {"anyOf": [_NULL, _FORMAT], "description": "The same format, under its older name."}
OUTPUT_CONFIG: Final[Schema] = {
    "anyOf": [_NULL, {"type": "object", "properties": {"format": {"anyOf": [_NULL, _FORMAT]}}}],
    "description": '`format`: `{"type": "json_schema", "schema": …}`, what the answer must look like.',
}
THINKING: Final[Schema] = {
    "anyOf": [
        _NULL,
        {
            "type": "object",
            "properties": {
                "type": _kind("enabled", "adaptive", "disabled"),
                "budget_tokens": {"type": ["integer", "null"], "minimum": 0, "maximum": 2**31 - 1},
            },
            "required": ["type"],
        },
    ],
    "description": "Sets `enable_thinking` of the model's chat template.",
}
