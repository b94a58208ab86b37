"""What the families' config.json files have in common: sizes, token ids, activation, kinds of layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from headrace.program.families.checks import EPS, LIMITS, unsupported
from headrace.program.families.config_rope import rope_from_config
from headrace.program.keys import Keys
from headrace.program.model import Architecture, ModelSpec
from headrace.program.opcodes import Activation


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
    eps_key: str = "rms_norm_eps"
    norm_eps: float = 1e-6
    partial_rotary_factor: float = 1.0
    activation: str = "silu"
    is_tied: bool = False
    bos_token_ids: tuple[int, ...] = (1,)
    eos_token_ids: tuple[int, ...] = (2,)


def spec_of_config(
    family: str, keys: Keys, generation: Keys, defaults: Defaults, *, has_partial_rotation: bool = False
) -> ModelSpec:
    """Returns the shape that the keys of Llama's kind describe; a family replaces what is its own, and checks.

    Args:
        has_partial_rotation: whether the family reads ``partial_rotary_factor``; for others it must be 1.

    Raises:
        ModelFormatError: a value is of the wrong type or out of range.
        ModelUnsupportedError: an activation or rotary embedding that no kernel has.
    """
    width = keys.integer("hidden_size", *LIMITS["width"], default=defaults.width)
    heads = keys.integer("num_attention_heads", *LIMITS["heads"], default=defaults.heads)
    kv_heads = heads if defaults.kv_heads is None else defaults.kv_heads
    head_size = width // heads if defaults.head_size is None else defaults.head_size
    context_tokens = keys.integer("max_position_embeddings", *LIMITS["context_tokens"], default=defaults.context_tokens)
    head_size = keys.integer("head_dim", *LIMITS["head_size"], default=head_size)
    turning = rotary_size(keys, head_size, defaults.partial_rotary_factor)
    if turning != head_size and not has_partial_rotation:
        raise unsupported(keys, "partial_rotary_factor", f"{turning} of {head_size}", "1.0")
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
        head_size=head_size,
        hidden=keys.integer("intermediate_size", *LIMITS["hidden"], default=defaults.hidden),
        vocab_size=vocab_size,
        context_tokens=context_tokens,
        norm_eps=keys.number(defaults.eps_key, *EPS, default=defaults.norm_eps),
        rope=rope_from_config(keys, context_tokens, defaults.theta),
        is_tied=keys.boolean("tie_word_embeddings", defaults.is_tied),
        bos_token_id=begin[0] if begin else None,
        eos_token_ids=tuple(dict.fromkeys(ends)),
        activation=activation(keys, "hidden_act", defaults.activation),
        rotary_size=0 if turning == head_size else turning,
    )


def token_ids(keys: Keys, key: str, vocab_size: int, default: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the ids under ``key``; a missing key gives the default as far as the vocabulary has it, null gives ()."""
    if key not in keys.values:
        return tuple(token_id for token_id in default if token_id < vocab_size)
    return keys.integers(key, 0, vocab_size - 1, most=64)


def text_half(keys: Keys) -> Keys:
    """Returns the keys of the language model inside a model that also sees."""
    text = keys.mapping("text_config")
    if text is None:
        raise keys.refuse("text_config", "must be an object")
    shared = ("bos_token_id", "eos_token_id", "tie_word_embeddings")
    values = {**text.values, **{key: keys.values[key] for key in shared if key in keys.values}}
    return Keys(keys.source, values, text.prefix)


ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU_ERF,
    "gelu_new": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "relu": Activation.RELU,
}
"""By the names of transformers."""


def activation(keys: Keys, key: str, default: str) -> Activation:
    """Returns the activation under ``key``."""
    name = keys.text(key, default)
    if (found := ACTIVATIONS.get(name)) is None:
        raise unsupported(keys, key, name, ", ".join(ACTIVATIONS))
    return found


def rotary_size(keys: Keys, head_size: int, default: float) -> int:
    """Returns how many elements of a head turn: ``partial_rotary_factor``, in either spelling, of the head."""
    for found in (keys.mapping("rope_scaling"), keys.mapping("rope_parameters"), keys):
        if found is not None and found.has("partial_rotary_factor"):
            return int(head_size * found.number("partial_rotary_factor", 0.0, 1.0))
    return int(head_size * default)


def sliding_layers(keys: Keys, layers: int) -> tuple[bool, ...] | None:
    """Returns which layers see a window only, by ``layer_types``; None where the key is missing."""
    kinds = keys.sequence("layer_types", layers)
    if kinds is None:
        return None
    names = [kind.text("") for kind in kinds]
    for kind, name in zip(kinds, names, strict=True):
        if name not in ("sliding_attention", "full_attention"):
            raise unsupported(kind, "", name, "sliding_attention and full_attention")
    return tuple(name == "sliding_attention" for name in names)


def with_windows(spec: ModelSpec, is_sliding: Sequence[bool], window: int) -> ModelSpec:
    """Returns the spec with a window on some layers, the others seeing everything; 0, or the context, is none."""
    if not window or window >= spec.context_tokens or not any(is_sliding):
        return spec
    if all(is_sliding):
        per_layer = tuple(replace(layer, window=window) for layer in spec.per_layer)
        return replace(spec, window=window, per_layer=per_layer)
    return replace(
        spec,
        per_layer=tuple(
            replace(spec.layer(index), window=window if slides else 0) for index, slides in enumerate(is_sliding)
        ),
    )


def optional_window(keys: Keys) -> int:
    """Returns ``sliding_window``, 0 where it is missing or null."""
    return keys.integer("sliding_window", *LIMITS["window"]) if keys.has("sliding_window") else 0
