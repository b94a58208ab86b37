"""Phi-3 and Phi-4: Llama's block with q, k, v in one tensor and gate, up in another; GGUF's ``phi3``.

Phi-4-mini turns three quarters of each head. Long-context files have two sets of rotary factors (longrope): the short
one is used where the engine serves at most the original context, the long one where it serves more, for all
positions alike, as vLLM and llama.cpp do; transformers switches with the length of each input.
"""

from __future__ import annotations

import math
from dataclasses import replace

from headrace.program.families.checks import LIMITS, checked
from headrace.program.families.config_json import Defaults, optional_window, spec_of_config
from headrace.program.families.decoder import build
from headrace.program.families.gguf_metadata import Tensors, own_keys, rope_factors, spec_of_gguf
from headrace.program.families.gguf_metadata import optional_window as optional_gguf_window
from headrace.program.families.source import HF_NAMES, Role, Source, gguf_source
from headrace.program.keys import Keys
from headrace.program.model import ModelSpec, RopeKind, RopeSpec

__all__ = ["NAME", "build", "sources", "spec_from_config", "spec_from_gguf"]

NAME = "phi3"
_DEFAULTS = Defaults(
    width=3072, hidden=8192, vocab_size=32064, context_tokens=4096, norm_eps=1e-5, eos_token_ids=(32000,)
)
_NAMES = HF_NAMES.but(
    q="self_attn.qkv_proj",
    k="self_attn.qkv_proj",
    v="self_attn.qkv_proj",
    gate="mlp.gate_up_proj",
    up="mlp.gate_up_proj",
)


def spec_from_config(architecture: str, keys: Keys, generation: Keys) -> ModelSpec:
    """Returns the spec that a ``config.json`` describes; raises as ``spec_of_config``."""
    spec = spec_of_config(NAME, _renamed(keys), generation, _DEFAULTS, has_partial_rotation=True)
    return checked(keys.source, replace(spec, window=optional_window(keys)))


def _renamed(keys: Keys) -> Keys:
    """Returns the keys with the early names of longrope, ``su`` and (in this family) ``yarn``, made today's."""
    values = dict(keys.values)
    for key in ("rope_scaling", "rope_parameters"):
        scaling = keys.mapping(key)
        if scaling is not None and scaling.text("rope_type", scaling.text("type", "default")) in ("su", "yarn"):
            values[key] = {**scaling.values, "rope_type": "longrope"}
    values.setdefault("original_max_position_embeddings", 4096)
    return Keys(keys.source, values, keys.prefix)


def spec_from_gguf(keys: Keys, tensors: Tensors) -> ModelSpec:
    """Returns the spec that GGUF metadata of architecture ``phi3`` describes; raises as ``spec_of_gguf``."""
    own = own_keys(keys)
    spec = spec_of_gguf(NAME, keys, own, tensors, has_partial_rotation=True)
    pairs = (spec.rotary_size or spec.head_size) // 2
    short = rope_factors(own, tensors, "rope_factors_short.weight", pairs)
    long = rope_factors(own, tensors, "rope_factors_long.weight", pairs)
    if short and long and spec.rope is not None:
        original = own.integer(
            "rope.scaling.original_context_length", *LIMITS["context_tokens"], default=spec.context_tokens
        )
        scale = spec.context_tokens / original
        inferred = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
        rope = RopeSpec(
            spec.rope.theta,
            RopeKind.LONGROPE,
            original_context_tokens=original,
            attention_factor=own.number("rope.scaling.attn_factor", 1e-3, 100.0, default=inferred),
            factors=short,
            long_factors=long,
        )
        spec = replace(spec, rope=rope)
    return checked(keys.source, replace(spec, window=optional_gguf_window(own)))


def sources(spec: ModelSpec, role: str, kind: str) -> tuple[Source, ...]:
    """Returns where a file of ``kind`` may keep a role: fused tensors are q, k, v and gate, up from top to bottom."""
    at = Role.of(role)
    q_rows, kv_rows = spec.heads * spec.head_size, spec.kv_heads * spec.head_size
    fused = q_rows + 2 * kv_rows
    match at.name:
        case "q" | "k" | "v":
            start = {"q": 0, "k": q_rows, "v": q_rows + kv_rows}[at.name]
            whole = Source(f"blk.{at.layer}.attn_qkv.weight") if kind == "gguf" else _NAMES.source(role)
            return (whole.part(start, fused),)
        case "gate" | "up":
            whole = Source(f"blk.{at.layer}.ffn_up.weight") if kind == "gguf" else _NAMES.source(role)
            return (whole.part(0 if at.name == "gate" else spec.hidden, 2 * spec.hidden),)
        case _:
            return (gguf_source(role) if kind == "gguf" else _NAMES.source(role),)
