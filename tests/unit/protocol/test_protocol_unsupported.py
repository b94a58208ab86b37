"""Known fields that are not run here are refused by name on every route, and let through where they ask for nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from headrace.base.errors import RequestError
from headrace.protocol import unsupported
from headrace.protocol.embeddings import parse_embeddings
from headrace.protocol.openai import parse_chat, parse_completion
from headrace.protocol.pooling import parse_pooling
from headrace.protocol.rerank import parse_classify, parse_rerank, parse_score
from headrace.protocol.tasks import parse_masks, parse_text_classes, parse_tokens
from headrace.protocol.tei import parse_embed, parse_embed_all, parse_predict, parse_similarity

GENERATE: list[tuple[Callable[[bytes], Any], dict[str, Any]]] = [
    (parse_chat, {"messages": [{"role": "user", "content": "a"}]}),
    (parse_completion, {"prompt": "a"}),
]
VECTORS: list[tuple[Callable[[bytes], Any], dict[str, Any]]] = [
    (parse_embeddings, {"input": "a"}),
    (parse_embed, {"inputs": "a"}),
]
ENCODE: list[tuple[Callable[[bytes], Any], dict[str, Any]]] = [
    *VECTORS,
    (parse_pooling, {"input": "a"}),
    (parse_rerank, {"query": "a", "documents": ["b"]}),
    (parse_score, {"text_1": "a", "text_2": "b"}),
    (parse_classify, {"input": "a"}),
    (parse_embed_all, {"inputs": "a"}),
    (parse_predict, {"inputs": "a"}),
    (parse_tokens, {"inputs": "a"}),
    (parse_masks, {"inputs": "a"}),
    (parse_text_classes, {"inputs": "a"}),
]
ROUTES = [
    (parse, given, name, harmless)
    for routes, table in (
        (GENERATE, unsupported.GENERATE),
        (ENCODE, unsupported.ENCODE),
        (VECTORS, unsupported.VECTORS),
    )
    for parse, given in routes
    for name, harmless in table.items()
]


@pytest.mark.parametrize(
    ("parse", "given", "name", "harmless"), ROUTES, ids=[f"{parse.__name__}-{name}" for parse, _, name, _ in ROUTES]
)
def test_a_field_that_is_not_run_is_refused_unless_it_asks_for_nothing(
    parse: Any, given: dict[str, Any], name: str, harmless: tuple[object, ...]
) -> None:
    for value in (None, *harmless):
        request = parse(json.dumps(given | {name: value}).encode())
        ignored = request.options.ignored_fields if hasattr(request, "options") else request.unknown
        assert name not in ignored

    with pytest.raises(RequestError, match=f"^{name} is not supported by this server: ") as caught:
        parse(json.dumps(given | {name: ["something"]}).encode())
    assert (caught.value.param, caught.value.stable_code) == (name, "unsupported_parameter")


def test_the_name_is_the_path_where_fields_stand_below_another() -> None:
    body = {"inputs": {"source_sentence": "a", "sentences": ["b"]}, "parameters": {"prompt_name": "query"}}

    with pytest.raises(RequestError, match=r"^parameters\.prompt_name is not supported"):
        parse_similarity(json.dumps(body).encode())


def test_a_zero_is_no_false() -> None:
    with pytest.raises(RequestError, match="use_beam_search"):
        parse_completion(b'{"prompt":"a","use_beam_search":0}')
