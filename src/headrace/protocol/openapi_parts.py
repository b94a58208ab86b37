"""The pieces of ``/openapi.json``: each request field once, with its range and meaning.

The readers of this package decide what is accepted; a test holds these tables against them, field by field.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from headrace.protocol.frames import MAX_GRAMMAR_CHARS
from headrace.protocol.messages import MAX_MESSAGES, MAX_TOOLS
from headrace.protocol.openai import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_IDS,
    MAX_LOGIT_BIAS,
    MAX_MAX_TOKENS,
    MAX_N,
    MAX_SEQUENCES,
    MAX_STOP_CHARS,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    MAX_TOKEN_ID,
    MAX_TOP_LOGPROBS,
    RESERVED_TEMPLATE_NAMES,
)
from headrace.protocol.openapi_forms import (
    MESSAGE_CHOICE,
    MESSAGE_TOOL,
    OUTPUT_CONFIG,
    OUTPUT_FORMAT,
    RESPONSE_FORMAT,
    SCHEMA_OR_TEXT,
    STRUCTURED,
    SYSTEM,
    THINKING,
    TOOL_CHOICE,
    TURN,
)
from headrace.protocol.structured import MAX_CHOICES

Schema = dict[str, object]


def ref(name: str) -> Schema:
    """Points to a schema of the document."""
    return {"$ref": f"#/components/schemas/{name}"}


def integer(low: int, high: int, text: str) -> Schema:
    """An integer, or null for absent."""
    return {"type": ["integer", "null"], "minimum": low, "maximum": high, "description": text}


def number(low: float, high: float, text: str, *, is_low_open: bool = False) -> Schema:
    """A number, or null for absent."""
    bound = "exclusiveMinimum" if is_low_open else "minimum"
    return {"type": ["number", "null"], bound: low, "maximum": high, "description": text}


def flag(text: str) -> Schema:
    """A boolean, or null for absent."""
    return {"type": ["boolean", "null"], "description": text}


def text_of(max_chars: int, text: str, *, min_chars: int = 0) -> Schema:
    """A string, or null for absent."""
    low = {"minLength": min_chars} if min_chars else {}
    return {"type": ["string", "null"], **low, "maxLength": max_chars, "description": text}


def choice(values: Iterable[str], text: str) -> Schema:
    """One of some strings, or null for absent."""
    return {"type": ["string", "null"], "enum": [*values, None], "description": text}


def listed(item: Schema, max_items: int, text: str, *, min_items: int = 0) -> Schema:
    """A list, or null for absent."""
    low = {"minItems": min_items} if min_items else {}
    return {"type": ["array", "null"], "items": item, **low, "maxItems": max_items, "description": text}


def cut_to(high: int, text: str) -> Schema:
    """A number of tokens to keep, or −1; null for absent."""
    return {**integer(-1, high, text), "not": {"const": 0}}


def mapping(text: str) -> Schema:
    """An object, or null for absent."""
    return {"type": ["object", "null"], "description": text}


def _source(text: str) -> Schema:
    return text_of(MAX_GRAMMAR_CHARS, text, min_chars=1)


_TOKEN: Final[Schema] = {"type": "integer", "minimum": 0, "maximum": MAX_TOKEN_ID}
_STOP: Final[Schema] = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
_MODEL: Final = text_of(256, "As in `GET /v1/models`; may be left out.", min_chars=1)

# What chat and text completions share.
OPTIONS: Final[dict[str, Schema]] = {
    "model": _MODEL,
    "stream": flag("Answer as an event stream."),
    "stream_options": {
        **mapping("Needs `stream`."),
        "properties": {
            "include_usage": flag("A last chunk with the counts."),
            "continuous_usage_stats": flag("With `include_usage`: the counts so far in every chunk."),
        },
    },
    "max_tokens": integer(1, MAX_MAX_TOKENS, "Tokens to make at most."),
    "min_tokens": integer(
        0, MAX_MAX_TOKENS, "No end and no stop id before this many tokens, which are at most `max_tokens`."
    ),
    "n": integer(1, MAX_N, "Choices for each prompt."),
    "stop": {
        "anyOf": [{"type": "null"}, _STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOPS}],
        "description": "Texts that end an answer; they are no part of it.",
    },
    "stop_token_ids": listed(_TOKEN, MAX_STOP_TOKEN_IDS, "Token ids that end an answer."),
    "ignore_eos": flag("The model's own end does not end the answer."),
    "include_stop_str_in_output": flag("The stop text, or the text of the stop id, that ended the answer stays in it."),
    "skip_special_tokens": flag("Leave special tokens out of the text (default true)."),
    "temperature": number(0, 2, "0 takes the likeliest token (default 1)."),
    "top_k": integer(-1, 2**31 - 1, "Choose among so many; 0 and −1 among all."),
    "top_p": number(0, 1, "Choose among the likeliest with this share together.", is_low_open=True),
    "min_p": number(0, 1, "Choose among tokens at least so likely, relative to the likeliest."),
    "repetition_penalty": number(0, 10, "Over prompt and answer; 1 is none.", is_low_open=True),
    "presence_penalty": number(-2, 2, "Over the answer."),
    "frequency_penalty": number(-2, 2, "Over the answer, by count."),
    "seed": integer(-(2**63), 2**64 - 1, "Equal seeds give equal answers."),
    "logit_bias": {
        "type": ["object", "null"],
        "propertyNames": {"pattern": "^[0-9]{1,10}$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        "maxProperties": MAX_LOGIT_BIAS,
        "description": "Token id to what is added to its logit.",
    },
    "allowed_token_ids": listed(_TOKEN, MAX_ALLOWED_TOKEN_IDS, "The only ids that may be chosen."),
    "prompt_logprobs": integer(
        0, MAX_TOP_LOGPROBS, "Log-probabilities of the prompt's tokens, with so many alternatives; not in a stream."
    ),
    "truncate_prompt_tokens": cut_to(
        MAX_MAX_TOKENS, "Keep only so many of the prompt's last tokens; −1: as many as fit. `usage` says the cut."
    ),
    "truncation_side": choice(("left", "right"), "Keep the first ones instead: `right`."),
    "bad_words": listed(
        {"type": "string", "minLength": 1, "maxLength": MAX_BAD_WORD_CHARS, "pattern": r"\S"},
        MAX_BAD_WORDS,
        "Texts that the answer may not hold as the tokenizer writes them, at its start and behind a blank.",
    ),
    "return_token_ids": flag("Add `prompt_token_ids` and `token_ids`."),
    "return_tokens_as_token_ids": flag("Log-probabilities name tokens by id: `token_id:5`."),
    "response_format": RESPONSE_FORMAT,
    "structured_outputs": STRUCTURED,
    "guided_json": {"anyOf": SCHEMA_OR_TEXT, "description": "A JSON Schema, as an object or as text."},
    "guided_json_object": flag("Any JSON object."),
    "guided_regex": _source("A regular expression (Rust's syntax) for the whole answer."),
    "guided_choice": listed(
        {"type": "string", "minLength": 1}, MAX_CHOICES, "The answer is one of these.", min_items=1
    ),
    "guided_grammar": _source("A grammar, in llguidance's Lark or in GBNF."),
    "grammar": _source("The same, under llama.cpp's name."),
    "json_schema": {"anyOf": SCHEMA_OR_TEXT, "description": "A JSON Schema, under llama.cpp's name."},
    "priority": integer(0, 2**31 - 1, "Larger runs later."),
    "cache_salt": text_of(256, "Prefix-cache blocks are shared only between equal salts."),
    "add_special_tokens": flag("Let the tokenizer add its own BOS (default: completions yes, chat no)."),
    "user": text_of(1024, "Taken, and not used."),
}  # fmt: skip

CHAT: Final[dict[str, Schema]] = {
    "messages": {
        "type": "array",
        "items": ref("Message"),
        "minItems": 1,
        "maxItems": MAX_MESSAGES,
        "description": "The conversation.",
    },
    "max_completion_tokens": integer(1, MAX_MAX_TOKENS, "The same as `max_tokens`; the smaller of both counts."),
    "include_reasoning": flag("Show what the model thought (default true)."),
    "logprobs": flag("Report the log-probability of each chosen token."),
    "top_logprobs": integer(0, MAX_TOP_LOGPROBS, "… and of so many alternatives; needs `logprobs`."),
    "tools": listed(ref("Tool"), MAX_TOOLS, "Functions that may be called, each with a name of its own."),
    "tool_choice": TOOL_CHOICE,
    "parallel_tool_calls": flag("Several calls in one answer (default true; false where a call is forced)."),
    "chat_template_kwargs": {
        **mapping("Variables of the model's chat template, such as `enable_thinking`."),
        "propertyNames": {
            "pattern": "^[A-Za-z_][A-Za-z0-9_]*$",
            "maxLength": 64,
            "not": {"enum": sorted(RESERVED_TEMPLATE_NAMES)},
        },
        "additionalProperties": {"type": ["string", "number", "boolean", "null"]},
    },
    "reasoning_effort": text_of(64, "The same variable of the template, where it reads it."),
    "add_generation_prompt": flag("End the prompt with the opening of the assistant's turn (default true)."),
    "continue_final_message": flag("Go on with the last message instead; not with `add_generation_prompt`."),
    "echo": flag("With `continue_final_message`: the answer begins with that message."),
    "modalities": {"enum": [["text"], None], "description": '`["text"]` only.'},
    **OPTIONS,
}

COMPLETION: Final[dict[str, Schema]] = {
    "prompt": {
        "anyOf": [
            {"type": "string", "minLength": 1},
            {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1, "maxItems": MAX_SEQUENCES},
            {"type": "array", "items": _TOKEN, "minItems": 1},
            {
                "type": "array",
                "items": {"type": "array", "items": _TOKEN, "minItems": 1},
                "minItems": 1,
                "maxItems": MAX_SEQUENCES,
            },
        ],
        "description": f"Text, texts, token ids, or lists of token ids, times `n` at most {MAX_SEQUENCES}.",
    },
    "echo": flag("The answer begins with the prompt, and so do its log-probabilities."),
    "logprobs": integer(0, MAX_TOP_LOGPROBS, "Report log-probabilities, with so many alternatives."),
    "best_of": integer(1, MAX_N, "Make so many, at least `n`, answer with the `n` likeliest; not in a stream."),
    **OPTIONS,
    "max_tokens": integer(
        0, MAX_MAX_TOKENS, "Tokens to make at most; 0, with `echo` or `prompt_logprobs`, for the prompt alone."
    ),
}

MESSAGES: Final[dict[str, Schema]] = {
    "output_config": OUTPUT_CONFIG,
    "output_format": OUTPUT_FORMAT,
    "model": _MODEL,
    "messages": {
        "type": "array",
        "items": TURN,
        "minItems": 1,
        "maxItems": MAX_MESSAGES,
        "description": "The conversation.",
    },
    "system": SYSTEM,
    "max_tokens": {
        "type": "integer",
        "minimum": 1,
        "maximum": MAX_MAX_TOKENS,
        "description": "Tokens to make at most.",
    },
    "stop_sequences": listed(_STOP, MAX_STOPS, "Texts that end an answer."),
    "stream": flag("Answer as an event stream."),
    "temperature": number(0, 1, "0 takes the likeliest token (default 1)."),
    "top_p": number(0, 1, "As above.", is_low_open=True),
    "top_k": integer(0, 2**31 - 1, "As above."),
    "tools": listed(MESSAGE_TOOL, MAX_TOOLS, "Functions that may be called, each with a name of its own."),
    "tool_choice": MESSAGE_CHOICE,
    "thinking": THINKING,
    "metadata": mapping("Taken, and not used."),
    "service_tier": text_of(64, "Taken, and not used."),
}

TOKENIZE: Final[dict[str, Schema]] = {
    "model": text_of(256, "A name of `GET /v1/models`; may be left out."),
    "prompt": text_of(2**26, "The text."),
    "content": text_of(2**26, "The text, under llama.cpp's name."),
    "messages": listed(
        ref("Message"), MAX_MESSAGES, "A conversation instead; all of chat's fields apply.", min_items=1
    ),
    "add_special_tokens": flag("As in completions (default true)."),
    "add_special": flag("The same, under llama.cpp's name."),
    "return_token_strs": flag("Give each token's text too."),
    "with_pieces": flag("Give each token as `{id, piece}`, as llama.cpp does."),
}

DETOKENIZE: Final[dict[str, Schema]] = {
    "model": text_of(256, "A name of `GET /v1/models`; may be left out."),
    "tokens": {"type": "array", "items": _TOKEN, "maxItems": MAX_IDS, "description": "Token ids."},
}
