from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.base.errors import RequestError
from headrace.protocol.frames import Grammar, GrammarKind
from headrace.protocol.openai import parse_chat
from headrace.protocol.structured import Wish

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
JSON = Grammar(GrammarKind.JSON, json.dumps(SCHEMA))
ANY = Grammar(GrammarKind.JSON, '{"type": "object"}')


def wish(**fields: Any) -> Wish | None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}
    return parse_chat(json.dumps(body).encode()).options.wish


@pytest.mark.parametrize(
    ("fields", "grammar", "param"),
    [
        ({"response_format": {"type": "json_object"}}, ANY, "response_format"),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, JSON, "response_format.schema"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "strict": True, "schema": SCHEMA},
                }
            },
            JSON,
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {"json": SCHEMA}}, JSON, "structured_outputs.json"),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, JSON, "structured_outputs.json"),
        ({"structured_outputs": {"json_object": True}}, ANY, "structured_outputs.json_object"),
        ({"structured_outputs": {"regex": "a+"}}, Grammar(GrammarKind.REGEX, "a+"), "structured_outputs.regex"),
        (
            {"structured_outputs": {"choice": ["ja", 'n"n']}},
            Grammar(GrammarKind.LARK, 'start: "ja" | "n\\"n"'),
            "structured_outputs.choice",
        ),
        ({"guided_json": SCHEMA, "guided_decoding_backend": "x"}, JSON, "guided_json"),
        ({"guided_regex": "a"}, Grammar(GrammarKind.REGEX, "a"), "guided_regex"),
        ({"guided_choice": ["a"]}, Grammar(GrammarKind.LARK, 'start: "a"'), "guided_choice"),
        ({"guided_grammar": 'start: "a"'}, Grammar(GrammarKind.LARK, 'start: "a"'), "guided_grammar"),
        ({"grammar": 'root ::= "a"'}, Grammar(GrammarKind.LARK, 'root ::= "a"'), "grammar"),
        ({"json_schema": SCHEMA}, JSON, "json_schema"),
    ],
)
def test_every_spelling_becomes_one_wish(fields: dict[str, Any], grammar: Grammar, param: str) -> None:
    assert wish(**fields) == Wish(grammar, param)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": {"type": "text"}},
        {"response_format": None},
        {"structured_outputs": None},
        {"structured_outputs": {"json_object": False}},
        {"guided_json": None},
    ],
    ids=str,
)
def test_what_asks_for_nothing_is_no_wish(fields: dict[str, Any]) -> None:
    assert wish(**fields) is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "sound"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "json_object", "schema": 123}}, "response_format.schema"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a", 5]}}, "structured_outputs.choice"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "[" * 100 + "]" * 100}, "guided_json"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_regex": 5}, "guided_regex"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"guided_regex": "a", "allowed_token_ids": [1]}, "allowed_token_ids"),
    ],
    ids=str,
)  # fmt: skip
def test_a_wish_that_cannot_be_read_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        wish(**fields)

    assert caught.value.param == param
