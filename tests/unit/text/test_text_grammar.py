from __future__ import annotations

import json
import time
from collections.abc import Iterator

import numpy as np
import pytest

from headrace.base.errors import RequestError
from headrace.protocol.frames import MAX_GRAMMAR_CHARS, Grammar, GrammarKind
from headrace.text.grammar import GrammarState
from headrace.text.grammar_check import CheckLimits, GrammarCheck
from headrace.text.grammar_child import byte_vocabulary

VOCABULARY = byte_vocabulary()
EOS = 256


def schema(value: object) -> Grammar:
    return Grammar(GrammarKind.JSON, json.dumps(value))


def accepts(grammar: Grammar, text: str) -> bool:
    """Whether the masks let exactly this text through, and then let it end."""
    state = GrammarState.build(grammar, VOCABULARY)
    mask = np.zeros(VOCABULARY.words_per_mask, np.uint32)
    for token in [*text.encode(), EOS]:
        state.fill(mask)
        if state.failure or not (mask[token // 32] >> (token % 32)) & 1:
            return False
        is_complete = state.accept(token)
        if is_complete and token != EOS:
            return text.encode().endswith(bytes([token])) and not state.failure
    return True


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        pytest.param(schema({"type": "integer", "minimum": 3, "maximum": 12}), "11", "13", id="bounds"),
        pytest.param(schema({"enum": ["ann", "bo"]}), '"bo"', '"al"', id="enum"),
        pytest.param(schema({"type": "string", "pattern": "^[a-c]{2}$"}), '"ab"', '"ad"', id="pattern"),
        pytest.param(
            schema({"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"type": "null"}, {"const": 1}]}}}),
            "null", "2", id="ref",
        ),
        pytest.param(
            schema({"type": "object", "properties": {"a": {}}, "required": ["a"], "additionalProperties": False}),
            '{"a": {"b": [1, 2]}}',
            "{}",
            id="object",
        ),
        pytest.param(schema({"type": "object"}), '{\n  "x": 1\n}', '{  "x": 1}', id="blanks"),
        pytest.param(Grammar(GrammarKind.REGEX, "(lock|weir)s?"), "weirs", "mill", id="regex"),
        pytest.param(Grammar(GrammarKind.LARK, 'start: "a" start "b" | "c"'), "aacbb", "aacb", id="lark"),
    ],
)  # fmt: skip
def test_masks_let_good_answers_through_and_no_others(grammar: Grammar, good: str, bad: str) -> None:
    assert accepts(grammar, good)
    assert not accepts(grammar, bad)


RECORD = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("value", "text", "is_taken"),
    [
        pytest.param(RECORD, '{"a": 1}', True, id="listed"),
        pytest.param(RECORD, '{"a": 1, "b": 2}', False, id="not-listed"),
        pytest.param({**RECORD, "additionalProperties": True}, '{"a": 1, "b": 2}', True, id="asked-for"),
        pytest.param({"type": "object"}, '{"b": 2}', True, id="nothing-listed"),
        pytest.param({"type": "array", "items": RECORD}, '[{"a": 1, "b": 2}]', False, id="nested"),
        pytest.param({"properties": {"r": {"$ref": "#/$defs/r"}}, "$defs": {"r": RECORD}, "type": "object"},
                     '{"r": {"a": 1, "b": 2}}', False, id="referred-to"),
        pytest.param({"allOf": [RECORD, {"type": "object", "properties": {"b": {"type": "integer"}}}]},
                     '{"a": 1, "b": 2}', True, id="joined"),
        pytest.param({"enum": [{"properties": {"x": 1}}]}, '{"properties": {"x": 1}}', True, id="a-value"),
        pytest.param({**RECORD, "required": ["a", "z"]}, '{"a": 1, "z": 2}', True, id="required-but-not-listed"),
    ],
)  # fmt: skip
def test_objects_that_list_their_properties_are_closed(value: object, text: str, is_taken: bool) -> None:
    assert accepts(schema(value), text) is is_taken


def test_a_copy_moves_on_alone() -> None:
    first = GrammarState.build(Grammar(GrammarKind.REGEX, "ab|ac"), VOCABULARY)
    first.accept(ord("a"))

    second = first.copy()

    assert second.accept(ord("b"))
    assert first.accept(ord("c"))
    assert first.failure is second.failure is None


@pytest.fixture(scope="module")
def check() -> Iterator[GrammarCheck]:
    checking = GrammarCheck(CheckLimits(cpu_s=0.5))
    yield checking
    checking.close()


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        pytest.param(schema({"$ref": "#/$defs/Nope"}), "/$defs/Nope", id="pointer"),
        pytest.param(schema({"type": "array", "uniqueItems": True}), "uniqueItems", id="keyword"),
        pytest.param(schema({"type": "strin"}), "strin", id="type"),
        pytest.param(schema(False), "false", id="false"),
        pytest.param(schema({"$ref": "http://127.0.0.1/x"}), "http://127.0.0.1/x", id="remote"),
        pytest.param(schema({"$ref": "#"}), "'#' leads back to itself", id="loop"),
        pytest.param(
            schema({"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"allOf": [{"$ref": "#/$defs/a~1b"}]}}}),
            "'#/$defs/a~1b' leads back to itself",
            id="loop-in-allof",
        ),
        pytest.param(
            schema(
                {
                    "properties": {"x": {"$ref": "#/$defs/a"}},
                    "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
                }
            ),
            "leads back to itself",
            id="loop-of-two",
        ),
        pytest.param(
            schema({"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]}),
            "no finite value fits",
            id="endless-object",
        ),
        pytest.param(
            schema({"type": "array", "items": {"$ref": "#"}, "minItems": 1}), "no finite value", id="endless-list"
        ),
        pytest.param(Grammar(GrammarKind.LARK, "start: a\na: a"), "nothing but itself", id="loop-of-rules"),
        pytest.param(Grammar(GrammarKind.REGEX, "(a"), "unclosed", id="regex"),
        pytest.param(Grammar(GrammarKind.REGEX, "(?=a)b"), "look-around", id="look-around"),
        pytest.param(Grammar(GrammarKind.LARK, "start: nobody"), "nobody", id="lark"),
        pytest.param(Grammar(GrammarKind.LARK, 'root ::= "a" | ('), "", id="gbnf"),
    ],
)
def test_a_bad_grammar_is_refused_with_its_fault(check: GrammarCheck, grammar: Grammar, words: str) -> None:
    with pytest.raises(RequestError, match="response_format") as caught:
        check.check(grammar, "response_format")

    assert caught.value.stable_code == "invalid_grammar"
    assert words in caught.value.message
    assert len(caught.value.message) < 600


@pytest.mark.parametrize(
    "value",
    [
        pytest.param({"type": "object", "properties": {"x": {"$ref": "#"}}}, id="optional"),
        pytest.param({"anyOf": [{"$ref": "#/$defs/list"}, {"type": "null"}], "$defs": {"list": {
            "type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}}}, id="ends-with-null"),
        pytest.param({"type": "array", "items": {"$ref": "#"}}, id="list"),
        pytest.param({"properties": {"$ref": {"type": "string"}}, "type": "object"}, id="a-property-of-that-name"),
    ],
)  # fmt: skip
def test_a_schema_that_refers_to_itself_and_ends_is_taken(check: GrammarCheck, value: object) -> None:
    assert check.check(schema(value), "response_format")


def test_gbnf_becomes_lark(check: GrammarCheck) -> None:
    grammar = check.check(Grammar(GrammarKind.LARK, 'root ::= "yes" | "no"'), "guided_grammar")

    assert accepts(grammar, "yes")
    assert not accepts(grammar, "maybe")


DEEP_CHAIN = "start: x0\n" + "".join(f"x{i}: x{i + 1}\n" for i in range(8000)) + 'x8000: "a"\n'
DEEP_REFS = {
    "$ref": "#/$defs/a0",
    "$defs": {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(3000)} | {"a3000": {}},
}


@pytest.mark.parametrize(
    "grammar",
    [
        pytest.param(schema({"type": "integer", "multipleOf": 99_999_999}), id="endless"),
        pytest.param(Grammar(GrammarKind.LARK, DEEP_CHAIN), id="deep-rules"),
        pytest.param(schema(DEEP_REFS), id="deep-references"),
        pytest.param(Grammar(GrammarKind.REGEX, "a" * (MAX_GRAMMAR_CHARS + 1)), id="long"),
    ],
)
def test_a_bomb_costs_a_child_and_bounded_time(check: GrammarCheck, grammar: Grammar) -> None:
    began_s = time.process_time()

    with pytest.raises(RequestError) as caught:
        check.check(grammar, "guided_grammar")

    assert caught.value.stable_code == "grammar_too_expensive"
    assert time.process_time() - began_s < 0.5  # nothing of it was compiled here
    assert check.check(Grammar(GrammarKind.REGEX, "ok"), "guided_regex").source == "ok"


def test_a_verdict_is_remembered(check: GrammarCheck) -> None:
    grammar = schema({"type": "object", "properties": {"remembered": {"type": "integer"}}})
    check.check(grammar, "response_format")
    pid = check.child_pid
    check.close()

    check.check(grammar, "response_format")

    assert pid is not None
    assert check.child_pid is None  # no child was needed
