"""The document says what the readers do: the same fields, and examples of each accepted or refused alike."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from headrace.base.errors import RequestError
from headrace.protocol import anthropic, embeddings, openai, pooling, rerank, tei, unsupported
from headrace.protocol.fields import Fields
from headrace.protocol.openapi import OPERATIONS, build_document

MESSAGE = [{"role": "user", "content": "x"}]
BODIES: dict[str, tuple[Callable[[bytes], Any], dict[str, Any]]] = {
    "/v1/chat/completions": (openai.parse_chat, {"model": "m", "messages": MESSAGE}),
    "/v1/completions": (openai.parse_completion, {"model": "m", "prompt": "x"}),
    "/v1/messages": (anthropic.parse_message, {"model": "m", "messages": MESSAGE, "max_tokens": 1}),
    "/v1/embeddings": (embeddings.parse_embeddings, {"input": "x"}),
    "/v1/rerank": (rerank.parse_rerank, {"query": "x", "texts": ["x"]}),
    "/v1/score": (rerank.parse_score, {"text_1": "x", "text_2": "x"}),
    "/v1/classify": (rerank.parse_classify, {"input": "x"}),
    "/v1/pooling": (pooling.parse_pooling, {"input": "x"}),
    "/embed_all": (tei.parse_embed_all, {"inputs": "x"}),
    "/embed": (tei.parse_embed, {"inputs": "x"}),
    "/predict": (tei.parse_predict, {"inputs": "x"}),
    "/similarity": (tei.parse_similarity, {"inputs": {"source_sentence": "x", "sentences": ["x"]}}),
}
FIELDS = {operation.path: operation.fields for operation in OPERATIONS}
HARMLESS = {
    "guided_decoding_backend", "guided_whitespace_pattern", "disable_fallback", "disable_any_whitespace",
    "anthropic_version", "anthropic_beta", "cache_control",
}  # fmt: skip


@pytest.mark.parametrize("path", BODIES)
def test_every_field_that_is_read_is_described_and_the_other_way_round(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parse, body = BODIES[path]
    readers: list[Fields] = []
    start = Fields.__init__
    monkeypatch.setattr(Fields, "__init__", lambda self, *args: (readers.append(self), start(self, *args))[1])

    parse(json.dumps(body).encode())

    first = readers[0]
    # Read only where they are there; test_protocol_unsupported has them all.
    refused = {*unsupported.GENERATE, *unsupported.VECTORS, *openai._FORBIDDEN} - first._taken
    assert first._taken - HARMLESS == set(FIELDS[path]) - HARMLESS - refused


@pytest.mark.parametrize("path", BODIES)
def test_what_a_schema_forbids_is_refused(path: str) -> None:
    parse, body = BODIES[path]
    body = {**body, "logprobs": True} if "chat" in path else body  # which top_logprobs needs
    parse(json.dumps(body).encode())
    tried = 0
    for name, schema in FIELDS[path].items():
        for bad in _outside(schema):
            tried += 1
            with pytest.raises(RequestError):
                parse(json.dumps({**body, name: bad}).encode())
    assert tried > 5


def _outside(schema: dict[str, Any]) -> list[Any]:
    kinds = schema.get("type", [])
    bad: list[Any] = ["no such one"] if "enum" in schema else []
    bad += [schema["not"]["const"]] if "not" in schema else []
    bad += [""] if schema.get("minLength") else []
    bad += [[]] if schema.get("minItems") else []
    if "integer" in kinds or "number" in kinds:
        low = schema.get("minimum", schema.get("exclusiveMinimum"))
        step = 1 if "integer" in kinds else 0.5
        bad += ["5", True, [], *([low - step] if low is not None else [])]
        if schema.get("maximum", 2**63) < 2**62:
            bad.append(schema["maximum"] + step)
    elif "boolean" in kinds:
        bad += ["true", 1, {}]
    elif "string" in kinds:
        bad += [5, [], {}]
    elif "array" in kinds:
        bad += [5, "x" if "stop" not in schema.get("description", "") else 5]
    elif "object" in kinds:
        bad += [5, "x", [1]]
    return bad


def test_the_document_is_whole() -> None:
    document: Any = build_document("1")
    text = json.dumps(document)

    for name in set(__import__("re").findall(r'"#/components/schemas/(\w+)"', text)):
        assert name in document["components"]["schemas"]
    ids = [operation["operationId"] for item in document["paths"].values() for operation in item.values()]
    assert len(ids) == len(set(ids)) == len(OPERATIONS)


CALL = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f"}}
CHAT_FORMS: list[tuple[str, Any, bool]] = [
    ("messages", [{"role": "user"}], False),
    ("messages", [{"role": "user", "content": None}], False),
    ("messages", [{"role": "user", "content": 5}], False),
    ("messages", [{"role": "wizard", "content": "x"}], False),
    ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], False),
    ("messages", [{"role": "user", "content": [{"type": "text", "text": "x"}]}], True),
    ("messages", [{"role": "assistant", "content": [{"type": "refusal", "refusal": "x"}]}], True),
    ("messages", [{"role": "assistant"}], True),
    ("messages", [{"role": "assistant", "content": None, "tool_calls": [{**CALL, "id": "a"}]}], True),
    ("messages", [{"role": "assistant", "tool_calls": [{"id": "a"}]}], False),
    ("messages", [{"role": "tool", "content": "x", "tool_call_id": "a"}], True),
    ("messages", [{"role": "tool", "tool_call_id": "a"}], False),
    ("tool_choice", "none", True),
    ("tool_choice", "any", False),
    ("tool_choice", {}, False),
    ("tool_choice", {"type": "function", "function": {"name": "f"}}, True),
    ("tool_choice", {"type": "function", "function": {}}, False),
    (
        "tool_choice",
        {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]},
        },
        True,
    ),
    ("tool_choice", {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}, False),
    ("response_format", {}, False),
    ("response_format", {"type": "text"}, True),
    ("response_format", {"type": "yaml"}, False),
    ("response_format", {"type": "json_schema"}, False),
    ("response_format", {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}, True),
    ("response_format", {"type": "json_schema", "json_schema": {"name": 5, "schema": {}}}, False),
    ("structured_outputs", {}, False),
    ("structured_outputs", {"regex": "a+"}, True),
    ("structured_outputs", {"regex": ""}, False),
    ("structured_outputs", {"choice": []}, False),
    ("structured_outputs", {"choice": ["a"], "regex": "a"}, False),
    ("modalities", ["text"], True),
    ("modalities", ["audio"], False),
]
MESSAGE_FORMS: list[tuple[str, Any, bool]] = [
    ("messages", [{"role": "user"}], False),
    ("messages", [{"role": "user", "content": [{"type": "text"}]}], False),
    ("messages", [{"role": "user", "content": [{"type": "image"}]}], False),
    ("messages", [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}], False),
    ("messages", [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}]}], True),
    ("messages", [{"role": "user", "content": [{"type": "tool_result"}]}], False),
    ("messages", [{"role": "assistant", "content": [{"type": "thinking", "thinking": "x"}]}], True),
    ("messages", [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f"}]}], True),
    ("messages", [{"role": "assistant", "content": [{"type": "tool_use", "name": "f"}]}], False),
    ("system", "x", True),
    ("system", [{"type": "text", "text": "x"}], True),
    ("system", [{"type": "image"}], False),
    ("system", 5, False),
    ("tools", [{"name": "f"}], False),
    ("tools", [{"name": "f", "input_schema": {}}], True),
    ("tools", [{"type": "web_search", "name": "f", "input_schema": {}}], False),
    ("tool_choice", {"type": "none"}, True),
    ("tool_choice", {"type": "tool"}, False),
    ("tool_choice", {"type": "some"}, False),
    ("thinking", {"type": "enabled", "budget_tokens": 1024}, True),
    ("thinking", {"budget_tokens": 1024}, False),
    ("output_format", {"type": "json_schema", "schema": {}}, True),
    ("output_format", {"type": "json_schema"}, False),
    ("output_config", {"format": {"type": "text"}}, False),
]


INPUT_FORMS: list[tuple[str, Any, bool]] = [
    ("input", "", False),
    ("input", [], False),
    ("input", [""], False),
    ("input", [[]], False),
    ("input", [1, "a"], True),
    ("input", [[1], "a"], True),
    ("input", [-1], False),
    ("input", {"prompt_string": ""}, False),
    ("input", {"prompt_string": "a"}, True),
    ("input", [{"content": [{"type": "text", "text": ""}, {"type": "text", "text": "a"}]}], True),
    ("input", {"content": [{"type": "text", "text": ""}]}, False),
    ("input", {"content": []}, False),
    ("encoding_format", "base64", True),
    ("encoding_format", "hex", False),
    ("embed_dtype", "bfloat16", True),
    ("embed_dtype", "int4", False),
    ("endianness", "middle", False),
    ("padding", True, False),
    ("truncate_prompt_tokens", -1, True),
    ("truncate_prompt_tokens", 0, False),
]
PROMPT_FORMS: list[tuple[str, Any, bool]] = [
    ("prompt", None, False),
    ("prompt", "", False),
    ("prompt", [], False),
    ("prompt", ["a", ""], False),
    ("prompt", [[]], False),
    ("prompt", [[1], [2]], True),
    ("prompt", [1, 2.0], True),
    ("prompt", [1, "a"], False),
    ("prompt", [[1], "a"], False),
    ("prompt", ["a"] * 129, False),
    ("prompt", [[1]] * 129, False),
    ("logit_bias", {"5": 1.5, "17": -100}, True),
    ("logit_bias", {"hello": 1}, False),
    ("logit_bias", {"-1": 1}, False),
    ("logit_bias", {"5": 101}, False),
    ("guided_choice", [], False),
    ("guided_regex", "", False),
    ("guided_json", True, True),
    ("stream_options", {"include_usage": 1}, False),
    ("model", None, True),
    ("model", "", False),
]
TEMPLATE_FORMS: list[tuple[str, Any, bool]] = [
    ("chat_template_kwargs", {"enable_thinking": False, "more": None, "level": 2.5}, True),
    ("chat_template_kwargs", {"enable thinking": False}, False),
    ("chat_template_kwargs", {"messages": "x"}, False),
    ("chat_template_kwargs", {"level": [1]}, False),
    ("chat_template_kwargs", {"a" * 65: 1}, False),
]
FIELD_FORMS = [
    ("/v1/chat/completions", [*CHAT_FORMS, *TEMPLATE_FORMS]),
    ("/v1/completions", PROMPT_FORMS),
    ("/v1/messages", MESSAGE_FORMS),
    ("/v1/embeddings", INPUT_FORMS),
    ("/v1/pooling", [*INPUT_FORMS, ("task", "embed", True), ("task", "paint", False)]),
    ("/embed", [("truncation_direction", "Right", True), ("truncation_direction", "Left", False)]),
    ("/embed", [("normalize", True, True), ("normalize", False, False), ("inputs", [], False)]),
    ("/similarity", [("inputs", {"source_sentence": "", "sentences": ["a"]}, False)]),
    ("/similarity", [("inputs", {"source_sentence": "a", "sentences": "b"}, True)]),
]


@pytest.mark.parametrize(
    ("path", "name", "value", "is_good"), [(path, *form) for path, forms in FIELD_FORMS for form in forms]
)
def test_the_forms_inside_a_field_are_described_as_they_are_read(
    path: str, name: str, value: Any, *, is_good: bool
) -> None:
    parse, body = BODIES[path]
    tools = {"tools": [TOOL]} if name == "tool_choice" and path == "/v1/chat/completions" else {}
    document: Any = build_document("1")
    schema = {**FIELDS[path][name], "components": document["components"]}

    try:
        parse(json.dumps({**body, **tools, name: value}).encode())
    except RequestError:
        is_read = False
    else:
        is_read = True

    assert (is_read, jsonschema.Draft202012Validator(schema).is_valid(value)) == (is_good, is_good)


BODY_FORMS: list[tuple[str, dict[str, Any], bool]] = [
    ("/v1/rerank", {"query": "x"}, False),
    ("/v1/rerank", {"documents": ["x"]}, False),
    ("/v1/rerank", {"query": "x", "documents": ["x"]}, True),
    ("/v1/rerank", {"query": "x", "documents": ["x"], "texts": None}, True),
    ("/v1/rerank", {"query": "x", "documents": ["x", {"text": "y"}]}, True),
    ("/v1/rerank", {"query": "x", "documents": ["x"], "texts": ["x"]}, False),
    ("/v1/rerank", {"query": "x", "documents": None}, False),
    ("/v1/rerank", {"query": "x", "documents": []}, False),
    ("/v1/rerank", {"query": "x", "documents": [{"title": "x"}]}, False),
    ("/v1/score", {"text_1": "x"}, False),
    ("/v1/score", {"text_2": "x"}, False),
    ("/v1/score", {"text_1": "x", "text_2": ["x", {"text": "y"}]}, True),
    ("/v1/score", {"queries": ["x"], "items": "y", "text_1": None}, True),
    ("/v1/score", {"text_1": "x", "data_1": "x", "text_2": "y"}, False),
    ("/v1/score", {"text_1": "x", "documents": ["x"], "items": ["x"]}, False),
    ("/v1/score", {"text_1": [], "text_2": "y"}, False),
    ("/v1/messages", {"messages": MESSAGE}, False),
    ("/v1/completions", {"model": "m"}, False),
]


@pytest.mark.parametrize(("path", "body", "is_good"), BODY_FORMS)
def test_what_a_body_must_hold_is_described_as_it_is_read(path: str, body: dict[str, Any], *, is_good: bool) -> None:
    document: Any = build_document("1")
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]

    try:
        BODIES[path][0](json.dumps(body).encode())
    except RequestError:
        is_read = False
    else:
        is_read = True

    valid = jsonschema.Draft202012Validator({**schema, "components": document["components"]}).is_valid(body)
    assert (is_read, valid) == (is_good, is_good)
