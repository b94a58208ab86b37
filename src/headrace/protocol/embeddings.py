"""OpenAI's embeddings endpoint: its body read, its answer written."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from headrace.protocol import unsupported
from headrace.protocol.binary import PLAIN, Binary, Packed, VectorForm, take_binary
from headrace.protocol.fields import Fields
from headrace.protocol.inputs import MODEL_LIMIT, Input, inputs_of
from headrace.protocol.openai import MAX_TOKEN_ID
from headrace.protocol.strict_json import decode_object

_MAX_CHARS: Final = 2**26
_MAX_NAME: Final = 256
MAX_DIMENSIONS: Final = 2**20
# vLLM's ``truncate_prompt_tokens``: −1 is the model's own limit.
_MODEL_LIMIT: Final = -1

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """A checked body.

    Args:
        binary: how vectors go out.
        model: None where none is named: the server's first.
        dimensions: leading elements that are wanted, None for all.
        is_tei: the answer is in TEI's form.
        is_similarity: of that form: the first input is compared with each of the others.
        is_by_token: of that form: every token has its own vector, as the model gives it.
        truncate_tokens: inputs are cut to their first so many tokens, special ones included; None refuses long ones.
    """

    model: str | None
    inputs: tuple[Input, ...]
    dimensions: int | None
    truncate_tokens: int | None
    unknown: tuple[str, ...]
    is_tei: bool = False
    is_similarity: bool = False
    is_by_token: bool = False
    binary: Binary = PLAIN


def parse_embeddings(body: bytes) -> EmbeddingRequest:
    """Reads the body of ``POST /v1/embeddings``.

    Raises:
        RequestError: a field is missing, of the wrong type or out of range; the message names it.
    """
    fields = Fields(decode_object(body))
    model = fields.text("model", _MAX_NAME)
    inputs = inputs_of(fields)
    fields.text("user", _MAX_CHARS)
    unsupported.refuse(fields, unsupported.VECTORS)
    return EmbeddingRequest(
        model=model,
        inputs=inputs,
        dimensions=fields.integer("dimensions", 1, MAX_DIMENSIONS),
        truncate_tokens=truncation(fields),
        binary=take_binary(fields, len(inputs)),
        unknown=fields.unknown(),
    )


def truncation(fields: Fields) -> int | None:
    """Gives ``truncate_prompt_tokens``: None where absent, a number above any context for the model's own limit."""
    truncate = fields.integer("truncate_prompt_tokens", _MODEL_LIMIT, MAX_TOKEN_ID)
    if truncate == 0:
        raise fields.wrong("truncate_prompt_tokens", 0, "at least 1, or -1 for the model's limit")
    return MODEL_LIMIT if truncate == _MODEL_LIMIT else truncate


class _Vector(msgspec.Struct, frozen=True):
    embedding: str | list[float]
    index: int
    object: Literal["embedding"] = "embedding"


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0


class _Answer(msgspec.Struct, frozen=True):
    id: str
    created: int
    data: list[msgspec.Raw]
    model: str
    usage: _Usage
    object: Literal["list"] = "list"


def embeddings_body(
    request: EmbeddingRequest, vectors: Sequence[bytes], *, answer_id: str, created: int, model: str, prompt_tokens: int
) -> bytes | Packed:
    """Writes the answer. Cost: about 40 µs a vector of 384 numbers, 2 µs in base64.

    Args:
        vectors: f32 little-endian, in the order of the inputs.
    """
    binary = request.binary
    usage = _Usage(prompt_tokens, prompt_tokens)
    if binary.is_packed:
        shapes = [[len(vector) // 4] for vector in vectors]
        about = {"id": answer_id, "created": created, "model": model, "usage": msgspec.structs.asdict(usage)}
        return binary.answer(vectors, shapes, about)
    form = binary.text_of if binary.form is VectorForm.BASE64 else values_of
    # One after the other: as numbers of Python all vectors of a batch together take 4 times the memory of the answer.
    data = [msgspec.Raw(_encode(_Vector(form(vector), index))) for index, vector in enumerate(vectors)]
    return _encode(_Answer(answer_id, created, data, model, usage))


def values_of(vector: bytes) -> list[float]:
    """Gives the numbers of a result, f32 little-endian."""
    values = array("f", vector)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()
