"""Rerank, score and classify over HTTP: a tiny cross-encoder, a tiny classifier, and an embedding model."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from headrace.testing.tiny_bert import WORDS, tiny_bert_scores, tiny_bert_vector, write_tiny_bert

from .conftest import Server, serve

pytestmark = pytest.mark.timeout(180)
QUERY = "a blue river"
DOCUMENTS = ["the sea is deep", "old stone", "a river runs to the sea", "boat"]


def words(text: str) -> list[int]:
    return [WORDS.index(word) for word in text.split()]


def one(text: str) -> list[int]:
    return [2, *words(text), 3]


def score(query: str, document: str) -> float:
    """The probability of the one class of the pair."""
    ids = [*one(query), *words(document), 3]
    return float(1 / (1 + np.exp(-tiny_bert_scores(ids, labels=1, second_start=len(one(query)))[0])))


def make(tmp_path_factory: pytest.TempPathFactory, labels: int) -> Iterator[Server]:
    model = tmp_path_factory.mktemp("bert")
    write_tiny_bert(model, labels=labels)
    with serve(model, tmp_path_factory.mktemp("scores"), "--served-name", "tests/bert") as running:
        yield running


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from make(tmp_path_factory, 1)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from make(tmp_path_factory, 3)


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from make(tmp_path_factory, 0)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_come_back_best_first(reranker: Server, path: str) -> None:
    answer = reranker.post(path, {"model": reranker.model, "query": QUERY, "documents": DOCUMENTS}).json()

    expected = [score(QUERY, document) for document in DOCUMENTS]
    got = {item["index"]: item["relevance_score"] for item in answer["results"]}
    assert sorted(got) == [0, 1, 2, 3]
    assert [got[index] for index in range(4)] == pytest.approx(expected, abs=0.01)
    assert [item["index"] for item in answer["results"]] == sorted(got, key=lambda index: -got[index])


def test_tei_and_score_forms_agree_with_rerank(reranker: Server) -> None:
    whole = reranker.post("/rerank", {"model": reranker.model, "query": QUERY, "documents": DOCUMENTS}).json()
    by_index = {item["index"]: item["relevance_score"] for item in whole["results"]}

    tei = reranker.post("/rerank", {"query": QUERY, "texts": DOCUMENTS}).json()
    scores = reranker.post("/v1/score", {"model": reranker.model, "text_1": QUERY, "text_2": DOCUMENTS}).json()

    assert {item["index"]: item["score"] for item in tei} == by_index
    assert [item["score"] for item in scores["data"]] == [by_index[index] for index in range(4)]
    raw = reranker.post("/rerank", {"query": QUERY, "texts": DOCUMENTS, "raw_scores": True}).json()
    assert {item["index"]: 1 / (1 + np.exp(-item["score"])) for item in raw} == pytest.approx(by_index)


def test_long_documents_are_refused_or_cut(reranker: Server) -> None:
    request = {"model": reranker.model, "query": QUERY, "documents": ["sea " * 200]}

    refused = reranker.post("/v1/rerank", request)
    cut = reranker.post("/v1/rerank", {**request, "max_tokens_per_doc": 100})

    assert refused.status == 400
    assert "documents[0]" in refused.json()["error"]["message"]
    assert cut.status == 200
    assert cut.json()["usage"]["prompt_tokens"] == 48


def test_classes_have_names_and_probabilities(classifier: Server) -> None:
    request = {"model": classifier.model, "input": DOCUMENTS}
    answer = classifier.post("/v1/classify", request).json()

    assert classifier.post("/invocations", request).json()["data"] == answer["data"]
    for item, document in zip(answer["data"], DOCUMENTS, strict=True):
        raw = tiny_bert_scores(one(document), labels=3)
        expected = np.exp(raw) / np.exp(raw).sum()
        assert item["probs"] == pytest.approx(list(expected), abs=0.02)
        assert item["label"] == f"class {int(np.argmax(item['probs']))}"


def test_an_embedding_model_scores_by_the_angle(embedder: Server) -> None:
    answer = embedder.post("/v1/rerank", {"model": embedder.model, "query": QUERY, "documents": DOCUMENTS}).json()

    expected = [float(tiny_bert_vector(one(QUERY)) @ tiny_bert_vector(one(document))) for document in DOCUMENTS]
    got = {item["index"]: item["relevance_score"] for item in answer["results"]}
    assert [got[index] for index in range(4)] == pytest.approx(expected, abs=0.005)


def test_what_a_model_cannot_do_is_refused_by_name(embedder: Server, classifier: Server, reranker: Server) -> None:
    asked = [
        (embedder, "/v1/classify", {"input": "sea"}, "/v1/embeddings"),
        (classifier, "/v1/embeddings", {"input": "sea"}, "/v1/classify"),
        (classifier, "/v1/rerank", {"query": "sea", "documents": ["sea"]}, "3 classes"),
        (reranker, "/v1/embeddings", {"input": "sea"}, "/v1/rerank"),
    ]
    for server, path, more, word in asked:
        answer = server.post(path, {"model": server.model, **more})
        assert answer.status == 400
        assert word in answer.json()["error"]["message"]


def test_tei_routes_answer_in_its_forms(embedder: Server, classifier: Server, reranker: Server) -> None:
    vectors = embedder.post("/embed", {"inputs": DOCUMENTS}).json()
    openai_form = embedder.post("/v1/embeddings", {"model": embedder.model, "input": DOCUMENTS}).json()
    single = embedder.post("/embed", {"inputs": DOCUMENTS[0], "dimensions": 8}).json()
    assert vectors == [item["embedding"] for item in openai_form["data"]]
    assert (len(single), len(single[0])) == (1, 8)
    assert embedder.post("/embed", {"inputs": "sea", "normalize": False}).status == 400

    classes = classifier.post("/predict", {"inputs": DOCUMENTS[:2]}).json()
    one_text = classifier.post("/predict", {"inputs": DOCUMENTS[0]}).json()
    assert one_text == classes[0]
    assert [len(item) for item in classes] == [3, 3]
    assert sum(item["score"] for item in classes[0]) == pytest.approx(1.0)
    assert [item["score"] for item in classes[0]] == sorted((item["score"] for item in classes[0]), reverse=True)

    kinds = [next(iter(server.get("/info").json()["model_type"])) for server in (embedder, classifier, reranker)]
    assert kinds == ["embedding", "classifier", "reranker"]
    assert embedder.get("/info").json()["max_input_length"] == 48
