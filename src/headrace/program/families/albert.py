"""ALBERT: BERT's post-norm block, one set of weights for all layers, and an embedding narrower than the blocks.

Covers AlbertModel, whose pooler is left aside, the masked-LM class that the same files are published as, and the
classes for sequence and token classification.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from headrace.base.errors import ModelUnsupportedError
from headrace.program.builder import Builder
from headrace.program.families import encoder_heads
from headrace.program.families.checks import EPS, HINT, LIMITS, checked, unsupported
from headrace.program.families.config_json import activation
from headrace.program.families.gguf_metadata import Tensors
from headrace.program.families.source import Names, Role, Source
from headrace.program.ir import Part, Program
from headrace.program.keys import Keys
from headrace.program.model import Architecture, ModelSpec
from headrace.program.opcodes import Activation, Domain, Epilogue, Norm, Pooling

__all__ = ["NAME", "build", "sources", "spec_from_config", "spec_from_gguf"]

NAME = "albert"
_NAMES = Names(
    "encoder.albert_layer_groups.{}.albert_layers.0.",
    {
        "embed": "embeddings.word_embeddings",
        "positions": "embeddings.position_embeddings",
        "types": "embeddings.token_type_embeddings",
        "embed_norm": "embeddings.LayerNorm",
        "widen": "encoder.embedding_hidden_mapping_in",
    },
    {
        "q": "attention.query",
        "k": "attention.key",
        "v": "attention.value",
        "o": "attention.dense",
        "attention_norm": "attention.LayerNorm",
        "up": "ffn",
        "down": "ffn_output",
        "mlp_norm": "full_layer_layer_norm",
    },
)
_HEADS = {
    "pooler": ("albert.pooler", "pooler"),
    "classifier": ("classifier",),
    "mask_dense": ("predictions.dense",),
    "mask_norm": ("predictions.LayerNorm",),
    "mask_head": ("predictions", "predictions.decoder"),
}


def spec_from_config(architecture: str, keys: Keys, generation: Keys) -> ModelSpec:
    """Returns the spec that a ``config.json`` describes.

    Raises:
        ModelFormatError: a value is of the wrong type, out of range, or contradicts another.
        ModelUnsupportedError: several sets of weights, relative positions, or an activation that no kernel has.
    """
    for key in ("num_hidden_groups", "inner_group_num"):
        if (count := keys.integer(key, 1, LIMITS["layers"][1], default=1)) != 1:
            raise unsupported(keys, key, count, "1")
    if keys.text("position_embedding_type", "absolute") != "absolute":
        raise unsupported(keys, "position_embedding_type", keys.values["position_embedding_type"], "absolute")
    width = keys.integer("hidden_size", *LIMITS["width"], default=4096)
    heads = keys.integer("num_attention_heads", *LIMITS["heads"], default=64)
    if width % heads:
        raise keys.refuse("hidden_size", f"must be a multiple of num_attention_heads ({heads})")
    embed_width = keys.integer("embedding_size", *LIMITS["width"], default=128)
    if embed_width % 32:
        raise unsupported(keys, "embedding_size", embed_width, "multiples of 32")
    spec = checked(
        keys.source,
        ModelSpec(
            family=NAME,
            architecture=Architecture.ENCODER_ONLY,
            layers=keys.integer("num_hidden_layers", *LIMITS["layers"], default=12),
            width=width,
            heads=heads,
            kv_heads=heads,
            head_size=width // heads,
            hidden=keys.integer("intermediate_size", *LIMITS["hidden"], default=16384),
            vocab_size=keys.integer("vocab_size", *LIMITS["vocab_size"], default=30000),
            context_tokens=keys.integer("max_position_embeddings", *LIMITS["context_tokens"], default=512),
            norm_eps=keys.number("layer_norm_eps", *EPS, default=1e-12),
            rope=None,
            is_tied=True,
            norm=Norm.LAYER,
            has_norm_bias=True,
            is_gated=False,
            activation=activation(keys, "hidden_act", "gelu_new"),
            has_learned_positions=True,
            has_attention_bias=True,
            has_output_bias=True,
            has_mlp_bias=True,
            embed_width=embed_width,
            token_types=keys.integer("type_vocab_size", 1, 1024, default=2),
            pooling=Pooling.MEAN,
        ),
    )
    return encoder_heads.with_head(spec, architecture, keys)


def spec_from_gguf(keys: Keys, tensors: Tensors) -> ModelSpec:
    """Refuses: GGUF encoders are not read."""
    raise ModelUnsupportedError(
        f"{keys.source}: encoders in GGUF are not read yet: use the model's safetensors folder", hint=HINT
    )


@dataclass(frozen=True, slots=True)
class _Weights:
    """Indices of the one layer's weights: products with their biases, and norms as (weight, bias)."""

    qkv: tuple[int, int]
    o: tuple[int, int]
    up: tuple[int, int]
    down: tuple[int, int]
    attention_norm: tuple[int, int]
    mlp_norm: tuple[int, int]


