"""What models write, as recorded shapes of their families, parted into thoughts, text and calls."""

# ruff: noqa: E501 (a recorded output stands on one line)
from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.protocol.answers import CallDelta, Thought
from headrace.protocol.tool_use import ToolUse
from headrace.text.message import Dialect, MessageReader
from headrace.text.reasoning import Marks, choose_marks
from headrace.text.tool_format import (
    FUNCTION_GEMMA,
    GEMMA4,
    GENERIC,
    HERMES,
    LLAMA3,
    MISTRAL,
    ToolFormat,
    calls_lark,
    choose_format,
)

TOOLS: list[dict[str, object]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
    for name in ("get_weather", "get_time")
]
USE = ToolUse(TOOLS, TOOLS, is_forced=False, is_parallel=True)
THINK = Marks("<think>", "</think>")
PARIS = {"city": "Paris"}
ROME = {"city": 'Rome "the old" {1}</tool_call>'}


def whole(
    form: ToolFormat,
    parts: list[str],
    *,
    use: ToolUse | None = USE,
    marks: Marks | None = None,
    is_thinking: bool = False,
    is_forced: bool = False,
) -> dict[str, Any]:
    reader = MessageReader(Dialect(form, marks), use, is_forced=is_forced, is_thinking=is_thinking)
    thought, text = "", ""
    calls: list[dict[str, str]] = []
    items = [item for part in parts for item in reader.push(part)] + reader.flush()
    for item in items:
        match item:
            case Thought():
                thought += item.text
            case CallDelta(index, identity, name, arguments):
                if name is not None:
                    assert identity is not None
                    assert index == len(calls)
                    calls.append({"name": name, "arguments": arguments})
                else:
                    assert identity is None
                    calls[index]["arguments"] += arguments
            case _:
                text += item
    return {"thought": thought, "text": text, "calls": calls}


