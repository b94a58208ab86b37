"""What the families' GGUF files have in common: sizes, token ids, vocabulary, rotary embedding."""

from __future__ import annotations

import math
from collections.abc import Mapping

from headrace.base.errors import ModelFormatError
from headrace.program.families.checks import EPS, FACTOR, LIMITS, THETA, unsupported
from headrace.program.keys import Keys, show
from headrace.program.model import Architecture, ModelSpec, RopeKind, RopeSpec
from headrace.program.tensors import TensorLike, tensor_f32

Tensors = Mapping[str, TensorLike]


def own_keys(keys: Keys) -> Keys:
    """Returns the metadata of the file's own architecture: ``llama.block_count`` as ``block_count``."""
    prefix = keys.text("general.architecture") + "."
    values = {key.removeprefix(prefix): value for key, value in keys.values.items() if key.startswith(prefix)}
    return Keys(keys.source, values, prefix)


def spec_of_gguf(
    family: str,
    keys: Keys,
    own: Keys,
    tensors: Tensors,
    *,
    eps: str = "attention.layer_norm_rms_epsilon",
    has_partial_rotation: bool = False,
) -> ModelSpec:
    """Returns the shape that the keys common to all architectures describe; a family replaces what is its own.

    Args:
        keys: the whole metadata; ``own`` the part of ``own_keys``.
        eps: key of the norms' epsilon.
        has_partial_rotation: whether fewer ``rope.dimension_count`` than the head's elements are taken.
        tensors: shapes decide the vocabulary, tying and biases; the values of ``rope_freqs.weight`` are read.

    Raises:
        ModelFormatError: a value is of the wrong type, out of range, or contradicts another.
        ModelUnsupportedError: a variant that no program computes.
    """
    width = own.integer("embedding_length", *LIMITS["width"])
    heads = own.integer("attention.head_count", *LIMITS["heads"])
    head_size = own.integer("attention.key_length", *LIMITS["head_size"], default=width // heads)
    if own.integer("attention.value_length", *LIMITS["head_size"], default=head_size) != head_size:
        raise unsupported(own, "attention.value_length", own.values["attention.value_length"], str(head_size))
    turning = own.integer("rope.dimension_count", 0, LIMITS["head_size"][1], default=head_size)
    if turning != head_size and not has_partial_rotation:
        raise unsupported(own, "rope.dimension_count", turning, str(head_size))
    context_tokens = own.integer("context_length", *LIMITS["context_tokens"])
    experts = own.integer("expert_count", 0, LIMITS["experts"][1], default=0)
    hidden = own.integer("feed_forward_length", *LIMITS["hidden"])
    if experts:
        hidden = own.integer("expert_feed_forward_length", *LIMITS["hidden"], default=hidden)
    vocab_size = _vocabulary(keys, own, tensors, width)
    ends = [
        token_id
        for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
        for token_id in keys.integers(key, 0, vocab_size - 1, most=1)
    ]
    begin = keys.integers("tokenizer.ggml.bos_token_id", 0, vocab_size - 1, most=1)
    return ModelSpec(
        family=family,
        architecture=Architecture.DECODER_ONLY,
        layers=own.integer("block_count", *LIMITS["layers"]),
        width=width,
        heads=heads,
        kv_heads=own.integer("attention.head_count_kv", *LIMITS["heads"], default=heads),
        head_size=head_size,
        hidden=hidden,
        vocab_size=vocab_size,
        context_tokens=context_tokens,
        norm_eps=own.number(eps, *EPS),
        rope=_rope(own, tensors, turning, context_tokens),
        is_tied="output.weight" not in tensors,
        bos_token_id=begin[0] if begin else None,
        eos_token_ids=tuple(dict.fromkeys(ends)),
        has_attention_bias="blk.0.attn_q.bias" in tensors,
        has_output_bias="blk.0.attn_output.bias" in tensors,
        has_mlp_bias="blk.0.ffn_down.bias" in tensors,
        rotary_size=0 if turning == head_size else turning,
        experts=experts,
        top_k=own.integer("expert_used_count", *LIMITS["experts"]) if experts else 0,
        # llama.cpp divides by the sum in every architecture that we read.
        is_renormalised=experts > 0,
    )


def optional_window(own: Keys) -> int:
    """Returns ``attention.sliding_window``, 0 where there is none."""
    return own.integer("attention.sliding_window", 0, LIMITS["window"][1], default=0)


def _vocabulary(keys: Keys, own: Keys, tensors: Tensors, width: int) -> int:
    """Returns the vocabulary's size; embedding rows, token list and ``vocab_size`` must agree where they exist."""
    table = tensors.get("token_embd.weight")
    if table is None:
        raise ModelFormatError(f"{keys.source}: tensor token_embd.weight is missing")
    if len(table.shape) != 2 or table.shape[1] != width:
        raise ModelFormatError(
            f"{keys.source}: token_embd.weight has shape {show(tuple(table.shape))}, expected [vocabulary, {width}]"
        )
    rows = Keys(keys.source, {"token_embd.weight rows": table.shape[0]}).integer(
        "token_embd.weight rows", *LIMITS["vocab_size"]
    )
    if own.integer("vocab_size", *LIMITS["vocab_size"], default=rows) != rows:
        raise own.refuse("vocab_size", f"but token_embd.weight has {rows} rows")
    tokens = keys.values.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list | tuple) and len(tokens) != rows:
        raise ModelFormatError(
            f"{keys.source}: tokenizer.ggml.tokens has {len(tokens)} entries, but token_embd.weight has {rows} rows"
        )
    return rows


