"""vLLM's ``/v1/pooling``: what the model makes of a text or of each of its tokens; body read, answer written.

{model, input, task, encoding_format}  →  {data: [{index, object: "pooling", data, shape}]}
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import msgspec

from headrace.protocol import unsupported
from headrace.protocol.binary import Binary, Packed, VectorForm, take_binary
from headrace.protocol.embeddings import MAX_DIMENSIONS, truncation, values_of
from headrace.protocol.fields import Fields
from headrace.protocol.inputs import Input, inputs_of
from headrace.protocol.rerank import sigmoid, softmax
from headrace.protocol.strict_json import decode_object

_MAX_NAME: Final = 256
_encode = msgspec.json.Encoder().encode


class PoolingTask(StrEnum):
    """What is wanted: a vector or scores of classes, of each text or of each token."""

    EMBED = "embed"
    CLASSIFY = "classify"
    TOKEN_EMBED = "token_embed"  # noqa: S105  # no password
    TOKEN_CLASSIFY = "token_classify"  # noqa: S105  # no password

    @property
    def is_by_token(self) -> bool:
        """Whether each token has its own."""
        return self in (PoolingTask.TOKEN_EMBED, PoolingTask.TOKEN_CLASSIFY)


@dataclass(frozen=True, slots=True)
class PoolingRequest:
    """A checked body.

    Args:
        model: None where none is named: the server's first.
        task: None for what the model is for, by token where it can.
        is_plain: scores as the model gives them, and tokens' vectors of whatever length.
        others: as in ``EmbeddingRequest``.
    """

    model: str | None
    inputs: tuple[Input, ...]
    task: PoolingTask | None
    binary: Binary
    is_plain: bool
    dimensions: int | None
    truncate_tokens: int | None
    unknown: tuple[str, ...]


def parse_pooling(body: bytes) -> PoolingRequest:
    """Reads the body.

    Raises:
        RequestError: a field is missing, of the wrong type or out of range; the message names it.
    """
    fields = Fields(decode_object(body))
    model = fields.text("model", _MAX_NAME)
    inputs = inputs_of(fields)
    task = fields.choice("task", [*PoolingTask])
    binary = take_binary(fields, len(inputs))
    unsupported.refuse(fields, unsupported.ENCODE)
    is_plain = not fields.flag("use_activation", default=True)
    is_plain |= not fields.flag("normalize", default=True)
    fields.text("user", 2**26)
    return PoolingRequest(
        model=model,
        inputs=inputs,
        task=None if task is None else PoolingTask(task),
        binary=binary,
        is_plain=is_plain,
        dimensions=fields.integer("dimensions", 1, MAX_DIMENSIONS),
        truncate_tokens=truncation(fields),
        unknown=fields.unknown(),
    )


def activated(scores: Sequence[float]) -> list[float]:
    """Gives what the scores of classes stand for: shares, or of one class its probability."""
    return softmax(scores) if len(scores) > 1 else [sigmoid(scores[0])]


def pooling_body(
    request: PoolingRequest,
    task: PoolingTask,
    results: Sequence[bytes],
    width: int,
    *,
    answer_id: str,
    created: int,
    model: str,
    tokens: int,
) -> bytes | Packed:
    """Writes the answer.

    Args:
        results: of each input, f32 little-endian: ``width`` numbers, or as many for each of its tokens.
    """
    is_shared = task in (PoolingTask.CLASSIFY, PoolingTask.TOKEN_CLASSIFY) and not request.is_plain
    binary = request.binary
    usage = {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0}
    about = {"id": answer_id, "created": created, "model": model, "usage": usage}
    packed: list[bytes] = []
    shapes: list[list[int]] = []
    data = []
    for index, result in enumerate(results):
        values = values_of(result)
        rows = [values[at : at + width] for at in range(0, len(values), width)]
        if is_shared:
            rows = [activated(row) for row in rows]
        shapes.append([len(rows), width] if task.is_by_token else [width])
        if binary.form is VectorForm.FLOAT:
            shown: object = rows if task.is_by_token else rows[0]
        else:
            packed.append(_packed(rows) if is_shared else result)
            shown = binary.text_of(packed[-1]) if binary.form is VectorForm.BASE64 else None
        data.append({"index": index, "object": "pooling", "data": shown, "shape": shapes[-1]})
    if binary.is_packed:
        return binary.answer(packed, shapes, about)
    return _encode({**about, "object": "list", "data": data})


def _packed(rows: Sequence[Sequence[float]]) -> bytes:
    packed = array("f", [value for row in rows for value in row])
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()
