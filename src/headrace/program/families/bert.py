"""BERT and its kin: post-norm encoder blocks with learned positions; one vector for each sequence comes out.

Covers BertModel (MiniLM, BGE, E5, GTE), RobertaModel, XLMRobertaModel and DistilBertModel, whose pooler is left aside,
and the masked-LM classes that the same files are often published as. GGUF's ``bert`` is read. Of the classes for
sequence classification (rerankers are such, with one class) and token classification the scores come out, before any
softmax or sigmoid.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypedDict

from headrace.program.builder import Builder
from headrace.program.families import encoder_heads
from headrace.program.families.checks import EPS, LIMITS, checked, unsupported
from headrace.program.families.config_json import activation
from headrace.program.families.gguf_metadata import Tensors, own_keys, spec_of_gguf
from headrace.program.families.source import Names, Role, Source
from headrace.program.ir import NONE, Part, Program
from headrace.program.keys import Keys
from headrace.program.model import Architecture, ModelSpec
from headrace.program.opcodes import Activation, Domain, Epilogue, Norm, Pooling

__all__ = ["NAME", "build", "sources", "spec_from_config", "spec_from_gguf"]

NAME = "bert"
_BERT = Names(
    "encoder.layer.{}.",
    {
        "embed": "embeddings.word_embeddings",
        "positions": "embeddings.position_embeddings",
        "types": "embeddings.token_type_embeddings",
        "embed_norm": "embeddings.LayerNorm",
    },
    {
        "q": "attention.self.query",
        "k": "attention.self.key",
        "v": "attention.self.value",
        "o": "attention.output.dense",
        "attention_norm": "attention.output.LayerNorm",
        "up": "intermediate.dense",
        "down": "output.dense",
        "mlp_norm": "output.LayerNorm",
    },
)
_DISTILBERT = Names(
    "transformer.layer.{}.",
    _BERT.top,
    {
        "q": "attention.q_lin",
        "k": "attention.k_lin",
        "v": "attention.v_lin",
        "o": "attention.out_lin",
        "attention_norm": "sa_layer_norm",
        "up": "ffn.lin1",
        "down": "ffn.lin2",
        "mlp_norm": "output_layer_norm",
    },
)
_GGUF = Names(
    "blk.{}.",
    {"embed": "token_embd", "positions": "position_embd", "types": "token_types", "embed_norm": "token_embd_norm"},
    {
        "q": "attn_q",
        "k": "attn_k",
        "v": "attn_v",
        "o": "attn_output",
        "attention_norm": "attn_output_norm",
        "up": "ffn_up",
        "down": "ffn_down",
        "mlp_norm": "layer_output_norm",
    },
)
# llama.cpp's numbers; where a file asks for no pooling, the mean is ours.
_GGUF_MEAN = 1
_GGUF_POOLINGS = {0: Pooling.MEAN, _GGUF_MEAN: Pooling.MEAN, 2: Pooling.FIRST, 3: Pooling.LAST}
# What each spells the sizes: layers, width, heads, MLP, activation, and the epsilon it assumes.
_KEYS = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "hidden_act")
_DISTILBERT_KEYS = ("n_layers", "dim", "n_heads", "hidden_dim", "activation")
# RoBERTa counts positions from the padding token's id on: the first token has position 2.
_ROBERTA_OFFSET = 2
# Where the classes with heads keep them: RoBERTa's, BERT's, DistilBERT's.
_HEADS = {
    "pooler": ("classifier.dense", "pooler.dense", "bert.pooler.dense", "pre_classifier"),
    "classifier": ("classifier.out_proj", "classifier"),
    "mask_dense": ("cls.predictions.transform.dense", "lm_head.dense", "vocab_transform"),
    "mask_norm": ("cls.predictions.transform.LayerNorm", "lm_head.layer_norm", "vocab_layer_norm"),
    "mask_head": (
        "cls.predictions",
        "cls.predictions.decoder",
        "lm_head",
        "lm_head.decoder",
        "vocab_projector",
    ),
}


class _NormWeights(TypedDict):
    norm_weight: int
    norm_bias: int


class _ProductWeights(TypedDict):
    weight: int
    bias: int


def spec_from_config(architecture: str, keys: Keys, generation: Keys) -> ModelSpec:
    """Returns the spec that a ``config.json`` describes.

    Raises:
        ModelFormatError: a value is of the wrong type, out of range, or contradicts another.
        ModelUnsupportedError: relative positions, a decoder, or an activation that no kernel has.
    """
    is_distilbert = architecture.startswith("DistilBert")
    is_roberta = "Roberta" in architecture
    if keys.text("position_embedding_type", "absolute") != "absolute":
        raise unsupported(keys, "position_embedding_type", keys.values["position_embedding_type"], "absolute")
    if keys.boolean("is_decoder", False):
        raise unsupported(keys, "is_decoder", True, "false")
    layers, size, heads_key, inner, act = _DISTILBERT_KEYS if is_distilbert else _KEYS
    width = keys.integer(size, *LIMITS["width"], default=768)
    heads = keys.integer(heads_key, *LIMITS["heads"], default=12)
    if width % heads:
        raise keys.refuse(size, f"must be a multiple of {heads_key} ({heads})")
    positions = keys.integer("max_position_embeddings", *LIMITS["context_tokens"], default=512)
    offset = _ROBERTA_OFFSET if is_roberta else 0
    if positions <= offset:
        raise keys.refuse("max_position_embeddings", f"must be above {offset}")
    if is_roberta and keys.integer("pad_token_id", 0, LIMITS["vocab_size"][1], default=1) != offset - 1:
        raise unsupported(keys, "pad_token_id", keys.values["pad_token_id"], str(offset - 1))
    spec = checked(
        keys.source,
        ModelSpec(
            family=NAME,
            architecture=Architecture.ENCODER_ONLY,
            layers=keys.integer(layers, *LIMITS["layers"], default=6 if is_distilbert else 12),
            width=width,
            heads=heads,
            kv_heads=heads,
            head_size=width // heads,
            hidden=keys.integer(inner, *LIMITS["hidden"], default=3072),
            vocab_size=keys.integer("vocab_size", *LIMITS["vocab_size"], default=30522),
            context_tokens=positions - offset,
            norm_eps=1e-12 if is_distilbert else keys.number("layer_norm_eps", *EPS, default=1e-12),
            rope=None,
            is_tied=True,
            activation=activation(keys, act, "gelu"),
            norm=Norm.LAYER,
            has_norm_bias=True,
            is_gated=False,
            has_learned_positions=True,
            has_attention_bias=True,
            has_output_bias=True,
            has_mlp_bias=True,
            position_offset=offset,
            token_types=0 if is_distilbert else keys.integer("type_vocab_size", 1, 1024, default=2),
            pooling=Pooling.MEAN,
        ),
    )
    return encoder_heads.with_head(spec, architecture, keys, Activation.GELU_ERF if is_roberta else None)


def spec_from_gguf(keys: Keys, tensors: Tensors) -> ModelSpec:
    """Returns the spec that GGUF metadata of architecture ``bert`` describes; raises as ``spec_of_gguf``.

    RoBERTa comes under this name too; the converter has cut its first rows of positions off.
    """
    own = own_keys(keys)
    if own.boolean("attention.causal", False):
        raise unsupported(own, "attention.causal", True, "false")
    spec = spec_of_gguf(NAME, keys, own, tensors, eps="attention.layer_norm_epsilon")
    pooling = own.integer("pooling_type", 0, 4, default=_GGUF_MEAN)
    if pooling not in _GGUF_POOLINGS:
        raise unsupported(own, "pooling_type", pooling, "none, mean, cls and last (0 to 3)")
    types = tensors.get("token_types.weight")
    return checked(
        keys.source,
        replace(
            spec,
            architecture=Architecture.ENCODER_ONLY,
            rope=None,
            norm=Norm.LAYER,
            has_norm_bias=True,
            activation=Activation.GELU_ERF,
            is_gated=False,
            has_learned_positions=True,
            has_attention_bias=True,
            has_output_bias=True,
            has_mlp_bias=True,
            token_types=0 if types is None else int(types.shape[0]),
            pooling=_GGUF_POOLINGS[pooling],
        ),
    )


def build(spec: ModelSpec) -> Program:
    """Returns the program of one step: 6 instructions per layer, then the pooling that the last norm goes into."""
    b = Builder(spec)
    table = b.matrix("embed", spec.width, Part("embed", spec.vocab_size))
    positions = b.matrix("positions", spec.width, Part("positions", spec.context_tokens + spec.position_offset))
    types = b.matrix("types", spec.width, Part("types", spec.token_types)) if spec.token_types else NONE
    x = b.embed("x", table, positions=positions, position_offset=spec.position_offset, types=types)
    norms = _norm(b, "embed_norm")
    for index in range(spec.layers):
        x = b.norm(f"layers.{index}.x", x, **norms, norm=Norm.LAYER)
        x, norms = _block(b, index, x)
    rows = b.norm(encoder_heads.ROWS, x, **norms, norm=Norm.LAYER)
    if not spec.labels:
        return encoder_heads.embed(b, rows, table)
    if spec.has_token_labels:
        return encoder_heads.classify(b, rows, Domain.ROWS)
    first = b.pool("first", rows, pooling=Pooling.FIRST)
    # DistilBERT, which has no token types, has ReLU.
    act = Activation.TANH if spec.token_types else Activation.RELU
    pooled = encoder_heads.product(b, "pooled", "pooler", first, spec.width, activation=act, domain=Domain.SEQUENCES)
    return encoder_heads.classify(b, pooled, Domain.SEQUENCES)


def _norm(b: Builder, role: str) -> _NormWeights:
    width = b.spec.width
    return {
        "norm_weight": b.vector(role, Part(role, width)),
        "norm_bias": b.vector(f"{role}_bias", Part(f"{role}_bias", width)),
    }


def _product(b: Builder, name: str, k: int, *sizes: tuple[str, int]) -> _ProductWeights:
    return {
        "weight": b.matrix(name, k, *(Part(role, n) for role, n in sizes)),
        "bias": b.vector(f"{name}_bias", *(Part(f"{role}_bias", n) for role, n in sizes)),
    }


def _block(b: Builder, index: int, x: int) -> tuple[int, _NormWeights]:
    """Adds one block to normed rows; returns its rows before their norm, and that norm."""
    spec, at = b.spec, f"layers.{index}"

    def product(name: str, k: int, *sizes: tuple[str, int]) -> _ProductWeights:
        return _product(b, f"{at}.{name}", k, *((f"{at}.{role}", n) for role, n in sizes))

    q = b.qkv(f"{at}.q", x, **product("qkv", spec.width, *((role, spec.width) for role in "qkv")), layer=index)
    mixed = b.attention(f"{at}.attention", q, layer=index)
    b.linear(f"{at}.o", mixed, **product("o", spec.width, ("o", spec.width)), epilogue=Epilogue.ADD, add_to=x)
    x = b.norm(f"{at}.middle", x, **_norm(b, f"{at}.attention_norm"), norm=Norm.LAYER)
    inner = b.linear(f"{at}.hidden", x, **product("up", spec.width, ("up", spec.hidden)), activation=spec.activation)
    b.linear(f"{at}.down", inner, **product("down", spec.hidden, ("down", spec.width)), epilogue=Epilogue.ADD, add_to=x)
    return x, _norm(b, f"{at}.mlp_norm")


def sources(spec: ModelSpec, role: str, kind: str) -> tuple[Source, ...]:
    """Returns where a file may keep a role: with the model's own prefix, or without; DistilBERT's names last."""
    at = Role.of(role)
    prefixes = ("", "bert.", "roberta.", "distilbert.")
    if at.name in _HEADS:
        return encoder_heads.head_sources(_HEADS, role)
    if at.name not in (_BERT.top if at.layer < 0 else _BERT.layer):
        return ()
    if kind == "gguf":
        return (_GGUF.source(role),)
    plain = [_BERT.source(role), _DISTILBERT.source(role)]
    return tuple(replace(source, name=f"{prefix}{source.name}") for source in plain for prefix in prefixes)
