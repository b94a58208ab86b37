"""StableLM 2: LayerNorm and a rotary embedding of a quarter of the head in Llama's block, and GGUF's ``stablelm``."""

from __future__ import annotations

from dataclasses import replace

from headrace.program.families.checks import checked, unsupported
from headrace.program.families.config_json import Defaults, spec_of_config
from headrace.program.families.decoder import build
from headrace.program.families.gguf_metadata import Tensors, own_keys, spec_of_gguf
from headrace.program.families.qwen2 import sources
from headrace.program.keys import Keys
from headrace.program.model import ModelSpec
from headrace.program.opcodes import Norm

__all__ = ["NAME", "build", "sources", "spec_from_config", "spec_from_gguf"]

NAME = "stablelm"
_DEFAULTS = Defaults(
    width=2560,
    kv_heads=32,
    hidden=6912,
    vocab_size=50304,
    context_tokens=4096,
    eps_key="layer_norm_eps",
    norm_eps=1e-5,
    partial_rotary_factor=0.25,
    bos_token_ids=(0,),
    eos_token_ids=(0,),
)


def spec_from_config(architecture: str, keys: Keys, generation: Keys) -> ModelSpec:
    """Returns the spec that a ``config.json`` describes; raises as ``spec_of_config``."""
    for key in ("use_parallel_residual", "qk_layernorm"):
        if keys.boolean(key, False):
            raise unsupported(keys, key, True, "false")
    spec = spec_of_config(NAME, keys, generation, _DEFAULTS, has_partial_rotation=True)
    has_bias = keys.boolean("use_qkv_bias", False)
    return checked(keys.source, replace(spec, norm=Norm.LAYER, has_norm_bias=True, has_attention_bias=has_bias))


def spec_from_gguf(keys: Keys, tensors: Tensors) -> ModelSpec:
    """Returns the spec that GGUF metadata of architecture ``stablelm`` describes; raises as ``spec_of_gguf``."""
    own = own_keys(keys)
    if own.boolean("use_parallel_residual", False) and "blk.0.ffn_norm.weight" not in tensors:
        raise unsupported(own, "use_parallel_residual", True, "false")
    if "blk.0.attn_q_norm.weight" in tensors:
        raise unsupported(own, "blk.0.attn_q_norm.weight", "present", "models without it")
    spec = spec_of_gguf(NAME, keys, own, tensors, eps="attention.layer_norm_epsilon", has_partial_rotation=True)
    return checked(keys.source, replace(spec, norm=Norm.LAYER, has_norm_bias=True))
