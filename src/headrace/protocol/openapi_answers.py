"""The shapes that ``/openapi.json`` names: answers of the generating routes, and what requests and answers share."""

from __future__ import annotations

from typing import Final

from headrace.protocol.openapi_forms import MESSAGE
from headrace.protocol.openapi_parts import Schema, mapping, ref

_COUNT: Final[Schema] = {"type": "integer", "minimum": 0}
_TEXT: Final[Schema] = {"type": "string"}
_NULL: Final[Schema] = {"type": "null"}
_STOPPED: Final[Schema] = {
    "type": ["string", "integer", "null"],
    "description": "The stop text, or the id of `stop_token_ids`, that ended it (vLLM's).",
}
_FINISH: Final[Schema] = {"enum": ["stop", "length", "tool_calls", "content_filter", None]}


def _object(properties: dict[str, Schema], required: list[str] | None = None) -> Schema:
    return {"type": "object", "properties": properties, "required": list(properties) if required is None else required}


def _list(item: Schema) -> Schema:
    return {"type": "array", "items": item}


def _maybe(schema: Schema, text: str = "") -> Schema:
    return {"anyOf": [_NULL, schema], **({"description": text} if text else {})}


_IDS: Final = _maybe(_list(_COUNT), "With `return_token_ids`.")
_SCORED: Final[dict[str, Schema]] = {"token": _TEXT, "logprob": {"type": "number"}, "bytes": _list(_COUNT)}
_LOGPROBS: Final = _maybe(
    _object(
        {
            "content": _list(_object({**_SCORED, "top_logprobs": _list(_object(_SCORED))})),
            "refusal": _NULL,
        }
    ),
    "With `logprobs`.",
)
_TEXT_LOGPROBS: Final = _maybe(
    _object(
        {
            "text_offset": _list(_COUNT),
            "token_logprobs": _list({"type": ["number", "null"]}),
            "tokens": _list(_TEXT),
            "top_logprobs": _list(_maybe({"type": "object", "additionalProperties": {"type": "number"}})),
        }
    ),
    "With `logprobs`; null for the first token of an echoed prompt.",
)
_PROMPT_LOGPROBS: Final = _maybe(
    _list(
        _maybe(
            {
                "type": "object",
                "additionalProperties": _object(
                    {
                        "logprob": {"type": "number"},
                        "rank": {"type": ["integer", "null"], "minimum": 1},
                        "decoded_token": _TEXT,
                    }
                ),
            }
        )
    ),
    "With `prompt_logprobs`: by token id, for each token of the prompt; null for the first one. The `rank` of a token "
    "that is not among the likeliest is null.",
)


def _answer(kind: str, choice: Schema, more: dict[str, Schema] | None = None) -> Schema:
    return _object(
        {
            "id": _TEXT,
            "object": {"const": kind},
            "created": _COUNT,
            "model": _TEXT,
            "system_fingerprint": _TEXT,
            "choices": _list(choice),
            "usage": ref("Usage"),
            **(more or {}),
        }
    )


_PIECE: Final[Schema] = _object({"id": _COUNT, "piece": {"anyOf": [_TEXT, {"type": "array", "items": _COUNT}]}})
"""A token `with_pieces`: its text, or its bytes where they are no text."""

