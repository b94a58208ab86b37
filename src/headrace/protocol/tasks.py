"""Classes of tokens, and tokens behind masks, in the forms of Hugging Face's inference API, at TEI's ``POST /``.

{inputs, parameters}  →  tokens: [{entity_group, score, word, start, end}], masks: [{score, token, token_str, sequence}]

One text gets one answer, a list gets a list. Parameters stand in ``parameters``, or beside ``inputs``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import msgspec

from headrace.base.errors import RequestError
from headrace.protocol import unsupported
from headrace.protocol.embeddings import values_of
from headrace.protocol.fields import Fields
from headrace.protocol.pooling import activated
from headrace.protocol.rerank import Activation, ClassifyRequest, texts_of
from headrace.protocol.strict_json import decode_object
from headrace.protocol.tei import truncation_of

MAX_MASKED_TOP: Final = 1000
_DEFAULT_TOP: Final = 5
_OUTSIDE: Final = "O"
STRATEGIES: Final = ("none", "simple")
FUNCTIONS: Final[dict[str, Activation]] = {"none": "none", "sigmoid": "sigmoid", "softmax": "softmax"}
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class TaskRequest:
    """A checked body.

    Args:
        is_single: one text was sent as such.
        is_grouped: neighbouring tokens of one class are one entity.
        ignored: classes that are left out.
        num_top: tokens of each mask.
    """

    inputs: tuple[str, ...]
    is_single: bool
    is_grouped: bool
    ignored: frozenset[str]
    num_top: int
    truncate_tokens: int | None
    unknown: tuple[str, ...]
    model: str | None = None


def parse_tokens(body: bytes) -> TaskRequest:
    """Reads a body for classes of tokens.

    Raises:
        RequestError: a field is missing, of the wrong type or out of range; the message names it.
    """
    fields, parameters = _fields(body)
    inputs = texts_of(fields, "inputs")
    strategy = parameters.choice("aggregation_strategy", STRATEGIES, "none or simple") or "simple"
    ignored = parameters.items("ignore_labels", 4096)
    if ignored is not None and not all(isinstance(label, str) for label in ignored):
        raise parameters.wrong("ignore_labels", ignored, "a list of labels")
    return TaskRequest(
        inputs=inputs,
        is_single=isinstance(fields.take("inputs"), str),
        is_grouped=strategy == "simple",
        ignored=frozenset([_OUTSIDE] if ignored is None else map(str, ignored)),
        num_top=0,
        truncate_tokens=truncation_of(parameters),
        unknown=_unknown(fields, parameters),
    )


def parse_masks(body: bytes) -> TaskRequest:
    """Reads a body for the tokens behind masks; raises as ``parse_tokens``."""
    fields, parameters = _fields(body)
    inputs = texts_of(fields, "inputs")
    if parameters.take("targets") is not None:
        raise RequestError("targets is not supported: ask for more tokens with top_k", param="targets")
    return TaskRequest(
        inputs=inputs,
        is_single=isinstance(fields.take("inputs"), str),
        is_grouped=False,
        ignored=frozenset(),
        num_top=parameters.integer("top_k", 1, MAX_MASKED_TOP) or _DEFAULT_TOP,
        truncate_tokens=truncation_of(parameters),
        unknown=_unknown(fields, parameters),
    )


def parse_text_classes(body: bytes) -> ClassifyRequest:
    """Reads a body for classes of texts; raises as ``parse_tokens``. One text is answered as a list of one."""
    fields, parameters = _fields(body)
    inputs = texts_of(fields, "inputs")
    function = parameters.choice("function_to_apply", FUNCTIONS, "none, sigmoid or softmax")
    if parameters.flag("raw_scores"):
        function = "none"
    return ClassifyRequest(
        model=None,
        inputs=inputs,
        truncate_tokens=truncation_of(parameters),
        unknown=_unknown(fields, parameters),
        is_tei=True,
        activation="model" if function is None else FUNCTIONS[function],
        top_n=parameters.integer("top_k", 1, 4096),
    )


def _fields(body: bytes) -> tuple[Fields, Fields]:
    values = decode_object(body)
    fields = Fields(values)
    given = fields.mapping("parameters")
    parameters = fields if given is None else Fields(given, "parameters.")
    unsupported.refuse(parameters, unsupported.ENCODE)
    return fields, parameters


def _unknown(fields: Fields, parameters: Fields) -> tuple[str, ...]:
    return fields.unknown() if parameters is fields else (*fields.unknown(), *parameters.unknown())


@dataclass(frozen=True, slots=True)
class Span:
    """Where a token stands in its text, [start, stop); equal for one that the tokenizer added."""

    start: int
    stop: int


def tokens_body(
    request: TaskRequest, results: Sequence[bytes], spans: Sequence[Sequence[Span]], labels: Sequence[str]
) -> bytes:
    """Writes the classes of the tokens of each text.

    Args:
        results: scores, f32 little-endian [tokens, classes].
        spans: of the tokens.
    """
    answers = []
    for text, result, places in zip(request.inputs, results, spans, strict=True):
        values = values_of(result)
        rows = [activated(values[at : at + len(labels)]) for at in range(0, len(values), len(labels))]
        found = [(place, rows[at]) for at, place in enumerate(places) if place.start < place.stop]
        entities = _grouped(text, found, labels) if request.is_grouped else _alone(text, found, labels)
        kinds = ("entity_group", "entity")
        answers.append([item for item in entities if next(item[k] for k in kinds if k in item) not in request.ignored])
    return _encode(answers[0] if request.is_single else answers)


def _best(row: Sequence[float]) -> int:
    return max(range(len(row)), key=row.__getitem__)


def _alone(text: str, found: Sequence[tuple[Span, list[float]]], labels: Sequence[str]) -> list[dict[str, Any]]:
    return [
        {
            "entity": labels[_best(row)],
            "score": max(row),
            "index": index,
            "word": text[place.start : place.stop],
            "start": place.start,
            "end": place.stop,
        }
        for index, (place, row) in enumerate(found)
    ]


def _grouped(text: str, found: Sequence[tuple[Span, list[float]]], labels: Sequence[str]) -> list[dict[str, Any]]:
    """Joins neighbours of one class; ``B-`` begins another, as transformers' simple strategy has it."""
    tags = [labels[_best(row)] for _, row in found]
    starts = [0] if tags else []
    for at, (before, tag) in enumerate(pairwise(tags), 1):
        if tag.startswith("B-") or _kind(tag) != _kind(before):
            starts.append(at)
    groups = []
    for start, stop in pairwise([*starts, len(tags)]):
        first, last = found[start][0].start, found[stop - 1][0].stop
        score = sum(max(row) for _, row in found[start:stop]) / (stop - start)
        group = {"entity_group": _kind(tags[start]), "score": score, "word": text[first:last]}
        groups.append(group | {"start": first, "end": last})
    return groups


def _kind(tag: str) -> str:
    return tag[2:] if tag.startswith(("B-", "I-")) else tag


@dataclass(frozen=True, slots=True)
class Filled:
    """One suggestion for a mask: a token, its probability, its text, and the whole text with it in place."""

    token: int
    score: float
    text: str
    sequence: str


def masks_body(request: TaskRequest, filled: Sequence[Sequence[Sequence[Filled]]]) -> bytes:
    """Writes the suggestions for the masks of each text: a list where it has one mask, else a list of lists."""
    answers = []
    for masks in filled:
        shown = [
            [
                {"score": one.score, "token": one.token, "token_str": one.text, "sequence": one.sequence}
                for one in suggestions
            ]
            for suggestions in masks
        ]
        answers.append(shown[0] if len(shown) == 1 else shown)
    return _encode(answers[0] if request.is_single else answers)
