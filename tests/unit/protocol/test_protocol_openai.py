"""What a request body may say, field by field, and what each refusal names."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.base.errors import PermissionDenied, RequestError
from headrace.protocol.openai import parse_chat, parse_completion

USER = {"role": "user", "content": "hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "set_lamp", "arguments": '{"room":"hall"}'}}
TOOL = {"type": "function", "function": {"name": "set_lamp", "parameters": {"type": "object"}}}


def chat(**fields: Any) -> Any:
    return parse_chat(json.dumps({"model": "m", "messages": [USER], **fields}).encode())


def completion(**fields: Any) -> Any:
    return parse_completion(json.dumps({"model": "m", "prompt": "x", **fields}).encode())


def refusal(**fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        chat(**fields)
    return caught.value


NUMBERS = {
    "temperature": [-0.1, 2.1, "1", True, [], 1e999],
    "top_p": [0, -1, 1.1, "x"],
    "min_p": [-0.1, 1.1],
    "repetition_penalty": [0, -1, 11],
    "presence_penalty": [-2.1, 2.1],
    "frequency_penalty": [-2.1, 2.1, {}],
    "top_k": [-2, 1.5, "5", True],
    "max_tokens": [0, -1, 1.5, "5", 2**63, True],
    "max_completion_tokens": [0, -1, 1.5, "5", True],
    "min_tokens": [-1, "1"],
    "n": [0, 9, 1.5, "2", True],
    "seed": [1.5, "1", True, []],
    "top_logprobs": [-1, 21, True],
    "stream": [1, "true"],
    "logprobs": [1, "yes"],
    "ignore_eos": [0],
    "stop": [5, [""], [1], ["x"] * 17, ["y" * 257], "", {}],
    "stop_token_ids": [[-1], ["a"], 5, [2**31]],
    "logit_bias": [{"a": 1}, {"1": "x"}, {"1": 101}, {"1": True}, {"-1": 1}, [], {str(i): 1 for i in range(1025)}],
    "stream_options": [True, []],
    "user": [5],
    "tool_choice": ["sometimes", 5],
    "reasoning_effort": [5, True, "x" * 65],
    "chat_template_kwargs": [{"messages": []}, {"x": []}, {"a b": 1}, 5],
}


@pytest.mark.parametrize(
    ("name", "value"),
    [pytest.param(name, value, id=f"{name}={str(value)[:20]}") for name, values in NUMBERS.items() for value in values],
)
def test_a_wrong_value_is_a_400_that_names_its_field(name: str, value: Any) -> None:
    if isinstance(value, float) and value == float("inf"):
        with pytest.raises(RequestError):
            parse_chat(b'{"model":"m","messages":[{"role":"user","content":"x"}],"temperature":1e999}')
        return

    error = refusal(**{name: value, **({"logprobs": True} if name == "top_logprobs" else {})})

    assert error.http_status == 400
    assert error.param == name
    assert name.split(".")[0] in error.message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("audio", {"voice": "x"}), ("functions", [{}]), ("function_call", "auto"), ("structural_tag", "{}"),
        ("modalities", ["text", "audio"]), ("logprob_token_ids", [5]),
        ("use_beam_search", True), ("length_penalty", 0.5),
        ("web_search_options", {}), ("documents", [{}]), ("chat_template", "{{ x }}"), ("api_base", "x"),
        ("trust_remote_code", True),
    ],
)  # fmt: skip
def test_a_known_field_that_would_change_the_answer_is_refused_by_name(name: str, value: Any) -> None:
    error = refusal(**{name: value})

    assert (error.http_status, error.param, error.stable_code) == (400, name, "unsupported_parameter")


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "text"}}, {"modalities": ["text"]}, {"length_penalty": 1},
        {"logprob_token_ids": []},
        {"skip_special_tokens": True}, {"use_beam_search": False}, {"function_call": "none"}, {"tool_choice": "none"},
        {"tool_choice": "auto"}, {"tools": [TOOL], "tool_choice": "auto"}, {"tools": [TOOL], "tool_choice": "none"},
        {"n": 1.0}, {"max_tokens": 3.0}, {"top_k": -1}, {"seed": -(2**63)}, {"seed": 2**64 - 1}, {"stop": []},
        {"temperature": 0}, {"temperature": 2}, {"logit_bias": {}}, {"priority": 0}, {"user": "u"},
    ],
    ids=str,
)  # fmt: skip
def test_neutral_and_legal_values_are_taken(fields: dict[str, Any]) -> None:
    assert chat(**fields).options.ignored_fields == ()


def test_null_is_the_same_as_absent_for_every_optional_field() -> None:
    names = [*NUMBERS, "tools", "response_format", "guided_json", "modalities", "priority", "cache_salt", "echo"]

    assert chat(**dict.fromkeys(names)) == chat()


def test_unknown_fields_are_reported_in_order_and_only_with_a_value() -> None:
    request = chat(zebra=1, store=False, apple=None, stream=True, stream_options={"include_usage": True, "odd": 1})

    assert request.options.ignored_fields == ("zebra", "store", "stream_options.odd")


@pytest.mark.parametrize(
    ("more", "values"),
    [
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low"}),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"x": 1}}, {"reasoning_effort": "low", "x": 1}),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
            {"reasoning_effort": "high"},
        ),
        ({"reasoning_effort": None}, {}),
    ],
)
def test_reasoning_effort_is_a_variable_of_the_template(more: dict[str, Any], values: dict[str, Any]) -> None:
    assert chat(**more).template_values == values


def test_stream_options_without_stream_are_ignored_where_they_ask_for_nothing() -> None:
    request = chat(stream_options={"include_usage": None})

    assert request.options.ignored_fields == ("stream_options",)
    assert not request.options.has_usage


@pytest.mark.parametrize("name", ["include_usage", "continuous_usage_stats"])
def test_stream_options_that_ask_for_something_need_a_stream(name: str) -> None:
    with pytest.raises(RequestError, match="stream: true"):
        chat(stream_options={name: True})


@pytest.mark.parametrize(
    "messages",
    [
        None, "hi", [], [123], [{}], [None], [{"role": 123, "content": "x"}], [{"role": "user", "content": 123}],
        [{"role": "user"}], [{"role": "user", "content": None}], [{"role": "king", "content": "x"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": [{"type": "text", "text": 5}]}], [{"role": "user", "content": ["x"]}],
        [{"role": "assistant", "tool_calls": [{}]}], [{"role": "assistant", "tool_calls": "x"}],
        [{"role": "user", "content": "x", "name": 5}],
    ],
    ids=str,
)  # fmt: skip
def test_malformed_messages_are_refused(messages: Any) -> None:
    error = refusal(messages=messages)

    assert error.http_status == 400
    assert error.param is not None
    assert error.param.startswith("messages")


def test_messages_come_in_the_form_that_templates_expect() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]

    request = chat(
        messages=[
            {"role": "developer", "content": "rules"},
            {"role": "user", "content": parts},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "assistant", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "done"},
        ]
    )

    call = {"id": "c1", "type": "function", "function": {"name": "set_lamp", "arguments": {"room": "hall"}}}
    assert request.messages == [
        {"role": "system", "content": "rules"},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "done", "tool_call_id": "c1"},
    ]


def test_tool_choice_needs_tools() -> None:
    assert refusal(tool_choice="required").param == "tool_choice"
    assert refusal(tool_choice={"type": "function", "function": {"name": "x"}}).param == "tool_choice"
    named = {"type": "function", "function": {"name": "nobody"}}
    assert refusal(tools=[TOOL], tool_choice=named).param == "tool_choice"
    assert refusal(tools=[TOOL, TOOL]).param == "tools"


def test_tools_are_hidden_from_the_template_when_none_may_be_called() -> None:
    assert chat(tools=[TOOL], tool_choice="none").tools is None
    assert chat(tools=[TOOL]).tools.tools == [TOOL]


@pytest.mark.parametrize(
    ("choice", "is_forced", "is_parallel"),
    [
        pytest.param("auto", False, True, id="auto"),
        pytest.param("required", True, False, id="required"),
        pytest.param({"type": "function", "function": {"name": "set_lamp"}}, True, False, id="named"),
        pytest.param(
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "required", "tools": [{"function": {"name": "set_lamp"}}]},
            },
            True, False, id="allowed",
        ),
    ],
)  # fmt: skip
def test_a_choice_says_which_tools_may_be_called(choice: Any, is_forced: bool, is_parallel: bool) -> None:
    other = {"type": "function", "function": {"name": "other"}}

    use = chat(tools=[TOOL, other], tool_choice=choice).tools

    assert (use.is_forced, use.is_parallel) == (is_forced, is_parallel)
    assert use.tools == [TOOL, other]
    assert use.callable_tools == ([TOOL, other] if isinstance(choice, str) else [TOOL])
    assert not chat(tools=[TOOL], parallel_tool_calls=False).tools.is_parallel
    assert chat(tools=[TOOL], tool_choice="required", parallel_tool_calls=True).tools.is_parallel


@pytest.mark.parametrize(
    "tools", [[{}], [5], [{"type": "function"}], [{"type": "x", "function": {}}], [TOOL] * 129], ids=str
)
def test_malformed_tools_are_refused(tools: Any) -> None:
    error = refusal(tools=tools)

    assert error.param is not None
    assert error.param.startswith("tools")


def test_the_smaller_of_two_token_limits_counts() -> None:
    assert chat(max_tokens=9, max_completion_tokens=5).options.max_tokens == 5
    assert chat(max_tokens=4, max_completion_tokens=5).options.max_tokens == 4


def test_a_request_cannot_raise_its_own_priority() -> None:
    with pytest.raises(PermissionDenied) as caught:
        chat(priority=-1)

    assert (caught.value.http_status, caught.value.param) == (403, "priority")


def test_top_logprobs_need_logprobs() -> None:
    assert refusal(top_logprobs=2).param == "top_logprobs"
    assert chat(logprobs=True, top_logprobs=2).options.num_logprobs == 2
    assert chat(logprobs=True).options.num_logprobs == 0
    assert chat(logprobs=False).options.num_logprobs is None


@pytest.mark.parametrize(
    "prompt", [None, 5, "", [], [""], [[]], [1, "a"], ["a", [1]], [[1], "a"], [1.5], [-1], {}], ids=str
)
def test_malformed_prompts_are_refused(prompt: Any) -> None:
    with pytest.raises(RequestError) as caught:
        completion(prompt=prompt)

    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("x", ["x"]), (["x", " "], ["x", " "]), ([1, 2.0], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
    ids=["text", "texts", "ids", "lists of ids"],
)
def test_a_prompt_has_four_forms(prompt: Any, expected: Any) -> None:
    assert completion(prompt=prompt).prompts == expected


def test_zero_tokens_are_legal_where_the_prompt_alone_is_of_use() -> None:
    assert completion(max_tokens=0, echo=True).options.max_tokens == 0
    assert completion(max_tokens=0, prompt_logprobs=0).options.max_tokens == 0
    with pytest.raises(RequestError, match="max_tokens must be at least 1, got 0") as caught:
        completion(max_tokens=0, logprobs=1)

    assert caught.value.param == "max_tokens"


@pytest.mark.parametrize("fields", [{"prompt": None}, {}], ids=["null", "absent"])
def test_a_prompt_that_is_not_there_is_named(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="prompt is required") as caught:
        parse_completion(json.dumps({"model": "m", **fields}).encode())

    assert (caught.value.param, caught.value.stable_code) == ("prompt", "missing_required")


@pytest.mark.parametrize("fields", [{"best_of": 1, "n": 2}, {"best_of": 3, "stream": True}, {"best_of": 9}], ids=str)
def test_a_best_of_that_cannot_be_kept_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        completion(**fields)

    assert caught.value.param == "best_of"
    assert completion(best_of=3, n=2).options.best_of == 3
    assert completion(best_of=2, n=2).options.ignored_fields == ()


def test_sequences_are_capped_before_the_fan_out() -> None:
    with pytest.raises(RequestError) as caught:
        completion(prompt=["x"] * 20, n=8)

    assert "128" in caught.value.message


def test_completion_logprobs_are_a_number() -> None:
    assert completion(logprobs=0).options.num_logprobs == 0
    for value in (True, 21, "1"):
        with pytest.raises(RequestError):
            completion(logprobs=value)


def test_a_model_that_is_left_out_is_the_served_one_and_an_empty_one_is_none() -> None:
    assert parse_chat(json.dumps({"messages": [USER]}).encode()).options.model == ""
    assert refusal(model="").param == "model"


def test_messages_show_no_more_than_the_start_of_a_value() -> None:
    error = refusal(temperature="\x1b[31m" + "x" * 1000)

    assert "\x1b" not in error.message
    assert len(error.message) < 200
