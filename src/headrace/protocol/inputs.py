"""The field ``input`` of the endpoints that do not generate: texts and token ids, in every form that clients send.

"text"                       one input
[12, 34]                     one input of token ids
[12, "text", 34]             one input of both, in a row (llama.cpp's)
["text", [12, 34], …]        a batch, each of any form
{"content": [{"type": "text", "text": "…"}]}, {"prompt_string": "…"}    a text, likewise in a batch (llama.cpp's)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from headrace.base.errors import RequestError
from headrace.protocol.fields import Fields, as_integer
from headrace.protocol.openai import MAX_TOKEN_ID

MAX_INPUTS: Final = 2**17
MODEL_LIMIT: Final = MAX_TOKEN_ID
"""Tokens to keep of an input: as many as the model takes."""
_MAX_PARTS: Final = 4096
_RULE: Final = "a text, a list of texts, or token ids, and not empty"


@dataclass(frozen=True, slots=True)
class Row:
    """One input of texts and token ids; only what is written there is in it: no special token is added."""

    parts: tuple[str | int, ...]


Input = str | list[int] | Row


def inputs_of(fields: Fields) -> tuple[Input, ...]:
    """Gives ``input``.

    Raises:
        RequestError: it is missing, empty or holds something else.
    """
    value = fields.take("input")
    if value is None:
        raise fields.missing("input")
    if not isinstance(value, list):
        return (_one(fields, value, "input", _RULE),)
    if not value:
        raise fields.wrong("input", value, _RULE)
    if len(value) > MAX_INPUTS:
        raise RequestError(f"input has {len(value)} entries, the limit is {MAX_INPUTS}", param="input")
    if any(as_integer(item) is not None for item in value):
        return (_row(fields, value, "input"),)
    return tuple(_one(fields, item, f"input[{index}]", "a text or token ids") for index, item in enumerate(value))


def _one(fields: Fields, value: object, name: str, rule: str) -> Input:
    if isinstance(value, str):
        return _filled(value, name)
    if isinstance(value, list):
        return _row(fields, value, name)
    if isinstance(value, dict) and len(value) == 1:
        if isinstance(value.get("prompt_string"), str):
            return _filled(str(value["prompt_string"]), f"{name}.prompt_string")
        if isinstance(value.get("content"), list):
            return _content(value["content"], f"{name}.content")
    raise fields.wrong(name, value, rule)


def _row(fields: Fields, value: list[object], name: str) -> Input:
    if not value:
        raise RequestError(f"{name} has no tokens: nothing can be made of it", param=name, code="empty_input")
    parts: list[str | int] = []
    for item in value:
        part = item if isinstance(item, str) else as_integer(item)
        if part is None:
            raise fields.wrong(name, value, f"token ids from 0 to {MAX_TOKEN_ID}, which may have texts among them")
        if isinstance(part, int) and not 0 <= part <= MAX_TOKEN_ID:
            raise RequestError(
                f"{name} holds token {part}, which is out of vocabulary: token ids are from 0 to {MAX_TOKEN_ID}",
                param=name,
            )
        parts.append(part)
    ids = [part for part in parts if isinstance(part, int)]
    if len(ids) == len(parts):
        return ids
    if len(parts) > _MAX_PARTS:
        raise RequestError(f"{name} has {len(parts)} texts and ids, the limit is {_MAX_PARTS}", param=name)
    return Row(tuple(parts))


def _content(parts: list[object], name: str) -> str:
    """Gives the text of content parts, joined as they stand."""
    texts: list[str] = []
    for index, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(text, str):
            raise RequestError(
                f"{name}[{index}] must be a part of type text with its text: this model reads nothing else",
                param=f"{name}[{index}]",
            )
        texts.append(text)
    return _filled("".join(texts), name)


def _filled(text: str, name: str) -> str:
    if not text:
        raise RequestError(f"{name} is empty: nothing can be made of it", param=name, code="empty_input")
    return text
