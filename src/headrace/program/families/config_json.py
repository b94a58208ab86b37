"""What the families' config.json files have in common: sizes, token ids, activation, kinds of layers."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.program.families.checks import EPS, LIMITS, unsupported
from headrace.program.families.config_rope import rope_from_config
from headrace.program.keys import Keys
from headrace.program.model import Architecture, ModelSpec


@dataclass(frozen=True, slots=True)
class Defaults:
    """What transformers assumes where config.json is silent. None: derived (kv heads = heads, head = width ÷ heads)."""

    width: int = 4096
    layers: int = 32
    heads: int = 32
    kv_heads: int | None = None
    head_size: int | None = None
    hidden: int = 11008
    vocab_size: int = 32000
    context_tokens: int = 2048
    theta: float = 10000.0
    is_tied: bool = False
    bos_token_ids: tuple[int, ...] = (1,)
    eos_token_ids: tuple[int, ...] = (2,)


def spec_of_config(family: str, keys: Keys, generation: Keys, defaults: Defaults) -> ModelSpec:
    """Returns the shape that the keys of Llama's kind describe; a family replaces what is its own, and checks.

    Raises:
        ModelFormatError: a value is of the wrong type or out of range.
        ModelUnsupportedError: an activation or rotary embedding that no kernel has.
    """
    width = keys.integer("hidden_size", *LIMITS["width"], default=defaults.width)
    heads = keys.integer("num_attention_heads", *LIMITS["heads"], default=defaults.heads)
    kv_heads = heads if defaults.kv_heads is None else defaults.kv_heads
    head_size = width // heads if defaults.head_size is None else defaults.head_size
    context_tokens = keys.integer("max_position_embeddings", *LIMITS["context_tokens"], default=defaults.context_tokens)
    vocab_size = keys.integer("vocab_size", *LIMITS["vocab_size"], default=defaults.vocab_size)
    ends = (
        *token_ids(keys, "eos_token_id", vocab_size, defaults.eos_token_ids),
        *token_ids(generation, "eos_token_id", vocab_size, ()),
    )
    begin = token_ids(keys, "bos_token_id", vocab_size, defaults.bos_token_ids)
    return ModelSpec(
        family=family,
        architecture=Architecture.DECODER_ONLY,
        layers=keys.integer("num_hidden_layers", *LIMITS["layers"], default=defaults.layers),
        width=width,
        heads=heads,
        kv_heads=keys.integer("num_key_value_heads", *LIMITS["heads"], default=kv_heads),
        head_size=keys.integer("head_dim", *LIMITS["head_size"], default=head_size),
        hidden=keys.integer("intermediate_size", *LIMITS["hidden"], default=defaults.hidden),
        vocab_size=vocab_size,
        context_tokens=context_tokens,
        norm_eps=keys.number("rms_norm_eps", *EPS, default=1e-6),
        rope=rope_from_config(keys, context_tokens, defaults.theta),
        is_tied=keys.boolean("tie_word_embeddings", defaults.is_tied),
        bos_token_id=begin[0] if begin else None,
        eos_token_ids=tuple(dict.fromkeys(ends)),
    )


def token_ids(keys: Keys, key: str, vocab_size: int, default: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the ids under ``key``; a missing key gives the default as far as the vocabulary has it, null gives ()."""
    if key not in keys.values:
        return tuple(token_id for token_id in default if token_id < vocab_size)
    return keys.integers(key, 0, vocab_size - 1, most=64)


def require_silu(keys: Keys, key: str = "hidden_act") -> None:
    """Refuses every activation but SiLU."""
    activation = keys.text(key, "silu")
    if activation not in ("silu", "swish"):
        raise unsupported(keys, key, activation, "silu")


def require_whole_rotation(keys: Keys) -> None:
    """Refuses a rotary embedding of a part of the head."""
    for found in (keys, keys.mapping("rope_scaling"), keys.mapping("rope_parameters")):
        if found is not None and found.number("partial_rotary_factor", 0.0, 1.0, default=1.0) != 1.0:
            raise unsupported(found, "partial_rotary_factor", found.values["partial_rotary_factor"], "1.0")