def rope_factors(own: Keys, tensors: Tensors, name: str, count: int) -> tuple[float, ...]:
    """Returns the divisors in tensor ``name``, () without it."""
    if (tensor := tensors.get(name)) is None:
        return ()
    values = tensor_f32(own.source, name, tensor, count)
    low, high = 1e-6, 1e6
    if not all(low <= value <= high for value in values):  # NaN fails too
        raise ModelFormatError(f"{own.source}: {name} has values outside {low:g}..{high:g}")
    return values


def _rope(own: Keys, tensors: Tensors, rotary_size: int, context_tokens: int) -> RopeSpec:
    theta = own.number("rope.freq_base", *THETA, default=10000.0)
    factors = rope_factors(own, tensors, "rope_freqs.weight", rotary_size // 2)
    kind = own.text("rope.scaling.type", "none")
    factor = own.number("rope.scaling.factor", 0.0, FACTOR[1], default=own.number("rope.scale_linear", 0, 1e4, 0.0))
    is_scaled = factor not in (0.0, 1.0)
    if kind == "none" and is_scaled and not own.has("rope.scaling.type"):
        kind = "linear"  # files older than the key carry only the factor
    if kind in ("linear", "yarn") and factors:
        raise unsupported(own, "rope.scaling.type", kind, "none beside rope_freqs.weight")
    match kind:
        case "none":
            return RopeSpec(theta, RopeKind.FACTORS, factors=factors) if factors else RopeSpec(theta)
        case "linear":
            return RopeSpec(theta, RopeKind.LINEAR, factor=factor) if is_scaled else RopeSpec(theta)
        case "yarn":
            if factor < 1.0:
                raise own.refuse("rope.scaling.factor", f"must be in 1..{FACTOR[1]:g} for yarn")
            inferred = 0.1 * math.log(factor) + 1.0
            return RopeSpec(
                theta,
                RopeKind.YARN,
                factor=factor,
                original_context_tokens=own.integer(
                    "rope.scaling.original_context_length", *LIMITS["context_tokens"], default=context_tokens
                ),
                attention_factor=inferred * own.number("rope.scaling.attn_factor", 1e-3, 100.0, default=1.0),
            )
        case _:
            raise unsupported(own, "rope.scaling.type", kind, "none, linear, yarn")
