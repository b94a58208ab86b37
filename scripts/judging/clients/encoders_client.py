"""Clients of embeddings, reranking and classification: each does its task against the model that it is for."""

from __future__ import annotations

import json
import math
import os

import cohere
import openai
from common import KEY, check
from huggingface_hub import InferenceClient
from langchain_huggingface import HuggingFaceEndpointEmbeddings
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference
from llama_index.postprocessor.tei_rerank import TextEmbeddingInference

URLS = json.loads(os.environ["JUDGE_URLS"])
TEXTS = ["A man is playing a guitar.", "Someone plays an acoustic instrument.", "The stock market fell sharply today."]
QUERY = "What is the weather like in Paris today?"
DOCUMENTS = [
    "calculate mortgage: Calculates the monthly payment of a loan.",
    "get current weather: Retrieves the current weather conditions for a specified city and state.",
    "sort list: Sorts a list of numbers in ascending order.",
]


def cosine(a, b) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True)) / math.hypot(*a) / math.hypot(*b)


def close(a, b) -> bool:
    return len(a) == len(b) and all(abs(x - y) < 1e-6 for x, y in zip(a, b, strict=True))


def vectors(**more):
    client = openai.OpenAI(base_url=URLS["vectors"] + "/v1", api_key=KEY, max_retries=0)
    return [item.embedding for item in client.embeddings.create(model="vectors", input=TEXTS, **more).data]


@check
def openai_dimensions() -> None:
    whole, short = vectors(), vectors(dimensions=64)
    for long, cut in zip(whole, short, strict=True):
        length = math.hypot(*long[:64])
        assert close(cut, [value / length for value in long[:64]])
    assert all(close(a, b) for a, b in zip(whole, vectors(encoding_format="float"), strict=True))


@check
def hub_feature_extraction() -> None:
    client = InferenceClient(URLS["vectors"])
    found = client.feature_extraction(TEXTS[0])
    assert found.shape == (1, 384)
    assert close(found[0].tolist(), vectors()[0])
    assert client.feature_extraction(TEXTS[0], dimensions=32).shape == (1, 32)
    assert client.feature_extraction("word " * 2000, truncate=True).shape == (1, 384)


@check
def hub_sentence_similarity() -> None:
    found = InferenceClient(URLS["vectors"]).sentence_similarity(TEXTS[0], other_sentences=TEXTS[1:])
    whole = vectors()
    assert close(found, [cosine(whole[0], other) for other in whole[1:]])
    assert found[0] > 0.6 > 0.2 > found[1]


@check
def hub_text_classification() -> None:
    text = "Book me a flight from Rome to Oslo in business class next Friday."
    found = InferenceClient(URLS["classes"]).text_classification(text, top_k=2)
    assert len(found) == 2
    assert found[0].label == "travel"
    assert found[0].score > found[1].score


@check
def hub_token_classification() -> None:
    text = "the sea is deep"
    found = InferenceClient(URLS["tags"]).token_classification(text, aggregation_strategy="none", ignore_labels=[])
    assert [text[item.start : item.end] for item in found] == text.split()
    assert all(item.entity.startswith("class ") for item in found)


@check
def hub_fill_mask() -> None:
    found = InferenceClient(URLS["masks"]).fill_mask("the [MASK] is deep", top_k=3)
    assert [item.score for item in found] == sorted((item.score for item in found), reverse=True)
    assert len(found) == 3
    assert all(item.token_str in item.sequence for item in found)


@check
def langchain_embeddings() -> None:
    # It takes names of the hub only; what it does with a client is what is judged.
    client = HuggingFaceEndpointEmbeddings(model="local/vectors", huggingfacehub_api_token=KEY)
    client.client = InferenceClient(URLS["vectors"])
    assert all(close(a, b) for a, b in zip(client.embed_documents(TEXTS), vectors(), strict=True))
    assert close(client.embed_query(TEXTS[1]), vectors()[1])


@check
def llama_index_embeddings() -> None:
    client = TextEmbeddingsInference(
        model_name="vectors", base_url=URLS["vectors"], query_instruction="", text_instruction=""
    )
    assert all(cosine(a, b) > 0.9999 for a, b in zip(client.get_text_embedding_batch(TEXTS), vectors(), strict=True))


@check
def llama_index_rerank() -> None:
    nodes = [NodeWithScore(node=TextNode(text=text), score=0.0) for text in DOCUMENTS]
    client = TextEmbeddingInference(base_url=URLS["ranking"], model_name="ranking", top_n=2)
    found = client.postprocess_nodes(nodes, QueryBundle(QUERY))
    assert len(found) == 2
    assert found[0].node.get_content() == DOCUMENTS[1]


@check
def cohere_1() -> None:
    client = cohere.Client(api_key=KEY, base_url=URLS["ranking"])
    found = client.rerank(model="ranking", query=QUERY, documents=DOCUMENTS, top_n=2, return_documents=True)
    assert found.results[0].index == 1
    assert found.results[0].document.text == DOCUMENTS[1]
    assert found.results[0].relevance_score > found.results[1].relevance_score
    assert len(found.results) == 2


@check
def cohere_2() -> None:
    client = cohere.ClientV2(api_key=KEY, base_url=URLS["ranking"])
    found = client.rerank(model="ranking", query=QUERY, documents=DOCUMENTS, max_tokens_per_doc=64)
    assert sorted(item.index for item in found.results) == [0, 1, 2]
    assert found.results[0].index == 1
    try:
        client.rerank(model="nobody", query=QUERY, documents=DOCUMENTS)
    except cohere.NotFoundError:
        pass
    else:
        raise AssertionError("another model was served")
