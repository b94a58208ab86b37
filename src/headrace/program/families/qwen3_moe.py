"""Qwen3-MoE: Qwen3 with routed experts in place of (most) MLPs, and GGUF's ``qwen3moe``."""

from __future__ import annotations

from dataclasses import replace

from headrace.program.families.checks import LIMITS, checked
from headrace.program.families.config_json import Defaults, optional_window, spec_of_config, with_windows
from headrace.program.families.decoder import build
from headrace.program.families.gguf_metadata import Tensors, own_keys, spec_of_gguf
from headrace.program.families.source import HF_NAMES, Source, gguf_source, hf_source
from headrace.program.keys import Keys
from headrace.program.model import ModelSpec

__all__ = ["NAME", "build", "sources", "spec_from_config", "spec_from_gguf"]

NAME = "qwen3_moe"
_DEFAULTS = Defaults(
    width=2048,
    layers=24,
    kv_heads=4,
    hidden=6144,
    vocab_size=151936,
    context_tokens=32768,
    bos_token_ids=(),
    eos_token_ids=(),
)
_NAMES = HF_NAMES.but(
    router="mlp.gate",
    expert_gate="mlp.experts.{}.gate_proj",
    expert_up="mlp.experts.{}.up_proj",
    expert_down="mlp.experts.{}.down_proj",
)


def spec_from_config(architecture: str, keys: Keys, generation: Keys) -> ModelSpec:
    """Returns the spec that a ``config.json`` describes; raises as ``spec_of_config``."""
    spec = spec_of_config(NAME, keys, generation, _DEFAULTS)
    has_bias = keys.boolean("attention_bias", False)
    # Files spell the number of experts in either way.
    named = "num_experts" if keys.has("num_experts") else "num_local_experts"
    spec = replace(
        spec,
        has_qk_norm=True,
        has_attention_bias=has_bias,
        has_output_bias=has_bias,
        experts=keys.integer(named, *LIMITS["experts"], default=128),
        top_k=keys.integer("num_experts_per_tok", *LIMITS["experts"], default=8),
        is_renormalised=keys.boolean("norm_topk_prob", False),
    )
    if keys.boolean("use_sliding_window", False):
        spec = with_windows(spec, [True] * spec.layers, optional_window(keys))
    return checked(keys.source, _with_plain_layers(spec, keys))


def _with_plain_layers(spec: ModelSpec, keys: Keys) -> ModelSpec:
    """Returns the spec with the experts' own width, and a plain MLP on the layers that have no experts."""
    hidden = keys.integer("moe_intermediate_size", *LIMITS["hidden"], default=768)
    step = keys.integer("decoder_sparse_step", 1, LIMITS["layers"][1], default=1)
    plain = set(keys.integers("mlp_only_layers", 0, spec.layers - 1, most=spec.layers))
    is_plain = [index in plain or (index + 1) % step != 0 for index in range(spec.layers)]
    routed = replace(spec.layer(0), hidden=hidden)
    if not any(is_plain):
        return replace(spec, hidden=hidden)
    layers = tuple(replace(routed, hidden=spec.hidden, experts=0) if plain else routed for plain in is_plain)
    return replace(spec, per_layer=layers)


def spec_from_gguf(keys: Keys, tensors: Tensors) -> ModelSpec:
    """Returns the spec that GGUF metadata of architecture ``qwen3moe`` describes; raises as ``spec_of_gguf``."""
    own = own_keys(keys)
    own.integer("expert_count", *LIMITS["experts"])
    return checked(keys.source, replace(spec_of_gguf(NAME, keys, own, tensors), has_qk_norm=True))


def sources(spec: ModelSpec, role: str, kind: str) -> tuple[Source, ...]:
    """Returns where a file of ``kind`` may keep a role."""
    return hf_source(role, _NAMES) if kind == "hf" else (gguf_source(role, spec.experts),)
