"""Mixtral: Mistral with eight routed experts in place of the MLP. Its GGUF files are ``llama`` with experts."""

from __future__ import annotations

from dataclasses import replace

from headrace.program.families.checks import LIMITS, checked
from headrace.program.families.config_json import Defaults, optional_window, spec_of_config
from headrace.program.families.decoder import build
from headrace.program.families.llama import spec_from_gguf
from headrace.program.families.source import HF_NAMES, Source, hf_source
from headrace.program.keys import Keys
from headrace.program.model import ModelSpec

__all__ = ["NAME", "build", "sources", "spec_from_config", "spec_from_gguf"]

NAME = "mixtral"
_DEFAULTS = Defaults(hidden=14336, kv_heads=8, context_tokens=4096 * 32, theta=1e6, norm_eps=1e-5)
_NAMES = HF_NAMES.but(
    router="block_sparse_moe.gate",
    expert_gate="block_sparse_moe.experts.{}.w1",
    expert_up="block_sparse_moe.experts.{}.w3",
    expert_down="block_sparse_moe.experts.{}.w2",
)


def spec_from_config(architecture: str, keys: Keys, generation: Keys) -> ModelSpec:
    """Returns the spec that a ``config.json`` describes; raises as ``spec_of_config``."""
    spec = replace(
        spec_of_config(NAME, keys, generation, _DEFAULTS),
        window=optional_window(keys),
        experts=keys.integer("num_local_experts", *LIMITS["experts"], default=8),
        top_k=keys.integer("num_experts_per_tok", *LIMITS["experts"], default=2),
        is_renormalised=True,
    )
    return checked(keys.source, spec)


def sources(spec: ModelSpec, role: str, kind: str) -> tuple[Source, ...]:
    """Returns where a file of transformers may keep a role."""
    assert kind == "hf", "its GGUF files belong to the family llama"
    return hf_source(role, _NAMES)
