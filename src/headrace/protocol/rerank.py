"""Scoring: rerank in Cohere's, Jina's and TEI's forms, vLLM's score and classify; bodies read, answers written.

Cohere and Jina:  {model, query, documents, top_n}  →  {id, results: [{index, relevance_score}]}, best first
TEI:              {query, texts}                    →  [{index, score}], best first
vLLM's score:     {model, text_1, text_2}           →  {data: [{index, score}]}, in order
vLLM's classify:  {model, input}                    →  {data: [{index, label, probs, num_classes}]}
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec

from headrace.base.errors import RequestError
from headrace.protocol import unsupported
from headrace.protocol.embeddings import truncation, values_of
from headrace.protocol.fields import Fields
from headrace.protocol.inputs import MAX_INPUTS, MODEL_LIMIT
from headrace.protocol.openai import MAX_TOKEN_ID
from headrace.protocol.strict_json import decode_object

# Names of one field each; of these exactly one is sent.
DOCUMENTS: Final = ("documents", "texts")
FIRST_TEXTS: Final = ("text_1", "queries", "data_1")
SECOND_TEXTS: Final = ("text_2", "documents", "items", "data_2")
_MAX_CHARS: Final = 2**26
_MAX_NAME: Final = 256
# ``model`` is what the number of classes asks for: shares of several, the probability of one; ``none`` gives scores.
Activation = Literal["model", "none", "sigmoid", "softmax"]
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """Pairs of texts to score: each query with each of its documents.

    Args:
        model: None where none is named: the server's first.
        form: ``rerank``, ``tei`` or ``score``.
        queries: as many as documents, or one for all.
        top_n: documents to give back, best first; None for all.
        has_documents: the answer repeats the documents.
        is_raw: scores as the model gives them, without the sigmoid.
        truncate_tokens: a pair's second text is cut to fit so many tokens; None refuses long ones.
    """

    model: str | None
    form: str
    queries: tuple[str, ...]
    documents: tuple[str, ...]
    top_n: int | None
    has_documents: bool
    is_raw: bool
    truncate_tokens: int | None
    unknown: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ClassifyRequest:
    """Texts to classify.

    Args:
        model: None where none is named: the server's first.
        is_tei: the answer is in TEI's form.
        is_single: of that form: one text was sent as such.
        activation: what makes shares of scores.
        top_n: of that form: so many classes, best first; None for all.
    """

    model: str | None
    inputs: tuple[str, ...]
    truncate_tokens: int | None
    unknown: tuple[str, ...]
    is_tei: bool = False
    is_single: bool = False
    activation: Activation = "model"
    top_n: int | None = None


def parse_rerank(body: bytes) -> ScoreRequest:
    """Reads the body of the rerank routes: TEI's where it has ``texts``, else Cohere's and Jina's.

    Raises:
        RequestError: a field is missing, of the wrong type or out of range; the message names it.
    """
    fields = Fields(decode_object(body))
    is_tei = fields.take("texts") is not None
    model = fields.text("model", _MAX_NAME)
    query = fields.text("query", _MAX_CHARS)
    if query is None:
        raise fields.missing("query")
    unsupported.refuse(fields, unsupported.ENCODE)
    truncate = truncation(fields)
    if fields.flag("truncate"):
        truncate = MODEL_LIMIT
    if fields.integer("max_tokens_per_doc", 1, MAX_TOKEN_ID) is not None:
        truncate = MODEL_LIMIT  # Cohere cuts documents by itself; here they are cut where the model's context ends
    return ScoreRequest(
        model=model,
        form="tei" if is_tei else "rerank",
        queries=(query,),
        documents=_one_of(fields, _documents, *DOCUMENTS),
        top_n=fields.integer("top_n", 1, MAX_INPUTS),
        has_documents=any([fields.flag("return_text"), fields.flag("return_documents")]),
        is_raw=any([fields.flag("raw_scores"), _is_raw(fields)]),
        truncate_tokens=truncate,
        unknown=fields.unknown(),
    )


def parse_score(body: bytes) -> ScoreRequest:
    """Reads the body of ``/v1/score``; raises as ``parse_rerank``."""
    fields = Fields(decode_object(body))
    model = fields.text("model", _MAX_NAME)
    queries = _one_of(fields, texts_of, *FIRST_TEXTS)
    documents = _one_of(fields, texts_of, *SECOND_TEXTS)
    if len(queries) not in (1, len(documents)):
        raise RequestError(
            f"text_1 has {len(queries)} texts and text_2 has {len(documents)}: give one, or as many", param="text_1"
        )
    unsupported.refuse(fields, unsupported.ENCODE)
    return ScoreRequest(
        model=model,
        form="score",
        queries=queries,
        documents=documents,
        top_n=None,
        has_documents=False,
        is_raw=_is_raw(fields),
        truncate_tokens=truncation(fields),
        unknown=fields.unknown(),
    )


def parse_classify(body: bytes) -> ClassifyRequest:
    """Reads the body of ``/v1/classify``; raises as ``parse_rerank``."""
    fields = Fields(decode_object(body))
    model = fields.text("model", _MAX_NAME)
    inputs = texts_of(fields, "input")
    unsupported.refuse(fields, unsupported.ENCODE)
    activation: Activation = "none" if _is_raw(fields) else "model"
    return ClassifyRequest(model, inputs, truncation(fields), fields.unknown(), activation=activation)


def _is_raw(fields: Fields) -> bool:
    """Reads vLLM's word for scores as the model gives them."""
    return not fields.flag("use_activation", default=True)


