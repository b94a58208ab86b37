"""Granite 3: Llama with four multipliers: of the embedding, the scores, what a block adds, and the logits.

The multiplier m of what is added needs no instruction. Every block reads the residual stream through a norm, which no
factor changes: with the stream kept as x/m, x + m·f(norm(x)) is x/m + f(norm(x/m)), where the norm's epsilon is divided
by m². So the embedding is scaled by 1/m more, and that is all.
"""

from __future__ import annotations

from dataclasses import replace

from headrace.program.families.checks import checked
from headrace.program.families.config_json import Defaults, spec_of_config
from headrace.program.families.decoder import build
from headrace.program.families.gguf_metadata import Tensors, own_keys, spec_of_gguf
from headrace.program.families.llama import sources
from headrace.program.keys import Keys
from headrace.program.model import ModelSpec

__all__ = ["NAME", "build", "sources", "spec_from_config", "spec_from_gguf"]

NAME = "granite"
_FACTOR = (1e-3, 1e4)


def spec_from_config(architecture: str, keys: Keys, generation: Keys) -> ModelSpec:
    """Returns the spec that a ``config.json`` describes; raises as ``spec_of_config``."""
    spec = spec_of_config(NAME, keys, generation, Defaults())
    has_bias = keys.boolean("attention_bias", False)
    spec = replace(
        spec,
        has_attention_bias=has_bias,
        has_output_bias=has_bias,
        has_mlp_bias=keys.boolean("mlp_bias", False),
        attention_scale=keys.number("attention_multiplier", *_FACTOR, default=1.0),
        logit_scale=1 / keys.number("logits_scaling", *_FACTOR, default=1.0),
    )
    embedding = keys.number("embedding_multiplier", *_FACTOR, default=1.0)
    return checked(
        keys.source, _with_residual(spec, embedding, keys.number("residual_multiplier", *_FACTOR, default=1.0))
    )


def _with_residual(spec: ModelSpec, embedding: float, residual: float) -> ModelSpec:
    return replace(spec, embed_scale=embedding / residual, norm_eps=spec.norm_eps / residual**2)


def spec_from_gguf(keys: Keys, tensors: Tensors) -> ModelSpec:
    """Returns the spec that GGUF metadata of architecture ``granite`` describes; raises as ``spec_of_gguf``."""
    own = own_keys(keys)
    spec = spec_of_gguf(NAME, keys, own, tensors)
    spec = replace(
        spec,
        attention_scale=own.number("attention.scale", *_FACTOR, default=spec.head_size**-0.5),
        logit_scale=1 / own.number("logit_scale", *_FACTOR),
    )
    embedding = own.number("embedding_scale", *_FACTOR, default=1.0)
    return checked(keys.source, _with_residual(spec, embedding, own.number("residual_scale", *_FACTOR, default=1.0)))