def call(name: str, arguments: object) -> dict[str, str]:
    return {"name": name, "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments)}


# Form, what the model wrote, text, calls. The shapes are those that the families' model cards and the parser tests of
# vLLM (tests/tool_use, tests/entrypoints/openai/tool_parsers) and llama.cpp (tests/test-chat.cpp) show.
RECORDED = {
    "hermes": (HERMES, f'<tool_call>\n{{"name": "get_weather", "arguments": {json.dumps(PARIS)}}}\n</tool_call>', "", [call("get_weather", PARIS)]),
    "hermes-text": (HERMES, f'Let me look.\n\n<tool_call>\n{{"name": "get_weather", "arguments": {json.dumps(PARIS)}}}\n</tool_call>\n', "Let me look.", [call("get_weather", PARIS)]),
    "hermes-two": (HERMES, f'<tool_call>\n{{"name": "get_weather", "arguments": {json.dumps(PARIS)}}}\n</tool_call>\n<tool_call>\n{{"name": "get_time", "arguments": {json.dumps(ROME)}}}\n</tool_call>', "", [call("get_weather", PARIS), call("get_time", ROME)]),
    "hermes-arguments-first": (HERMES, f'<tool_call>{{"arguments": {json.dumps(ROME)}, "name": "get_time"}}</tool_call>', "", [call("get_time", ROME)]),
    "hermes-no-arguments": (HERMES, '<tool_call>{"name": "get_time"}</tool_call>', "", [call("get_time", "{}")]),
    "hermes-null-arguments": (HERMES, '<tool_call>{"name": "get_time", "arguments": null}</tool_call>', "", [call("get_time", "{}")]),
    "hermes-text-arguments": (HERMES, '<tool_call>{"name": "get_time", "arguments": "{\\"city\\": \\"K\\u00f6ln \\ud83d\\ude00\\"}"}</tool_call>', "", [call("get_time", '{"city": "Köln 😀"}')]),
    "hermes-unclosed": (HERMES, f'<tool_call>\n{{"name": "get_weather", "arguments": {json.dumps(PARIS)}}}', "", [call("get_weather", PARIS)]),
    "hermes-cut": (HERMES, '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Par', "", [call("get_weather", '{"city": "Par')]),
    "hermes-cut-before-name": (HERMES, 'So: <tool_call>\n{"na', 'So: <tool_call>\n{"na', []),
    "hermes-not-json": (HERMES, "<tool_call>get_weather(Paris)</tool_call> ok", "<tool_call>get_weather(Paris)</tool_call> ok", []),
    "hermes-none": (HERMES, "  The weather is fine < 3 <tool \n", "  The weather is fine < 3 <tool \n", []),
    "hermes-nested": (HERMES, '<tool_call>{"type": "function", "function": {"name": "get_time", "parameters": {"city": [{"a": "}"}]}}}</tool_call>', "", [call("get_time", {"city": [{"a": "}"}]})]),
    "llama3": (LLAMA3, '{"name": "get_weather", "parameters": {"city": "Paris"}}', "", [call("get_weather", PARIS)]),
    "llama3-tag": (LLAMA3, '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}', "", [call("get_weather", PARIS)]),
    "llama3-two": (LLAMA3, '{"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "get_time", "parameters": {}}', "", [call("get_weather", PARIS), call("get_time", "{}")]),
    "llama3-function": (LLAMA3, '{"type": "function", "name": "get_weather", "parameters": {"city": "Paris"}}', "", [call("get_weather", PARIS)]),
    "llama3-json-answer": (LLAMA3, '{"city": "Paris", "name": "x"}', '{"city": "Paris", "name": "x"}', []),
    "llama3-other-name": (LLAMA3, '{"name": "Paris", "parameters": {}}', '{"name": "Paris", "parameters": {}}', []),
    "llama3-text": (LLAMA3, 'It is {"name": "get_weather"}', 'It is {"name": "get_weather"}', []),
    "mistral": (MISTRAL, '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}]', "", [call("get_weather", PARIS)]),
    "mistral-two": (MISTRAL, 'Sure.[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "get_time", "arguments": {"city": "Rome"}, "id": "a1"}]', "Sure.", [call("get_weather", PARIS), call("get_time", {"city": "Rome"})]),
    "mistral-named": (MISTRAL, '[TOOL_CALLS]get_weather{"city": "Paris"}[TOOL_CALLS]get_time[ARGS]{"city": "]}"}', "", [call("get_weather", PARIS), call("get_time", {"city": "]}"})]),
    "mistral-id": (MISTRAL, '[TOOL_CALLS]get_weather[CALL_ID]c1[ARGS]{"city": "Paris"}', "", [call("get_weather", PARIS)]),
    "gemma": (FUNCTION_GEMMA, "<start_function_call>call:get_weather{city:<escape>Paris \"x\"<escape>,days:3,deep:{a:[1,<escape>b<escape>],on:true}}<end_function_call>", "", [call("get_weather", '{"city":"Paris \\"x\\"","days":3,"deep":{"a":[1,"b"],"on":true}}')]),
    "gemma4": (GEMMA4, 'Ok.\n<|tool_call>call:get_time{city:<|"|>Ro<|me<|"|>}<tool_call|><|tool_call>call:get_time{}<tool_call|>', "Ok.", [call("get_time", '{"city":"Ro<|me"}'), call("get_time", "{}")]),
    "gemma-not": (FUNCTION_GEMMA, "<start_function_call>hello", "<start_function_call>hello", []),
    "generic-fence": (GENERIC, '```json\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n```', "", [call("get_weather", PARIS)]),
    "generic-list": (GENERIC, '[{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "get_time", "arguments": {}}]', "", [call("get_weather", PARIS), call("get_time", "{}")]),
    "generic-code": (GENERIC, "```python\nprint(1)\n```\n", "```python\nprint(1)\n```\n", []),
    "generic-json-fence": (GENERIC, '```json\n{"a": 1}\n```', '```json\n{"a": 1}\n```', []),
    "generic-number-list": (GENERIC, "[1, 2, 3]", "[1, 2, 3]", []),
}  # fmt: skip


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_output_is_read(name: str) -> None:
    form, written, text, calls = RECORDED[name]

    assert whole(form, [written]) == {"thought": "", "text": text, "calls": calls}


@pytest.mark.parametrize("name", RECORDED)
def test_every_split_of_a_recorded_output_reads_alike(name: str) -> None:
    form, written, *_ = RECORDED[name]
    expected = whole(form, [written])

    for at in range(len(written) + 1):
        assert whole(form, [written[:at], written[at:]]) == expected, written[:at]
    assert whole(form, list(written)) == expected


@given(name=st.sampled_from(sorted(RECORDED)), cuts=st.lists(st.integers(0, 200), max_size=12))
def test_any_split_reads_alike(name: str, cuts: list[int]) -> None:
    form, written, *_ = RECORDED[name]
    edges = sorted({0, len(written), *(min(cut, len(written)) for cut in cuts)})
    parts = [written[start:stop] for start, stop in pairwise(edges)]

    assert whole(form, parts) == whole(form, [written])


@given(
    form=st.sampled_from([HERMES, LLAMA3, MISTRAL, FUNCTION_GEMMA, GEMMA4, GENERIC]),
    parts=st.lists(
        st.one_of(
            st.sampled_from(
                [
                    "<tool_call>", "</tool_call>", '{"name": "get_time", ', '"arguments": {', "}", "]", "[TOOL_CALLS]",
                    "[", "<|python_tag|>", "<start_function_call>call:get_time{", "<escape>", "<end_function_call>",
                    "```json\n", ";", ",", "<think>", "</think>", "\\", '"', " \n",
                ]
            ),
            st.text(max_size=6),
        ),
        max_size=12,
    ),
)  # fmt: skip
def test_hostile_output_loses_no_letter_that_is_no_call_and_splits_alike(form: ToolFormat, parts: list[str]) -> None:
    written = "".join(parts)

    joined = whole(form, [written], marks=THINK)

    assert whole(form, list(written), marks=THINK) == joined
    if not joined["calls"] and not joined["thought"] and "<think>" not in written:
        assert joined["text"] == written


def test_arguments_begin_within_two_pieces_of_their_first_character() -> None:
    reader = MessageReader(Dialect(HERMES, None), USE, is_forced=False, is_thinking=False)
    reader.push('<tool_call>\n{"name": "get_weather", "arguments": ')

    first = reader.push('{"ci')

    assert [item.arguments for item in first if isinstance(item, CallDelta)] == ["", '{"ci']


def test_only_the_first_call_counts_where_calls_may_not_be_parallel() -> None:
    use = ToolUse(TOOLS, TOOLS, is_forced=False, is_parallel=False)

    assert len(whole(*RECORDED["hermes-two"][:1], [RECORDED["hermes-two"][1]], use=use)["calls"]) == 1


@pytest.mark.parametrize(
    ("written", "is_thinking", "thought", "text"),
    [
        pytest.param("<think>\nHm, 2.\n</think>\n\nTwo.", False, "Hm, 2.", "Two.", id="whole"),
        pytest.param("Hm.\n</think>\n\nTwo.", True, "Hm.", "Two.", id="opened-by-the-prompt"),
        pytest.param("<think>\nHm, wait", False, "Hm, wait", "", id="cut"),
        pytest.param("\n<think></think>Two", False, "", "Two", id="empty"),
        pytest.param("Two <think>x</think>", False, "", "Two <think>x</think>", id="not-at-the-start"),
        pytest.param("<thin", False, "", "<thin", id="half-a-mark"),
        pytest.param("a</thin</think>b", True, "a</thin", "b", id="nearly-a-mark"),
    ],
)
def test_thoughts_are_parted_from_the_answer(written: str, is_thinking: bool, thought: str, text: str) -> None:
    expected = {"thought": thought, "text": text, "calls": []}

    assert whole(HERMES, [written], use=None, marks=THINK, is_thinking=is_thinking) == expected
    assert whole(HERMES, list(written), use=None, marks=THINK, is_thinking=is_thinking) == expected


def test_a_call_in_a_thought_is_no_call() -> None:
    written = (
        '<think>I could <tool_call>{"name": "get_time"}</tool_call></think><tool_call>{"name": "get_time"}</tool_call>'
    )

    joined = whole(HERMES, [written], marks=THINK)

    assert len(joined["calls"]) == 1
    assert "I could <tool_call>" in joined["thought"]


@pytest.mark.parametrize(
    ("template", "form", "marks"),
    [
        ("{{ '<tool_call>' }}", HERMES, None),
        ("[TOOL_CALLS]", MISTRAL, None),
        ('<|start_header_id|> {"name": x, "parameters": y}', LLAMA3, None),
        ("<start_function_call>", FUNCTION_GEMMA, None),
        ("<|im_start|>", GENERIC, None),
        ("<tool_call> <think>", HERMES, THINK),
    ],
)
def test_a_dialect_is_read_from_the_template(template: str, form: ToolFormat, marks: Marks | None) -> None:
    assert choose_format([template]) is form
    assert choose_marks([template]) == marks


@pytest.mark.parametrize("parameters", [None, {}, {"type": "object", "properties": {}}], ids=str)
def test_a_function_without_parameters_is_called_without_arguments(parameters: Any) -> None:
    from tests.unit.text.test_text_grammar import accepts

    from headrace.protocol.frames import Grammar, GrammarKind

    function = {"name": "now"} if parameters is None else {"name": "now", "parameters": parameters}
    tools: list[dict[str, object]] = [{"type": "function", "function": function}]
    grammar = Grammar(GrammarKind.LARK, calls_lark(LLAMA3, ToolUse(tools, tools, is_forced=True, is_parallel=False)))

    assert accepts(grammar, '{"name": "now", "parameters": {}}')
    assert not accepts(grammar, '{"name": "now", "parameters": {"key": 1}}')


def test_with_a_schema_the_answer_is_a_call_or_json_of_it() -> None:
    from tests.unit.text.test_text_grammar import accepts

    from headrace.protocol.frames import Grammar, GrammarKind

    grammar = Grammar(GrammarKind.LARK, calls_lark(HERMES, USE, {"type": "array", "items": {"const": 1}}))

    assert accepts(grammar, "[1, 1]")
    assert accepts(grammar, f'<tool_call>\n{{"name": "get_time", "arguments": {json.dumps(PARIS)}}}\n</tool_call>')
    assert not accepts(grammar, "[2]")


@pytest.mark.parametrize("form", [HERMES, LLAMA3, MISTRAL, FUNCTION_GEMMA, GENERIC], ids=lambda form: form.name)
def test_what_a_forced_grammar_lets_through_is_read_back(form: ToolFormat) -> None:
    from tests.unit.text.test_text_grammar import accepts

    from headrace.protocol.frames import Grammar, GrammarKind

    bodies = [
        form.head + json.dumps(name) + form.middle + json.dumps(PARIS) + form.tail
        for name in ("get_time", "get_weather")
    ]
    written = form.before + form.between.join(bodies) + form.after

    assert accepts(Grammar(GrammarKind.LARK, calls_lark(form, USE)), written)
    assert whole(form, list(written), is_forced=True) == {
        "thought": "",
        "text": "",
        "calls": [call("get_time", PARIS), call("get_weather", PARIS)],
    }


@pytest.mark.parametrize("form", [HERMES, LLAMA3, MISTRAL, FUNCTION_GEMMA, GENERIC], ids=lambda form: form.name)
def test_a_forced_call_cut_anywhere_leaves_no_marks_in_the_text(form: ToolFormat) -> None:
    use = ToolUse(TOOLS, TOOLS, is_forced=True, is_parallel=False)
    written = (
        form.before + form.head + json.dumps("get_time") + form.middle + json.dumps(PARIS) + form.tail + form.after
    )

    for stop in range(len(written) + 1):
        told = whole(form, list(written[:stop]), use=use, is_forced=True)
        assert told["text"] == ""
        assert all(json.dumps(PARIS).startswith(made["arguments"]) for made in told["calls"])
    assert told["calls"] == [call("get_time", PARIS)]


def test_what_is_cut_before_it_is_a_call_stays_text_where_text_is_allowed() -> None:
    assert whole(HERMES, list('<tool_call>\n{"na'))["text"] == '<tool_call>\n{"na'
