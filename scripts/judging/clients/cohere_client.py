from __future__ import annotations

import cohere
from common import KEY, MODEL, URL, check

client = cohere.ClientV2(api_key=KEY, base_url=URL)
first = cohere.Client(api_key=KEY, base_url=URL)
DOCUMENTS = ["A river runs to the sea.", "Paris is the capital of France.", "Bread is made of flour."]
QUERY = "Which city is France's capital?"


@check
def rerank_v2() -> None:
    answer = client.rerank(model=MODEL, query=QUERY, documents=DOCUMENTS)
    assert answer.results[0].index == 1
    assert len(answer.results) == 3
    scores = [result.relevance_score for result in answer.results]
    assert scores == sorted(scores, reverse=True)


@check
def rerank_v2_top_n() -> None:
    answer = client.rerank(model=MODEL, query=QUERY, documents=DOCUMENTS, top_n=1)
    assert [result.index for result in answer.results] == [1]


@check
def rerank_v1_with_documents() -> None:
    answer = first.rerank(model=MODEL, query=QUERY, documents=DOCUMENTS, top_n=2, return_documents=True)
    assert answer.results[0].document.text == DOCUMENTS[1]


@check
def errors() -> None:
    try:
        client.rerank(model="nobody", query=QUERY, documents=DOCUMENTS)
    except cohere.errors.NotFoundError:
        return
    raise AssertionError("a model that is not there was found")
