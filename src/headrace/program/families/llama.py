"""The Llama family: pre-norm blocks of grouped-query attention with RoPE and a SiLU-gated MLP.

Covers LlamaForCausalLM (Llama 2 and 3, SmolLM2, …), MistralForCausalLM with its sliding window, and GGUF's ``llama``.
"""

from __future__ import annotations

from dataclasses import replace

from headrace.program.families.checks import LIMITS, checked, unsupported
from headrace.program.families.config_json import Defaults, require_silu, require_whole_rotation, spec_of_config
from headrace.program.families.decoder import build
from headrace.program.families.gguf_metadata import Tensors, own_keys, spec_of_gguf
from headrace.program.families.gguf_metadata import require_whole_rotation as require_whole_gguf_rotation
from headrace.program.families.source import GGUF_NAMES, HF_NAMES, Role, Source
from headrace.program.keys import Keys
from headrace.program.model import ModelSpec

__all__ = ["NAME", "build", "sources", "spec_from_config", "spec_from_gguf"]

NAME = "llama"
_DEFAULTS = {
    "LlamaForCausalLM": Defaults(),
    "MistralForCausalLM": Defaults(hidden=14336, kv_heads=8, context_tokens=4096 * 32),
}


def spec_from_config(architecture: str, keys: Keys, generation: Keys) -> ModelSpec:
    """Returns the spec that a ``config.json`` describes; raises as ``spec_of_config``."""
    require_silu(keys)
    require_whole_rotation(keys)
    spec = spec_of_config(NAME, keys, generation, _DEFAULTS[architecture])
    if architecture == "LlamaForCausalLM":
        has_bias = keys.boolean("attention_bias", False)
        spec = replace(
            spec,
            has_attention_bias=has_bias,
            has_output_bias=has_bias,
            has_mlp_bias=keys.boolean("mlp_bias", False),
        )
    elif "sliding_window" not in keys.values:
        spec = replace(spec, window=4096)  # as in transformers; an explicit null means full attention
    elif keys.has("sliding_window"):
        spec = replace(spec, window=keys.integer("sliding_window", *LIMITS["window"]))
    return checked(keys.source, spec)


def spec_from_gguf(keys: Keys, tensors: Tensors) -> ModelSpec:
    """Returns the spec that GGUF metadata of architecture ``llama`` describes; raises as ``spec_of_gguf``."""
    own = own_keys(keys)
    if own.integer("expert_count", 0, 2**16, default=0):
        raise unsupported(own, "expert_count", own.values["expert_count"], "0 (no mixture of experts yet)")
    spec = spec_of_gguf(NAME, keys, own, tensors)
    require_whole_gguf_rotation(own, spec.head_size)
    window = own.integer("attention.sliding_window", 0, LIMITS["window"][1], default=0)
    return checked(keys.source, replace(spec, window=window))


def sources(spec: ModelSpec, role: str, kind: str) -> tuple[Source, ...]:
    """Returns where a file of ``kind`` may keep a role. GGUF has q and k in interleaved RoPE order."""
    if kind == "hf":
        return (HF_NAMES.source(role),)
    is_interleaved = Role.of(role).name in ("q", "k")
    return (replace(GGUF_NAMES.source(role), is_interleaved=is_interleaved),)