def build(spec: ModelSpec) -> Program:
    """Returns the program of one step: 6 instructions per layer, all of which name the same weights."""
    b = Builder(spec)
    narrow = spec.embed_width
    tables = {
        "table": b.matrix("embed", narrow, Part("embed", spec.vocab_size)),
        "positions": b.matrix("positions", narrow, Part("positions", spec.context_tokens)),
        "types": b.matrix("types", narrow, Part("types", spec.token_types)),
    }
    rows = b.embed("rows", **tables)
    weight, bias = _product(b, "widen", narrow, ("widen", spec.width))
    norm_weight, norm_bias = _norm(b, "embed_norm", narrow)
    x = b.linear("x", rows, weight, bias=bias, norm_weight=norm_weight, norm_bias=norm_bias, norm=Norm.LAYER)
    at = "layers.0"
    weights = _Weights(
        qkv=_product(b, f"{at}.qkv", spec.width, *((f"{at}.{name}", spec.width) for name in "qkv")),
        o=_product(b, f"{at}.o", spec.width, (f"{at}.o", spec.width)),
        up=_product(b, f"{at}.up", spec.width, (f"{at}.up", spec.hidden)),
        down=_product(b, f"{at}.down", spec.hidden, (f"{at}.down", spec.width)),
        attention_norm=_norm(b, f"{at}.attention_norm", spec.width),
        mlp_norm=_norm(b, f"{at}.mlp_norm", spec.width),
    )
    for index in range(spec.layers):
        x = _layer(b, index, x, weights, is_last=index == spec.layers - 1)
    norm_weight, norm_bias = weights.mlp_norm
    rows = b.norm(encoder_heads.ROWS, x, norm_weight=norm_weight, norm_bias=norm_bias, norm=Norm.LAYER)
    if not spec.labels:
        return encoder_heads.embed(b, rows, tables["table"])
    if spec.has_token_labels:
        return encoder_heads.classify(b, rows, Domain.ROWS)
    first = b.pool("first", rows, pooling=Pooling.FIRST)
    domain = Domain.SEQUENCES
    pooled = encoder_heads.product(b, "pooled", "pooler", first, spec.width, activation=Activation.TANH, domain=domain)
    return encoder_heads.classify(b, pooled, domain)


def _layer(b: Builder, index: int, x: int, weights: _Weights, *, is_last: bool) -> int:
    """Adds one block to normed rows; returns its rows, before their norm if it is the last one."""
    at = f"layers.{index}"
    q = b.qkv(f"{at}.q", x, weights.qkv[0], bias=weights.qkv[1], layer=index)
    mixed = b.attention(f"{at}.attention", q, layer=index)
    b.linear(f"{at}.o", mixed, weights.o[0], bias=weights.o[1], epilogue=Epilogue.ADD, add_to=x)
    norm_weight, norm_bias = weights.attention_norm
    x = b.norm(f"{at}.middle", x, norm_weight=norm_weight, norm_bias=norm_bias, norm=Norm.LAYER)
    inner = b.linear(f"{at}.hidden", x, weights.up[0], bias=weights.up[1], activation=b.spec.activation)
    b.linear(f"{at}.down", inner, weights.down[0], bias=weights.down[1], epilogue=Epilogue.ADD, add_to=x)
    if is_last:
        return x
    norm_weight, norm_bias = weights.mlp_norm
    return b.norm(f"{at}.out", x, norm_weight=norm_weight, norm_bias=norm_bias, norm=Norm.LAYER)


def _product(b: Builder, name: str, k: int, *sizes: tuple[str, int]) -> tuple[int, int]:
    return (
        b.matrix(name, k, *(Part(role, n) for role, n in sizes)),
        b.vector(f"{name}_bias", *(Part(f"{role}_bias", n) for role, n in sizes)),
    )


def _norm(b: Builder, role: str, width: int) -> tuple[int, int]:
    return b.vector(role, Part(role, width)), b.vector(f"{role}_bias", Part(f"{role}_bias", width))


def sources(spec: ModelSpec, role: str, kind: str) -> tuple[Source, ...]:
    """Returns where a file may keep a role: with the model's own prefix, or without."""
    at = Role.of(role)
    if at.name in _HEADS:
        return encoder_heads.head_sources(_HEADS, role)
    if at.name not in (_NAMES.top if at.layer < 0 else _NAMES.layer):
        return ()
    source = _NAMES.source(role)
    return (source, replace(source, name=f"albert.{source.name}"))
