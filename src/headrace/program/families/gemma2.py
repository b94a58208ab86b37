"""Gemma 2: norms before and after attention and MLP, soft caps, every other layer with a window; GGUF's ``gemma2``.

Files of transformers store a norm's weight less one; GGUF files store it whole. The embedding is multiplied by √width
in f32, as transformers does in fp32 and llama.cpp always; transformers in bf16 rounds the factor to bf16.
"""

from __future__ import annotations

import math
from dataclasses import replace

from headrace.program.families.checks import checked, unsupported
from headrace.program.families.config_json import (
    Defaults,
    activation,
    optional_window,
    sliding_layers,
    spec_of_config,
    with_windows,
)
from headrace.program.families.decoder import build
from headrace.program.families.gguf_metadata import Tensors, own_keys, spec_of_gguf
from headrace.program.families.gguf_metadata import optional_window as optional_gguf_window
from headrace.program.families.source import HF_NAMES, Source, gguf_source
from headrace.program.keys import Keys
from headrace.program.model import ModelSpec
from headrace.program.opcodes import Activation

__all__ = ["NAME", "build", "sources", "spec_from_config", "spec_from_gguf"]

NAME = "gemma2"
SCALAR = (1.0, 2.0**20)
CAP = (1e-3, 1e6)
DEFAULTS = Defaults(
    width=2304,
    layers=26,
    heads=8,
    kv_heads=4,
    head_size=256,
    hidden=9216,
    vocab_size=256000,
    context_tokens=8192,
    is_tied=True,
    bos_token_ids=(2,),
    eos_token_ids=(1,),
)
_LAYERS_OF_27B = 46
_NAMES = HF_NAMES.but(
    attention_out_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_out_norm="post_feedforward_layernorm",
)


def spec_from_config(architecture: str, keys: Keys, generation: Keys) -> ModelSpec:
    """Returns the spec that a ``config.json`` describes; raises as ``spec_of_config``."""
    spec = gemma_spec(NAME, keys, generation, DEFAULTS)
    spec = replace(
        spec,
        attention_softcap=_cap(keys, "attn_logit_softcapping", 50.0),
        logit_softcap=_cap(keys, "final_logit_softcapping", 30.0),
    )
    is_sliding = sliding_layers(keys, spec.layers) or [index % 2 == 0 for index in range(spec.layers)]
    return checked(keys.source, with_windows(spec, is_sliding, gemma_window(keys)))


def gemma_spec(family: str, keys: Keys, generation: Keys, defaults: Defaults) -> ModelSpec:
    """Returns what Gemma 2 and 3 have in common."""
    if keys.boolean("use_bidirectional_attention", False):
        raise unsupported(keys, "use_bidirectional_attention", True, "false")
    spec = spec_of_config(family, keys, generation, defaults)
    has_bias = keys.boolean("attention_bias", False)
    return replace(
        with_gemma_block(spec),
        activation=activation(keys, "hidden_activation", "gelu_pytorch_tanh"),
        attention_scale=keys.number("query_pre_attn_scalar", *SCALAR, default=256.0) ** -0.5,
        has_attention_bias=has_bias,
        has_output_bias=has_bias,
    )


def with_gemma_block(spec: ModelSpec) -> ModelSpec:
    """Returns the spec with the norms, activation and embedding scale of all Gemmas."""
    return replace(spec, has_output_norms=True, activation=Activation.GELU_TANH, embed_scale=math.sqrt(spec.width))


def gemma_window(keys: Keys) -> int:
    """Returns the window, 4096 where the key is missing."""
    return optional_window(keys) if "sliding_window" in keys.values else 4096


def _cap(keys: Keys, key: str, default: float) -> float:
    if key not in keys.values:
        return default
    return keys.number(key, *CAP, default=0.0)


def spec_from_gguf(keys: Keys, tensors: Tensors) -> ModelSpec:
    """Returns the spec that GGUF metadata of architecture ``gemma2`` describes; raises as ``spec_of_gguf``."""
    own = own_keys(keys)
    spec = with_gemma_block(spec_of_gguf(NAME, keys, own, tensors))
    spec = replace(
        spec,
        attention_softcap=own.number("attn_logit_softcapping", *CAP, default=50.0),
        logit_softcap=own.number("final_logit_softcapping", *CAP, default=30.0),
        attention_scale=gguf_attention_scale(spec, _LAYERS_OF_27B),
    )
    window = optional_gguf_window(own) if own.has("attention.sliding_window") else 4096
    return checked(keys.source, with_windows(spec, gguf_sliding_layers(own, spec.layers, 2), window))


def gguf_attention_scale(spec: ModelSpec, layers_of_27b: int) -> float:
    """Returns the factor of the scores. The files do not say it: 27B alone differs, and is known by its layers."""
    return 1 / math.sqrt(spec.width // spec.heads if spec.layers == layers_of_27b else spec.head_size)


def gguf_sliding_layers(own: Keys, layers: int, default: int) -> tuple[bool, ...]:
    """Returns which layers see a window only: a list, or every n-th layer sees everything."""
    key = "attention.sliding_window_pattern"
    if isinstance(own.values.get(key), list | tuple):
        return tuple(item.boolean("", False) for item in own.sequence(key, layers) or ())
    pattern = own.integer(key, 1, 1024, default=default)
    return tuple((index + 1) % pattern != 0 for index in range(layers))


def sources(spec: ModelSpec, role: str, kind: str) -> tuple[Source, ...]:
    """Returns where a file of ``kind`` may keep a role."""
    if kind == "gguf":
        return (gguf_source(role),)
    source = _NAMES.source(role)
    return (replace(source, offset=1.0) if role.endswith("norm") else source,)
