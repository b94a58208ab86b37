"""ModernBERT: pre-norm encoder blocks with rotary positions, a gated MLP, and windows on two of three layers.

Covers ModernBertModel (GTE, Nomic and others), the masked-LM class that the same files are published as, and the
classes for sequence and token classification. Norms have a weight and, as a rule, no bias; the first block reads the
normed embedding as it is.
"""

from __future__ import annotations

from dataclasses import replace

from headrace.base.errors import ModelUnsupportedError
from headrace.program.builder import Builder
from headrace.program.families import encoder_heads
from headrace.program.families.checks import EPS, HINT, LIMITS, THETA, checked, unsupported
from headrace.program.families.config_json import activation, sliding_layers
from headrace.program.families.config_rope import rope_from_parameters
from headrace.program.families.decoder import Block, norm_of, rotary_tables
from headrace.program.families.gguf_metadata import Tensors
from headrace.program.families.source import Names, Role, Source
from headrace.program.ir import Part, Program
from headrace.program.keys import Keys
from headrace.program.model import Architecture, ModelSpec, RopeSpec
from headrace.program.opcodes import Domain, Norm, Pooling

__all__ = ["NAME", "build", "sources", "spec_from_config", "spec_from_gguf"]

NAME = "modernbert"
_GLOBAL_THETA, _LOCAL_THETA = 160000.0, 10000.0
_NAMES = Names(
    "layers.{}.",
    {"embed": "embeddings.tok_embeddings", "embed_norm": "embeddings.norm", "final_norm": "final_norm"},
    {
        "attention_norm": "attn_norm",
        "q": "attn.Wqkv",
        "k": "attn.Wqkv",
        "v": "attn.Wqkv",
        "o": "attn.Wo",
        "mlp_norm": "mlp_norm",
        "gate": "mlp.Wi",
        "up": "mlp.Wi",
        "down": "mlp.Wo",
    },
)
_HEADS = {
    "classifier": ("classifier",),
    "mask_dense": ("head.dense",),
    "mask_norm": ("head.norm",),
    "mask_head": ("decoder",),
}


def spec_from_config(architecture: str, keys: Keys, generation: Keys) -> ModelSpec:
    """Returns the spec that a ``config.json`` describes.

    Raises:
        ModelFormatError: a value is of the wrong type, out of range, or contradicts another.
        ModelUnsupportedError: a variant that no kernel has.
    """
    width = keys.integer("hidden_size", *LIMITS["width"], default=768)
    heads = keys.integer("num_attention_heads", *LIMITS["heads"], default=12)
    if width % heads:
        raise keys.refuse("hidden_size", f"must be a multiple of num_attention_heads ({heads})")
    layers = keys.integer("num_hidden_layers", *LIMITS["layers"], default=22)
    context_tokens = keys.integer("max_position_embeddings", *LIMITS["context_tokens"], default=8192)
    widest, local = _ropes(keys, context_tokens)
    every = keys.integer("global_attn_every_n_layers", 1, LIMITS["layers"][1], default=3)
    is_sliding = sliding_layers(keys, layers) or [index % every != 0 for index in range(layers)]
    window = keys.integer("local_attention", 2, LIMITS["window"][1], default=128) // 2  # so many on each side
    has_bias = keys.boolean("attention_bias", False)
    pooling = keys.text("classifier_pooling", "cls")
    if pooling not in ("cls", "mean"):
        raise unsupported(keys, "classifier_pooling", pooling, "cls and mean")
    spec = ModelSpec(
        family=NAME,
        architecture=Architecture.ENCODER_ONLY,
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=heads,
        head_size=width // heads,
        hidden=keys.integer("intermediate_size", *LIMITS["hidden"], default=1152),
        vocab_size=keys.integer("vocab_size", *LIMITS["vocab_size"], default=50368),
        context_tokens=context_tokens,
        norm_eps=keys.number("norm_eps", *EPS, default=1e-5),
        rope=widest,
        is_tied=True,
        norm=Norm.LAYER,
        has_norm_bias=keys.boolean("norm_bias", False),
        activation=activation(keys, "hidden_activation", "gelu"),
        has_attention_bias=has_bias,
        has_output_bias=has_bias,
        has_mlp_bias=keys.boolean("mlp_bias", False),
        has_head_bias=keys.boolean("classifier_bias", False),
        pooling=Pooling.FIRST if pooling == "cls" else Pooling.MEAN,
    )
    plain = spec.layer(0)
    spec = encoder_heads.with_head(spec, architecture, keys, activation(keys, "classifier_activation", "gelu"))
    near = replace(plain, window=window if window < context_tokens else 0, rope=local)
    return checked(keys.source, replace(spec, per_layer=tuple(near if slides else plain for slides in is_sliding)))


