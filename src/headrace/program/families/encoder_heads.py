"""What stands on top of an encoder's rows: a vector, scores of classes for the text or its tokens, tokens for masks.

A family says where its files keep the weights and what is its own; the rest is alike. The rows are normed already.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from headrace.program.builder import Builder
from headrace.program.families.source import Role, Source
from headrace.program.ir import NONE, Part, Program
from headrace.program.keys import Keys
from headrace.program.model import ModelSpec
from headrace.program.opcodes import Activation, Domain, Norm

ROWS, VECTORS, SCORES, TOKEN_SCORES = "normed", "vectors", "scores", "token_scores"
"""Names of the buffers that are read after a step."""
_MAX_LABELS = 2**12
_SEQUENCES, _TOKENS, _MASKED = "ForSequenceClassification", "ForTokenClassification", "ForMaskedLM"


def with_head(spec: ModelSpec, architecture: str, keys: Keys, activation: Activation | None = None) -> ModelSpec:
    """Returns the spec with what the class of the model puts on top.

    Args:
        activation: of the masked head, and of a dense layer before a classifier; None is the MLP's.
    """
    spec = replace(spec, head_activation=spec.activation if activation is None else activation)
    if architecture.endswith((_SEQUENCES, _TOKENS)):
        return replace(spec, labels=_labels(keys), has_token_labels=architecture.endswith(_TOKENS))
    if architecture.endswith(_MASKED):
        return replace(spec, has_masked_head=keys.boolean("tie_word_embeddings", True))
    return spec


def _labels(keys: Keys) -> tuple[str, ...]:
    """Returns the names of the classes, by ``id2label``; ``LABEL_0`` … where there is none."""
    named = keys.mapping("id2label")
    if named is None:
        return tuple(f"LABEL_{index}" for index in range(keys.integer("num_labels", 1, _MAX_LABELS, default=2)))
    count = len(named.values)
    if not 1 <= count <= _MAX_LABELS:
        raise keys.refuse("id2label", f"must have 1 to {_MAX_LABELS} entries")
    return tuple(named.text(str(index)) for index in range(count))


def product(
    b: Builder,
    name: str,
    role: str,
    x: int,
    n: int,
    *,
    has_bias: bool = True,
    activation: Activation = Activation.NONE,
    domain: Domain = Domain.ROWS,
) -> int:
    """Adds a product of a head, whose weights are the role and its bias; returns its buffer."""
    weight = b.matrix(role, b.width_of(x), Part(role, n))
    bias = b.vector(f"{role}_bias", Part(f"{role}_bias", n)) if has_bias else NONE
    return b.linear(name, x, weight, bias=bias, activation=activation, domain=domain)


def classify(b: Builder, x: int, domain: Domain) -> Program:
    """Ends the program with the scores of the classes for rows or sequences."""
    product(b, SCORES, "classifier", x, len(b.spec.labels), domain=domain)
    return b.program()


def embed(b: Builder, rows: int, table: int) -> Program:
    """Ends the program with the vector of each sequence, and with the scores of tokens where rows are asked for.

    Args:
        table: the embedding, which is the last product of the masked head too.
    """
    spec = b.spec
    if not spec.has_masked_head:
        b.pool(VECTORS, rows, pooling=spec.pooling, is_normalised=True)
        return b.program(rows)
    vectors = b.pool(VECTORS, rows, pooling=spec.pooling, is_normalised=True)
    narrow = spec.embed_width or spec.width
    inner = product(
        b,
        "mask_inner",
        "mask_dense",
        b.pick("picked", rows),
        narrow,
        has_bias=spec.has_head_bias,
        activation=spec.head_activation,
        domain=Domain.OUTPUTS,
    )
    has_norm_bias = spec.has_norm_bias
    b.linear(
        TOKEN_SCORES,
        inner,
        table,
        bias=b.vector("mask_head_bias", Part("mask_head_bias", spec.vocab_size)),
        norm_weight=b.vector("mask_norm", Part("mask_norm", narrow)),
        norm_bias=b.vector("mask_norm_bias", Part("mask_norm_bias", narrow)) if has_norm_bias else NONE,
        norm=Norm.LAYER,
        domain=Domain.OUTPUTS,
    )
    return b.program(rows, vectors)


def head_sources(stems: Mapping[str, tuple[str, ...]], role: str) -> tuple[Source, ...]:
    """Returns the places of a role of a head, whose stems the family gives; none where it is no such role."""
    at = Role.of(role)
    suffix = "bias" if at.is_bias else "weight"
    return tuple(Source(f"{stem}.{suffix}") for stem in stems.get(at.name, ()))
