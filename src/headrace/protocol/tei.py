"""The routes of Text Embeddings Inference: ``/embed``, ``/predict`` and ``/info``; bodies read, answers written.

Their bodies name no model: the server's first answers. ``inputs`` is one text or a list of texts; one text gets one
answer, a list gets a list.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from headrace.protocol import unsupported
from headrace.protocol.embeddings import MAX_DIMENSIONS, EmbeddingRequest, values_of
from headrace.protocol.fields import Fields
from headrace.protocol.inputs import MAX_INPUTS, MODEL_LIMIT
from headrace.protocol.rerank import ClassifyRequest, shares_of, texts_of
from headrace.protocol.strict_json import decode_object

DIRECTIONS: Final = ("Right", "right")
_encode = msgspec.json.Encoder().encode


def parse_embed(body: bytes) -> EmbeddingRequest:
    """Reads the body of ``POST /embed``.

    Raises:
        RequestError: a field is missing, of the wrong type or out of range, or vectors of another length are wanted.
    """
    return _embed(Fields(decode_object(body)))


def _embed(fields: Fields) -> EmbeddingRequest:
    inputs = texts_of(fields, "inputs")
    unsupported.refuse(fields, unsupported.VECTORS)
    truncate_tokens = truncation_of(fields)
    return EmbeddingRequest(
        model=None,
        inputs=inputs,
        dimensions=fields.integer("dimensions", 1, MAX_DIMENSIONS),
        truncate_tokens=truncate_tokens,
        unknown=fields.unknown(),
        is_tei=True,
    )


def parse_embed_all(body: bytes) -> EmbeddingRequest:
    """Reads the body of ``POST /embed_all``; raises as ``parse_embed``."""
    fields = Fields(decode_object(body))
    inputs = texts_of(fields, "inputs")
    unsupported.refuse(fields, unsupported.ENCODE)
    truncate_tokens = truncation_of(fields)
    return EmbeddingRequest(
        model=None,
        inputs=inputs,
        dimensions=None,
        truncate_tokens=truncate_tokens,
        unknown=fields.unknown(),
        is_tei=True,
        is_by_token=True,
    )


def parse_similarity(body: bytes) -> EmbeddingRequest:
    """Reads the body of ``POST /similarity``: ``inputs`` holds a ``source_sentence`` and ``sentences``."""
    return _similarity(Fields(decode_object(body)))


def _similarity(fields: Fields) -> EmbeddingRequest:
    given = fields.mapping("inputs")
    if given is None:
        raise fields.missing("inputs")
    inner = Fields(given, "inputs.")
    source = inner.text("source_sentence", 2**26)
    if not source:
        raise inner.missing("source_sentence")
    sentences = texts_of(inner, "sentences")
    parameters = Fields(fields.mapping("parameters") or {}, "parameters.")
    unsupported.refuse(parameters, unsupported.ENCODE)
    truncate_tokens = truncation_of(parameters)
    return EmbeddingRequest(
        model=None,
        inputs=(source, *sentences),
        dimensions=None,
        truncate_tokens=truncate_tokens,
        unknown=(*fields.unknown(), *inner.unknown(), *parameters.unknown()),
        is_tei=True,
        is_similarity=True,
    )


def parse_task_vectors(body: bytes) -> EmbeddingRequest:
    """Reads the body of ``POST /``: as ``/similarity`` where ``inputs`` is an object, else as ``/embed``."""
    values = decode_object(body)
    read = _similarity if isinstance(values.get("inputs"), dict) else _embed
    return read(Fields(values))


def parse_predict(body: bytes) -> ClassifyRequest:
    """Reads the body of ``POST /predict``; raises as ``parse_embed``. Pairs of texts are for ``/rerank``."""
    fields = Fields(decode_object(body))
    is_single = isinstance(fields.take("inputs"), str)
    inputs = texts_of(fields, "inputs")
    unsupported.refuse(fields, unsupported.ENCODE)
    truncate_tokens = truncation_of(fields)
    return ClassifyRequest(
        model=None,
        inputs=inputs,
        truncate_tokens=truncate_tokens,
        unknown=fields.unknown(),
        is_tei=True,
        is_single=is_single,
        activation="none" if fields.flag("raw_scores") else "model",
    )


def truncation_of(fields: Fields) -> int | None:
    """Reads TEI's ``truncate`` and ``truncation_direction``: the tokens that are kept at most, None for no cutting."""
    fields.choice("truncation_direction", DIRECTIONS, "Right")
    return MODEL_LIMIT if fields.flag("truncate") else None


def embed_body(request: EmbeddingRequest, vectors: Sequence[bytes], width: int) -> bytes:
    """Writes the answer of ``/embed``: a list of vectors, for a single text too; of ``/embed_all`` one list a text.

    Of ``/similarity`` it is the cosines of the first vector and each of the others.
    """
    if request.is_similarity:
        first = values_of(vectors[0])
        return _encode([sum(a * b for a, b in zip(first, values_of(row), strict=True)) for row in vectors[1:]])
    return _encode([msgspec.Raw(_encode(_shaped(request, values_of(vector), width))) for vector in vectors])


def _shaped(request: EmbeddingRequest, values: list[float], width: int) -> list[float] | list[list[float]]:
    if not request.is_by_token:
        return values
    return [values[at : at + width] for at in range(0, len(values), width)]


def predict_body(request: ClassifyRequest, results: Sequence[bytes], labels: Sequence[str]) -> bytes:
    """Writes the answer of ``/predict``: per text its classes, best first."""
    answers = []
    for result in results:
        scores = shares_of(result, request.activation)
        best = sorted(zip(scores, labels, strict=True), key=lambda pair: -pair[0])[: request.top_n]
        answers.append([{"score": score, "label": label} for score, label in best])
    return _encode(answers[0] if request.is_single else answers)


def info(
    model: str, context_tokens: int, labels: Sequence[str], version: str, *, is_by_token: bool
) -> dict[str, object]:
    """Gives the answer of ``GET /info``; TEI has no word for a model that classifies tokens."""
    kind: dict[str, object] = {"embedding": {"pooling": "model"}}
    if labels:
        names = {str(index): label for index, label in enumerate(labels)}
        name = "token_classifier" if is_by_token else "reranker" if len(labels) == 1 else "classifier"
        kind = {name: {"id2label": names}}
    return {
        "model_id": model,
        "model_type": kind,
        "max_input_length": context_tokens,
        "max_client_batch_size": MAX_INPUTS,
        "version": version,
    }
