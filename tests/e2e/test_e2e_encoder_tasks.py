"""Pooling by token, classes of tokens, tokens behind masks, and TEI's other routes, over HTTP on tiny models."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from headrace.testing.encoder import encoded_masks, encoded_rows
from headrace.testing.tiny_bert import WORDS, tiny_bert_vector, write_tiny_bert

from .conftest import Server, serve

pytestmark = pytest.mark.timeout(180)
TEXT = "the sea is deep"
IDS = [2, *(WORDS.index(word) for word in TEXT.split()), 3]


def make(tmp_path_factory: pytest.TempPathFactory, **kind: object) -> Iterator[tuple[Server, Path]]:
    model = tmp_path_factory.mktemp("bert")
    write_tiny_bert(model, **kind)  # type: ignore[arg-type]  # named arguments
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "headrace.yaml").write_text("kernel_config:\n  dtype: fp32\n")
    with serve(model, folder, "--served-name", "tests/bert") as running:
        yield running, model


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    yield from make(tmp_path_factory)


@pytest.fixture(scope="module")
def tagger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    yield from make(tmp_path_factory, labels=3, has_token_labels=True)


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    yield from make(tmp_path_factory, has_masked_head=True)


def test_pooling_gives_each_tokens_vector_as_numbers_and_as_base64(embedder: tuple[Server, Path]) -> None:
    server, model = embedder
    (rows,) = encoded_rows(model, [IDS])
    normed = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    body = {"model": server.model, "input": TEXT}

    answer = server.post("/v1/pooling", body).json()
    packed = server.post("/v1/pooling", {**body, "encoding_format": "base64", "task": "token_embed"}).json()
    plain = server.post("/v1/pooling", {**body, "normalize": False}).json()
    short = server.post("/v1/pooling", {**body, "dimensions": 8}).json()

    (item,) = answer["data"]
    assert (item["object"], item["shape"]) == ("pooling", [len(IDS), rows.shape[1]])
    assert np.abs(np.array(item["data"]) - normed).max() < 1e-5
    found = np.frombuffer(base64.b64decode(packed["data"][0]["data"]), "<f4").reshape(packed["data"][0]["shape"])
    assert np.array_equal(found, np.array(item["data"], np.float32))
    assert np.abs(np.array(plain["data"][0]["data"]) - rows).max() < 1e-4
    cut = rows[:, :8] / np.linalg.norm(rows[:, :8], axis=1, keepdims=True)
    assert np.abs(np.array(short["data"][0]["data"]) - cut).max() < 1e-5
    assert answer["usage"]["prompt_tokens"] == len(IDS)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/pooling"])
def test_vectors_come_alone_as_bytes_and_a_header_says_where_each_stands(
    embedder: tuple[Server, Path], path: str
) -> None:
    server, _ = embedder
    body = {"model": server.model, "input": [TEXT, IDS[:3]], "task": "embed"}
    body = body if path == "/v1/pooling" else {**body, "task": None}
    numbers = server.post(path, body).json()
    name = "data" if path == "/v1/pooling" else "embedding"

    answer = server.post(path, {**body, "encoding_format": "bytes", "endianness": "big"})
    alone = server.post(path, {**body, "encoding_format": "bytes_only", "endianness": "big"})

    assert (answer.status, answer.headers["content-type"]) == (200, "application/octet-stream")
    about = json.loads(answer.headers["metadata"])
    assert about["usage"]["prompt_tokens"] == numbers["usage"]["prompt_tokens"]
    for place, item in zip(about["data"], numbers["data"], strict=True):
        found = np.frombuffer(answer.content[place["start"] : place["end"]], ">f4")
        assert np.array_equal(found, np.array(item[name], np.float32))
        assert place["shape"] == [len(found)]
    assert alone.content == answer.content
    assert "metadata" not in alone.headers


def test_pooling_gives_the_embedding_where_it_is_asked_for(embedder: tuple[Server, Path]) -> None:
    server, _ = embedder

    answer = server.post("/v1/pooling", {"model": server.model, "input": [TEXT, IDS], "task": "embed"}).json()

    for item in answer["data"]:
        assert np.abs(np.array(item["data"]) - tiny_bert_vector(IDS)).max() < 1e-5
        assert item["shape"] == [64]


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"task": "classify"}, "token_embed, embed"),
        ({"task": "guess"}, "task must be one of"),
        ({"embed_dtype": "int8"}, "embed_dtype"),
        ({"endianness": "middle"}, "endianness"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"task": "embed", "normalize": False}, "length 1"),
        ({"dimensions": 65}, "dimensions is 65"),
        ({"input": ""}, "empty"),
        ({"padding": "max_length"}, "padding"),
        ({"truncate_prompt_tokens": 49}, "smaller truncation size"),
        ({"input": "sea " * 200}, "maximum context length is 48"),
    ],
)
def test_pooling_refuses_by_name(embedder: tuple[Server, Path], more: dict[str, object], word: str) -> None:
    server, _ = embedder

    answer = server.post("/v1/pooling", {"model": server.model, "input": TEXT, **more})

    assert answer.status == 400
    assert word in answer.json()["error"]["message"]


def test_teis_other_routes_agree_with_embed(embedder: tuple[Server, Path]) -> None:
    server, model = embedder
    (rows,) = encoded_rows(model, [IDS])
    texts = [TEXT, "old stone", "blue river"]

    by_token = server.post("/embed_all", {"inputs": TEXT}).json()
    vectors = np.array(server.post("/", {"inputs": texts}).json())
    similar = server.post("/similarity", {"inputs": {"source_sentence": TEXT, "sentences": texts[1:]}}).json()
    at_root = server.post("/", {"inputs": {"source_sentence": TEXT, "sentences": texts[1:]}}).json()

    assert np.abs(np.array(by_token[0]) - rows).max() < 1e-4
    assert vectors.tolist() == server.post("/embed", {"inputs": texts}).json()
    assert similar == pytest.approx((vectors[1:] @ vectors[0]).tolist(), abs=1e-6)
    assert at_root == similar
    assert server.post("/similarity", {"inputs": TEXT}).status == 400
    assert server.post("/similarity", {"inputs": {"sentences": [TEXT]}}).status == 400


def test_tokens_have_classes_with_their_places(tagger: tuple[Server, Path]) -> None:
    server, model = tagger
    (scores,) = encoded_rows(model, [IDS])
    shares = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    asked = {"inputs": TEXT, "parameters": {"aggregation_strategy": "none", "ignore_labels": []}}

    alone = server.post("/", asked).json()
    grouped = server.post("/", {"inputs": [TEXT], "parameters": {"ignore_labels": []}}).json()
    pooled = server.post("/v1/pooling", {"model": server.model, "input": TEXT}).json()

    assert [TEXT[item["start"] : item["end"]] for item in alone] == TEXT.split()
    best = shares[1:-1]
    assert [item["entity"] for item in alone] == [f"class {index}" for index in best.argmax(axis=1)]
    assert [item["score"] for item in alone] == pytest.approx(best.max(axis=1).tolist(), abs=1e-4)
    assert "".join(TEXT[item["start"] : item["end"]].replace(" ", "") for item in grouped[0]) == TEXT.replace(" ", "")
    assert all(a["entity_group"] != b["entity_group"] for a, b in zip(grouped[0], grouped[0][1:], strict=False))
    assert np.abs(np.array(pooled["data"][0]["data"]) - shares).max() < 1e-4
    assert server.get("/info").json()["model_type"]["token_classifier"]["id2label"]["0"] == "class 0"


def test_a_model_of_token_classes_refuses_what_is_for_texts(tagger: tuple[Server, Path]) -> None:
    server, _ = tagger

    for path, body in (
        ("/v1/classify", {"input": TEXT}),
        ("/v1/embeddings", {"input": TEXT}),
        ("/rerank", {"query": TEXT, "texts": [TEXT]}),
        ("/v1/pooling", {"input": TEXT, "task": "embed"}),
        ("/", {"inputs": TEXT, "parameters": {"aggregation_strategy": "max"}}),
    ):
        assert server.post(path, {"model": server.model, **body}).status == 400


def test_masks_are_filled_best_first(masked: tuple[Server, Path]) -> None:
    server, model = masked
    text = "the [MASK] is deep"
    ids = [2, WORDS.index("the"), WORDS.index("[MASK]"), WORDS.index("is"), WORDS.index("deep"), 3]
    (found,) = encoded_masks(model, [ids], [[2]], 5)

    answer = server.post("/", {"inputs": text}).json()
    many = server.post("/", {"inputs": [text, "[MASK] [MASK]"], "parameters": {"top_k": 2}}).json()

    assert [item["token"] for item in answer] == found[0, :, 0].astype(int).tolist()
    assert [item["score"] for item in answer] == pytest.approx(found[0, :, 1].tolist(), abs=1e-5)
    assert [item["token_str"] for item in answer] == [WORDS[item["token"]] for item in answer]
    assert many[0] == answer[:2]
    assert [len(masks) for masks in many[1]] == [2, 2]
    for body, word in (
        ({"inputs": "the sea"}, "0 masks"),
        ({"inputs": text, "parameters": {"targets": ["sea"]}}, "targets"),
        ({"inputs": text, "parameters": {"top_k": 0}}, "top_k"),
    ):
        refused = server.post("/", body)
        assert refused.status == 400
        assert word in refused.json()["error"]["message"]
    assert len(server.post("/v1/embeddings", {"model": server.model, "input": "the sea"}).json()["data"]) == 1
