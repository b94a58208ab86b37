"""The document says what the readers do: the same fields, and examples of each accepted or refused alike."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

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
    tried = 0
    for name, schema in FIELDS[path].items():
        for bad in _outside(schema):
            tried += 1
            with pytest.raises(RequestError):
                parse(json.dumps({**body, "logprobs": True, name: bad}).encode())
    assert tried > 5


def _outside(schema: dict[str, Any]) -> list[Any]:
    kinds = schema.get("type", [])
    bad: list[Any] = []
    if "integer" in kinds or "number" in kinds:
        low = schema.get("minimum", schema.get("exclusiveMinimum"))
        step = 1 if "integer" in kinds else 0.5
        bad += ["5", True, [], *([low - step] if low is not None else [])]
        if schema.get("maximum", 2**63) < 2**62:
            bad.append(schema["maximum"] + step)
    elif "boolean" in kinds:
        bad += ["true", 1, {}]
    elif "string" in kinds and "minLength" not in schema:
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
