"""What an answer must look like, as clients ask for it: four spellings of one wish, read into one ``Grammar``.

``response_format`` is OpenAI's, ``structured_outputs`` and ``guided_…`` are vLLM's, ``grammar`` and ``json_schema``
llama.cpp's. Here a wish is only read; whether its grammar can be used is found out by ``text.grammar_check``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final

from headrace.base.errors import RequestError
from headrace.protocol.fields import Fields
from headrace.protocol.frames import MAX_GRAMMAR_CHARS, Grammar, GrammarKind
from headrace.protocol.strict_json import decode_object

MAX_CHOICES: Final = 1024
# A schema sent as text is decoded by the strict reader, whose depth limit keeps what recurses over schemas safe.
_ANY_OBJECT: Final = '{"type": "object"}'
_KINDS: Final = ("json", "regex", "choice", "grammar", "json_object")
# How the masks are made is the server's business; these change no answer.
HARMLESS: Final = frozenset(
    {"guided_decoding_backend", "guided_whitespace_pattern", "disable_fallback", "disable_any_whitespace"}
)


@dataclass(frozen=True, slots=True)
class Wish:
    """A grammar, and the request's field that it came from."""

    grammar: Grammar
    param: str


def take_wish(fields: Fields) -> Wish | None:
    """Takes whichever of the spellings is there.

    Raises:
        RequestError: a malformed one, or two at once.
    """
    wishes = [
        wish
        for wish in (_take_response_format(fields), _take_structured_outputs(fields), *_take_guided(fields))
        if wish is not None
    ]
    if len(wishes) > 1:
        raise RequestError(
            f"{wishes[0].param} and {wishes[1].param} both say what the answer must look like: send one of them",
            param=wishes[1].param,
        )
    return wishes[0] if wishes else None


def json_wish(schema: object, param: str) -> Wish:
    """Makes the wish for JSON of a schema."""
    return Wish(Grammar(GrammarKind.JSON, json.dumps(schema, ensure_ascii=False)), param)


def choice_lark(choices: list[str]) -> str:
    """Gives the Lark grammar of a choice between texts."""
    return "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)


def _take_response_format(fields: Fields) -> Wish | None:
    values = fields.mapping("response_format")
    if values is None:
        return None
    inner = Fields(values, "response_format.")
    kind = inner.take("type")
    match kind:
        case "text":
            return None
        case "json_object":
            schema = inner.take("schema")  # llama.cpp's short form
            if schema is None:
                return Wish(Grammar(GrammarKind.JSON, _ANY_OBJECT), "response_format")
            return _schema_wish(inner, "schema", schema)
        case "json_schema":
            holder = inner.mapping("json_schema")
            if holder is None:
                raise inner.missing("json_schema")
            deeper = Fields(holder, "response_format.json_schema.")
            deeper.text("name", 256)
            deeper.flag("strict")
            schema = deeper.take("schema")
            return _schema_wish(deeper, "schema", {"type": "object"} if schema is None else schema)
        case _:
            raise inner.wrong("type", kind, '"text", "json_object" or "json_schema"')


def _take_structured_outputs(fields: Fields) -> Wish | None:
    values = fields.mapping("structured_outputs")
    if values is None:
        return None
    inner = Fields(values, "structured_outputs.")
    wishes = [wish for name in _KINDS if (wish := _take_kind(inner, name, name)) is not None]
    if len(wishes) != 1 and values.get("json_object") is not False:
        raise RequestError(
            f"structured_outputs must hold exactly one of {', '.join(_KINDS)}", param="structured_outputs"
        )
    unknown = [name for name in inner.unknown() if name.rpartition(".")[2] not in HARMLESS | {"whitespace_pattern"}]
    if unknown:
        raise RequestError(f"{unknown[0]} is not supported by this server", param=unknown[0])
    return wishes[0] if wishes else None


def _take_guided(fields: Fields) -> list[Wish | None]:
    fields.take_all(HARMLESS)
    return [
        *(_take_kind(fields, name, "guided_" + name) for name in _KINDS),
        _take_kind(fields, "grammar", "grammar"),
        _take_kind(fields, "json", "json_schema"),
    ]


def _take_kind(fields: Fields, kind: str, name: str) -> Wish | None:
    match kind:
        case "json":
            value = fields.take(name)
            return None if value is None else _schema_wish(fields, name, value)
        case "json_object":
            is_wanted = fields.flag(name)
            return Wish(Grammar(GrammarKind.JSON, _ANY_OBJECT), fields.path_of(name)) if is_wanted else None
        case "choice":
            items = fields.items(name, MAX_CHOICES)
            if items is None:
                return None
            choices = [item for item in items if isinstance(item, str) and item]
            if len(choices) != len(items) or not choices:
                raise fields.wrong(name, items, "a list of texts, none of them empty")
            return Wish(Grammar(GrammarKind.LARK, choice_lark(choices)), fields.path_of(name))
        case _:
            text = fields.text(name, MAX_GRAMMAR_CHARS)
            if text is None:
                return None
            if not text:
                raise fields.wrong(name, text, f"a {kind}")
            return Wish(Grammar(GrammarKind.REGEX if kind == "regex" else GrammarKind.LARK, text), fields.path_of(name))


def _schema_wish(fields: Fields, name: str, value: object) -> Wish:
    if isinstance(value, str):
        try:
            value = decode_object(value.encode())
        except RequestError as fault:
            raise RequestError(f"{fields.path_of(name)}: {fault.message}", param=fields.path_of(name)) from fault
    if not isinstance(value, dict) and not isinstance(value, bool):
        raise fields.wrong(name, value, "a JSON Schema: an object, or true or false")
    return json_wish(value, fields.path_of(name))
