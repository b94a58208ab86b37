"""GPT-2: learned positions, LayerNorm, a plain GELU MLP, q, k and v in one tensor; GGUF's ``gpt2``.

Files of transformers store the projections as [in, out] (Conv1D), and their names with or without ``transformer.``.
"""

from __future__ import annotations

from dataclasses import replace

from headrace.program.families.checks import EPS, LIMITS, checked, unsupported
from headrace.program.families.config_json import activation, token_ids
from headrace.program.families.decoder import build
from headrace.program.families.gguf_metadata import Tensors, own_keys, spec_of_gguf
from headrace.program.families.source import Names, Role, Source, gguf_source
from headrace.program.keys import Keys
from headrace.program.model import Architecture, ModelSpec
from headrace.program.opcodes import Activation, Norm

__all__ = ["NAME", "build", "sources", "spec_from_config", "spec_from_gguf"]

NAME = "gpt2"
_NAMES = Names(
    "h.{}.",
    {"embed": "wte", "positions": "wpe", "final_norm": "ln_f", "head": "lm_head"},
    {
        "attention_norm": "ln_1",
        "q": "attn.c_attn",
        "k": "attn.c_attn",
        "v": "attn.c_attn",
        "o": "attn.c_proj",
        "mlp_norm": "ln_2",
        "up": "mlp.c_fc",
        "down": "mlp.c_proj",
    },
)
_CONV1D = ("q", "k", "v", "o", "up", "down")


def spec_from_config(architecture: str, keys: Keys, generation: Keys) -> ModelSpec:
    """Returns the spec that a ``config.json`` describes.

    Raises:
        ModelFormatError: a value is of the wrong type or out of range.
        ModelUnsupportedError: a variant of attention that GPT-2 itself does not use.
    """
    for key, usual in (
        ("scale_attn_weights", True),
        ("scale_attn_by_inverse_layer_idx", False),
        ("add_cross_attention", False),
    ):
        if keys.boolean(key, usual) is not usual:
            raise unsupported(keys, key, not usual, str(usual).lower())
    width = keys.integer("n_embd", *LIMITS["width"], default=768)
    heads = keys.integer("n_head", *LIMITS["heads"], default=12)
    vocab_size = keys.integer("vocab_size", *LIMITS["vocab_size"], default=50257)
    begin = token_ids(keys, "bos_token_id", vocab_size, (50256,))
    ends = (
        *token_ids(keys, "eos_token_id", vocab_size, (50256,)),
        *token_ids(generation, "eos_token_id", vocab_size, ()),
    )
    if width % heads:
        raise keys.refuse("n_embd", f"must be a multiple of n_head ({heads})")
    return checked(
        keys.source,
        _with_block(
            ModelSpec(
                family=NAME,
                architecture=Architecture.DECODER_ONLY,
                layers=keys.integer("n_layer", *LIMITS["layers"], default=12),
                width=width,
                heads=heads,
                kv_heads=heads,
                head_size=width // heads,
                hidden=keys.integer("n_inner", *LIMITS["hidden"], default=4 * width),
                vocab_size=vocab_size,
                context_tokens=keys.integer("n_positions", *LIMITS["context_tokens"], default=1024),
                norm_eps=keys.number("layer_norm_epsilon", *EPS, default=1e-5),
                rope=None,
                is_tied=keys.boolean("tie_word_embeddings", True),
                bos_token_id=begin[0] if begin else None,
                eos_token_ids=tuple(dict.fromkeys(ends)),
                activation=activation(keys, "activation_function", "gelu_new"),
            )
        ),
    )


def _with_block(spec: ModelSpec) -> ModelSpec:
    return replace(
        spec,
        rope=None,
        norm=Norm.LAYER,
        has_norm_bias=True,
        is_gated=False,
        has_learned_positions=True,
        has_attention_bias=True,
        has_output_bias=True,
        has_mlp_bias=True,
    )


def spec_from_gguf(keys: Keys, tensors: Tensors) -> ModelSpec:
    """Returns the spec that GGUF metadata of architecture ``gpt2`` describes; raises as ``spec_of_gguf``."""
    spec = spec_of_gguf(NAME, keys, own_keys(keys), tensors, eps="attention.layer_norm_epsilon")
    return checked(keys.source, replace(_with_block(spec), activation=Activation.GELU_TANH))


def sources(spec: ModelSpec, role: str, kind: str) -> tuple[Source, ...]:
    """Returns where a file of ``kind`` may keep a role."""
    at = Role.of(role)
    if kind == "gguf":
        suffix = "bias" if at.is_bias else "weight"
        found = [Source(f"blk.{at.layer}.attn_qkv.{suffix}") if at.name in ("q", "k", "v") else gguf_source(role)]
    else:
        plain = _NAMES.source(role)
        if at.name in _CONV1D and not at.is_bias:
            plain = replace(plain, is_transposed=True)
        # lm_head stands beside the transformer, not in it.
        found = [plain] if at.name == "head" else [replace(plain, name=f"transformer.{plain.name}"), plain]
    if at.name in ("q", "k", "v"):
        found = [source.part("qkv".index(at.name) * spec.width, 3 * spec.width) for source in found]
    return tuple(found)