ANSWERS: Final[dict[str, Schema]] = {
    "Error": _object(
        {
            "error": _object(
                {
                    "message": _TEXT,
                    "type": _TEXT,
                    "param": {"type": ["string", "null"]},
                    "code": {"type": ["string", "null"]},
                    "request_id": _TEXT,
                }
            )
        }
    ),
    "MessageError": _object(
        {
            "type": {"const": "error"},
            "error": _object({"type": _TEXT, "message": _TEXT}),
            "request_id": _TEXT,
        }
    ),
    "Usage": _object(
        {
            "prompt_tokens": _COUNT,
            "completion_tokens": _COUNT,
            "total_tokens": _COUNT,
            "prompt_tokens_details": _object({"cached_tokens": _COUNT, "truncated_tokens": _COUNT}, ["cached_tokens"]),
            "completion_tokens_details": _object({"reasoning_tokens": _COUNT}),
        },
        ["prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details"],
    ),
    "Message": MESSAGE,
    "Tool": _object(
        {
            "type": {"const": "function"},
            "function": _object(
                {
                    "name": {"type": "string", "minLength": 1, "maxLength": 256},
                    "description": {"type": ["string", "null"]},
                    "parameters": mapping("A JSON Schema."),
                },
                ["name"],
            ),
        }
    ),
    "ToolCall": _object(
        {
            "id": _TEXT,
            "type": {"const": "function"},
            "function": _object({"name": _TEXT, "arguments": _TEXT}),
        },
        ["function"],
    ),
    "ChatAnswer": _answer(
        "chat.completion",
        _object(
            {
                "index": _COUNT,
                "message": _object(
                    {
                        "role": {"const": "assistant"},
                        "content": {"type": ["string", "null"]},
                        "refusal": {"type": ["string", "null"]},
                        "reasoning_content": _TEXT,
                        "reasoning": _TEXT,
                        "tool_calls": {"type": "array", "items": ref("ToolCall")},
                    },
                    ["role", "content", "refusal"],
                ),
                "logprobs": _LOGPROBS,
                "finish_reason": _FINISH,
                "stop_reason": _STOPPED,
                "token_ids": _IDS,
            }
        ),
        {"prompt_logprobs": _PROMPT_LOGPROBS, "prompt_token_ids": _IDS},
    ),
    "CompletionAnswer": _answer(
        "text_completion",
        _object(
            {
                "index": _COUNT,
                "text": _TEXT,
                "logprobs": _TEXT_LOGPROBS,
                "finish_reason": _FINISH,
                "stop_reason": _STOPPED,
                "prompt_logprobs": _PROMPT_LOGPROBS,
                "token_ids": _IDS,
                "prompt_token_ids": _IDS,
            }
        ),
    ),
    "MessageAnswer": _object(
        {
            "id": _TEXT,
            "type": {"const": "message"},
            "role": {"const": "assistant"},
            "model": _TEXT,
            "content": _list(
                {
                    "anyOf": [
                        _object({"type": {"const": "text"}, "text": _TEXT}),
                        _object({"type": {"const": "thinking"}, "thinking": _TEXT, "signature": _TEXT}),
                        _object(
                            {"type": {"const": "tool_use"}, "id": _TEXT, "name": _TEXT, "input": {"type": "object"}}
                        ),
                    ]
                }
            ),
            "stop_reason": {"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]},
            "stop_sequence": {"type": ["string", "null"]},
            "usage": _object(
                {
                    "input_tokens": _COUNT,
                    "cache_creation_input_tokens": _COUNT,
                    "cache_read_input_tokens": _COUNT,
                    "output_tokens": _COUNT,
                }
            ),
        }
    ),
    "CountAnswer": _object({"input_tokens": _COUNT}),
    "Tokens": _object(
        {
            "count": _COUNT,
            "max_model_len": _COUNT,
            "tokens": {"type": "array", "items": {"anyOf": [_COUNT, _PIECE]}},
            "token_strs": {"type": ["array", "null"], "items": _TEXT},
        }
    ),
    "Text": {
        "type": "object",
        "properties": {"prompt": _TEXT, "content": _TEXT},
        "required": ["prompt"],
        "description": "`content` is there where no model is named (llama.cpp's).",
    },
    "Invoked": {"type": ["object", "array"], "description": "What that endpoint answers."},
    "Load": _object({"server_load": _COUNT}),
    "TokenizerInfo": _object(
        {
            "model": _TEXT,
            "tokenizer_class": _TEXT,
            "vocab_size": _COUNT,
            "max_model_len": _COUNT,
            "special_tokens": {"type": "object", "additionalProperties": _TEXT},
            "eos_token_ids": {"type": "array", "items": _COUNT},
            "has_chat_template": {"type": "boolean"},
            "tool_format": _TEXT,
            "reasoning_marks": {"type": ["array", "null"], "items": _TEXT},
        }
    ),
    "Model": _object(
        {
            "id": _TEXT,
            "object": {"const": "model"},
            "created": _COUNT,
            "owned_by": _TEXT,
            "root": _TEXT,
            "parent": {"type": ["string", "null"]},
            "max_model_len": {"type": ["integer", "null"]},
        }
    ),
    "Models": _object({"object": {"const": "list"}, "data": {"type": "array", "items": ref("Model")}}),
    "Health": _object({"status": _TEXT}),
    "Version": _object({"version": _TEXT}),
}
