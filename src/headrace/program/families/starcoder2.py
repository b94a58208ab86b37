"""StarCoder2: LayerNorm, biases everywhere and a plain GELU MLP in Llama's block, and GGUF's ``starcoder2``."""

from __future__ import annotations

from dataclasses import replace

from headrace.program.families.checks import checked
from headrace.program.families.config_json import Defaults, optional_window, spec_of_config
from headrace.program.families.decoder import build
from headrace.program.families.gguf_metadata import Tensors, own_keys, spec_of_gguf
from headrace.program.families.gguf_metadata import optional_window as optional_gguf_window
from headrace.program.families.source import HF_NAMES, Source, gguf_source, hf_source
from headrace.program.keys import Keys
from headrace.program.model import ModelSpec
from headrace.program.opcodes import Activation, Norm

__all__ = ["NAME", "build", "sources", "spec_from_config", "spec_from_gguf"]

NAME = "starcoder2"
_DEFAULTS = Defaults(
    width=3072,
    layers=30,
    heads=24,
    kv_heads=2,
    hidden=12288,
    vocab_size=49152,
    context_tokens=4096,
    eps_key="norm_epsilon",
    norm_eps=1e-5,
    activation="gelu_pytorch_tanh",
    is_tied=True,
    bos_token_ids=(50256,),
    eos_token_ids=(50256,),
)
_NAMES = HF_NAMES.but(up="mlp.c_fc", down="mlp.c_proj")


def spec_from_config(architecture: str, keys: Keys, generation: Keys) -> ModelSpec:
    """Returns the spec that a ``config.json`` describes; raises as ``spec_of_config``."""
    spec = spec_of_config(NAME, keys, generation, _DEFAULTS)
    spec = _with_block(spec, has_bias=keys.boolean("use_bias", True))
    return checked(keys.source, replace(spec, window=optional_window(keys)))


def _with_block(spec: ModelSpec, *, has_bias: bool) -> ModelSpec:
    return replace(
        spec,
        norm=Norm.LAYER,
        has_norm_bias=True,
        is_gated=False,
        has_attention_bias=has_bias,
        has_output_bias=has_bias,
        has_mlp_bias=has_bias,
    )


def spec_from_gguf(keys: Keys, tensors: Tensors) -> ModelSpec:
    """Returns the spec that GGUF metadata of architecture ``starcoder2`` describes; raises as ``spec_of_gguf``."""
    own = own_keys(keys)
    spec = spec_of_gguf(NAME, keys, own, tensors, eps="attention.layer_norm_epsilon")
    spec = _with_block(spec, has_bias=spec.has_attention_bias)
    return checked(keys.source, replace(spec, activation=Activation.GELU_TANH, window=optional_gguf_window(own)))


def sources(spec: ModelSpec, role: str, kind: str) -> tuple[Source, ...]:
    """Returns where a file of ``kind`` may keep a role."""
    return hf_source(role, _NAMES) if kind == "hf" else (gguf_source(role),)