def _ropes(keys: Keys, context_tokens: int) -> tuple[RopeSpec, RopeSpec]:
    """Returns the rotary specs of the layers that see everything and of the others, in either spelling."""
    nested = keys.mapping("rope_parameters") or Keys(keys.source, {})
    scaling = keys.mapping("rope_scaling")
    bases = (
        ("full_attention", "global_rope_theta", _GLOBAL_THETA),
        ("sliding_attention", "local_rope_theta", _LOCAL_THETA),
    )
    widest, local = (
        rope_from_parameters(
            keys, scaling or nested.mapping(kind), keys.number(key, *THETA, default=default), context_tokens
        )
        for kind, key, default in bases
    )
    return widest, local


def spec_from_gguf(keys: Keys, tensors: Tensors) -> ModelSpec:
    """Refuses: GGUF encoders are not read."""
    raise ModelUnsupportedError(
        f"{keys.source}: encoders in GGUF are not read yet: use the model's safetensors folder", hint=HINT
    )


def build(spec: ModelSpec) -> Program:
    """Returns the program of one step: 5 instructions per layer, then the pooling that the last norm goes into."""
    b = Builder(spec)
    table = b.matrix("embed", spec.width, Part("embed", spec.vocab_size))
    ropes = rotary_tables(b)
    rows = b.embed("rows", table)
    x = b.norm("x", rows, **norm_of(b, "embed_norm"), norm=Norm.LAYER)
    for index in range(spec.layers):
        Block(b, index, x).add(ropes[index], is_normed=index > 0)
    rows = b.norm(encoder_heads.ROWS, x, **norm_of(b, "final_norm"), norm=Norm.LAYER)
    if not spec.labels:
        return encoder_heads.embed(b, rows, table)
    domain = Domain.ROWS if spec.has_token_labels else Domain.SEQUENCES
    if domain is Domain.SEQUENCES:
        rows = b.pool("pooled", rows, pooling=spec.pooling)
    inner = encoder_heads.product(
        b,
        "inner",
        "mask_dense",
        rows,
        spec.width,
        has_bias=spec.has_head_bias,
        activation=spec.head_activation,
        domain=domain,
    )
    return encoder_heads.classify(
        b, b.norm("head", inner, **norm_of(b, "mask_norm"), norm=Norm.LAYER, domain=domain), domain
    )


def sources(spec: ModelSpec, role: str, kind: str) -> tuple[Source, ...]:
    """Returns where a file may keep a role: fused tensors are q, k, v and gate, up from top to bottom."""
    at = Role.of(role)
    if at.name in _HEADS:
        return encoder_heads.head_sources(_HEADS, role)
    if at.name not in (_NAMES.top if at.layer < 0 else _NAMES.layer):
        return ()
    source = _NAMES.source(role)
    if at.name in ("q", "k", "v"):
        source = source.part("qkv".index(at.name) * spec.width, 3 * spec.width)
    elif at.name in ("gate", "up"):
        source = source.part(0 if at.name == "gate" else spec.hidden, 2 * spec.hidden)
    return (source, replace(source, name=f"model.{source.name}"))
