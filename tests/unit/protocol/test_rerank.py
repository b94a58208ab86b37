"""The scoring bodies in all their forms, and their answers."""

from __future__ import annotations

import json
import math
import struct
from typing import Any

import pytest

from headrace.base.errors import RequestError
from headrace.protocol.rerank import (
    classes_body,
    parse_classify,
    parse_rerank,
    parse_score,
    scores_body,
    sigmoid,
    softmax,
)
from headrace.protocol.tasks import parse_text_classes
from headrace.protocol.tei import predict_body


def body(**values: Any) -> bytes:
    return json.dumps(values).encode()


def test_cohere_and_jina_send_documents_as_texts_or_objects() -> None:
    request = parse_rerank(body(model="m", query="q", documents=["a", {"text": "b"}], top_n=1, return_documents=True))

    assert (request.form, request.documents, request.top_n, request.has_documents) == ("rerank", ("a", "b"), 1, True)
    answer = json.loads(scores_body(request, [0.1, 0.9], "id", "m", 7))
    assert answer["results"] == [{"index": 1, "relevance_score": 0.9, "document": {"text": "b"}}]
    assert answer["usage"]["total_tokens"] == 7


def test_tei_sends_texts_and_gets_a_bare_list() -> None:
    request = parse_rerank(body(query="q", texts=["a", "b", "c"], return_text=True, truncate=True))

    assert (request.form, request.model) == ("tei", None)
    assert request.truncate_tokens is not None
    answer = json.loads(scores_body(request, [0.5, 0.9, 0.5], "id", "m", 7))
    # Equal scores keep the order of the texts.
    assert [(item["index"], item["text"]) for item in answer] == [(1, "b"), (0, "a"), (2, "c")]


@pytest.mark.parametrize(
    ("first", "second"),
    [("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")],
)
def test_what_is_scored_has_several_names_and_two_at_once_are_refused(first: str, second: str) -> None:
    request = parse_score(body(model="m", **{first: "q", second: ["a", "b"]}))

    assert (request.queries, request.documents, request.unknown) == (("q",), ("a", "b"), ())
    with pytest.raises(RequestError, match="two names of one field"):
        parse_score(body(model="m", **{first: "q", second: "a", "items" if second != "items" else "text_2": "b"}))


def test_score_takes_one_text_for_all_or_as_many() -> None:
    assert parse_score(body(model="m", text_1="q", text_2=["a", "b"])).queries == ("q",)
    assert parse_score(body(model="m", queries=["p", "q"], documents=["a", "b"])).queries == ("p", "q")
    request = parse_score(body(model="m", text_1="q", text_2="a"))
    answer = json.loads(scores_body(request, [0.5], "id", "m", 3))
    assert answer["data"] == [{"index": 0, "object": "score", "score": 0.5}]
    with pytest.raises(RequestError, match="text_1 has 3 texts and text_2 has 2"):
        parse_score(body(model="m", text_1=["p", "q", "r"], text_2=["a", "b"]))


@pytest.mark.parametrize(
    ("parse", "values", "word"),
    [
        (parse_rerank, {"model": "m", "documents": ["a"]}, "query is required"),
        (parse_rerank, {"model": "m", "query": "q"}, "documents is required"),
        (parse_rerank, {"model": "m", "query": "q", "documents": []}, "documents"),
        (parse_rerank, {"model": "m", "query": "q", "documents": ["a", 3]}, "documents[1]"),
        (parse_rerank, {"model": "m", "query": "q", "documents": [{"title": "a"}]}, "documents[0]"),
        (parse_rerank, {"model": "m", "query": "q", "documents": ["a"], "top_n": 0}, "top_n"),
        (parse_rerank, {"query": "q", "texts": "a"}, "texts"),
        (parse_score, {"model": "m", "text_2": "a"}, "text_1"),
        (parse_classify, {"model": "m"}, "input"),
        (parse_classify, {"model": "m", "input": [[1, 2]]}, "input[0]"),
    ],
)
def test_what_is_wrong_is_named(parse: Any, values: dict[str, Any], word: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse(body(**values))
    assert word in caught.value.message


@pytest.mark.parametrize(
    ("more", "scores", "shares"),
    [
        ({}, [0.0, math.log(3)], [0.25, 0.75]),
        ({}, [0.0], [0.5]),
        ({"use_activation": True}, [0.0], [0.5]),
        ({"use_activation": False}, [0.0, 3.0], [0.0, 3.0]),
        ({"use_activation": False}, [-2.0], [-2.0]),
    ],
)
def test_classes_are_shares_or_scores_and_one_class_is_a_probability(
    more: dict[str, Any], scores: list[float], shares: list[float]
) -> None:
    request = parse_classify(body(input="a", **more))
    labels = ["no", "yes"][-len(scores) :]

    answer = json.loads(classes_body(request, [struct.pack(f"<{len(scores)}f", *scores)], labels, "id", "m", 5))

    (item,) = answer["data"]
    assert item["label"] == "yes"
    assert item["probs"] == pytest.approx(shares, abs=1e-6)


@pytest.mark.parametrize(
    ("function", "shares"),
    [(None, [0.75, 0.25]), ("softmax", [0.75, 0.25]), ("sigmoid", [0.75, 0.5]), ("none", [math.log(3), 0.0])],
)
def test_the_function_that_was_asked_for_is_applied(function: str | None, shares: list[float]) -> None:
    request = parse_text_classes(body(inputs="a", parameters={"function_to_apply": function}))

    answer = json.loads(predict_body(request, [struct.pack("<2f", 0.0, math.log(3))], ["no", "yes"]))

    assert [item["label"] for item in answer[0]] == ["yes", "no"]
    assert [item["score"] for item in answer[0]] == pytest.approx(shares, abs=1e-6)


@pytest.mark.parametrize("parse", [parse_rerank, parse_score])
def test_scores_may_be_wanted_as_the_model_gives_them(parse: Any) -> None:
    given = {"query": "a", "documents": ["b"]} if parse is parse_rerank else {"text_1": "a", "text_2": "b"}

    assert not parse(body(**given)).is_raw
    assert parse(body(**given, use_activation=False)).is_raw


def test_extremes_do_not_overflow() -> None:
    assert sigmoid(-1000.0) == 0.0
    assert sigmoid(1000.0) == 1.0
    assert softmax([1e30, 0.0]) == [1.0, 0.0]