def _one_of(fields: Fields, read: Callable[[Fields, str], tuple[str, ...]], *names: str) -> tuple[str, ...]:
    """Gives a field that has several names; two at once are refused."""
    given = [name for name in names if fields.take(name) is not None]
    if len(given) > 1:
        raise RequestError(f"{given[0]} and {given[1]} are two names of one field: send one of them", param=given[1])
    return read(fields, given[0] if given else names[0])


def _documents(fields: Fields, name: str) -> tuple[str, ...]:
    items = fields.items(name, MAX_INPUTS)
    if not items:
        raise fields.missing(name) if items is None else fields.wrong(name, items, "a list of texts, and not empty")
    texts = [item.get("text") if isinstance(item, dict) else item for item in items]
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise fields.wrong(f"{name}[{index}]", items[index], "a text, or an object with one as text")
    return tuple(text for text in texts if isinstance(text, str))


def texts_of(fields: Fields, name: str) -> tuple[str, ...]:
    """Gives the texts of a field that holds one or a list of them.

    Raises:
        RequestError: it is missing, empty or holds something else.
    """
    value = fields.take(name)
    return (value,) if isinstance(value, str) else _documents(fields, name)


def shares_of(result: bytes, activation: Activation) -> list[float]:
    """Gives what the scores of classes stand for."""
    values = values_of(result)
    if activation == "none":
        return values
    if activation == "sigmoid" or (activation == "model" and len(values) == 1):
        return [sigmoid(value) for value in values]
    return softmax(values)


def sigmoid(x: float) -> float:
    """Gives 1 / (1 + e^−x), without overflow."""
    return 1.0 / (1.0 + math.exp(-x)) if x >= 0 else math.exp(x) / (1.0 + math.exp(x))


def softmax(values: Sequence[float]) -> list[float]:
    """Gives the shares of e^value."""
    top = max(values)
    powers = [math.exp(value - top) for value in values]
    total = sum(powers)
    return [power / total for power in powers]


def scores_body(request: ScoreRequest, scores: Sequence[float], answer_id: str, model: str, tokens: int) -> bytes:
    """Writes the answer of a scoring request, in its form. Equal scores keep the order of their documents."""
    if request.form == "score":
        data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return _encode({"id": answer_id, "object": "list", "model": model, "data": data, "usage": usage})
    best = sorted(range(len(scores)), key=lambda index: -scores[index])[: request.top_n]
    results: list[dict[str, Any]] = []
    for index in best:
        if request.form == "tei":
            result: dict[str, Any] = {"index": index, "score": scores[index]}
            if request.has_documents:
                result["text"] = request.documents[index]
        else:
            result = {"index": index, "relevance_score": scores[index]}
            if request.has_documents:
                result["document"] = {"text": request.documents[index]}
        results.append(result)
    if request.form == "tei":
        return _encode(results)
    meta = {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}}
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return _encode({"id": answer_id, "model": model, "results": results, "meta": meta, "usage": usage})


def classes_body(
    request: ClassifyRequest, results: Sequence[bytes], labels: Sequence[str], answer_id: str, model: str, tokens: int
) -> bytes:
    """Writes the answer of a classification: per input the best label and the shares of all."""
    data = []
    for index, result in enumerate(results):
        probs = shares_of(result, request.activation)
        label = labels[probs.index(max(probs))]
        data.append({"index": index, "label": label, "probs": probs, "num_classes": len(probs)})
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return _encode({"id": answer_id, "object": "list", "model": model, "data": data, "usage": usage})
