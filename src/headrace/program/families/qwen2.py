"""Qwen2 and Qwen2.5: Llama's block with biases on q, k and v, and GGUF's ``qwen2``."""

from __future__ import annotations

from dataclasses import replace

from headrace.program.families.checks import LIMITS, checked
from headrace.program.families.config_json import (
    Defaults,
    optional_window,
    sliding_layers,
    spec_of_config,
    with_windows,
)
from headrace.program.families.decoder import build
from headrace.program.families.gguf_metadata import Tensors, own_keys, spec_of_gguf
from headrace.program.families.source import Source, gguf_source, hf_source
from headrace.program.keys import Keys
from headrace.program.model import ModelSpec

__all__ = ["NAME", "build", "sources", "spec_from_config", "spec_from_gguf"]

NAME = "qwen2"
DEFAULTS = Defaults(hidden=22016, vocab_size=151936, context_tokens=32768, bos_token_ids=(), eos_token_ids=())


def spec_from_config(architecture: str, keys: Keys, generation: Keys) -> ModelSpec:
    """Returns the spec that a ``config.json`` describes; raises as ``spec_of_config``."""
    spec = spec_of_config(NAME, keys, generation, replace(DEFAULTS, kv_heads=32))
    return checked(keys.source, replace(with_qwen_windows(spec, keys), has_attention_bias=True))


def with_qwen_windows(spec: ModelSpec, keys: Keys) -> ModelSpec:
    """Returns the spec with the windows of Qwen's layers: off by default, else from ``max_window_layers`` on."""
    if not keys.boolean("use_sliding_window", False):
        return spec
    window = 4096 if "sliding_window" not in keys.values else optional_window(keys)
    first = keys.integer("max_window_layers", 0, LIMITS["layers"][1], default=28)
    is_sliding = sliding_layers(keys, spec.layers)
    return with_windows(spec, is_sliding or [index >= first for index in range(spec.layers)], window)


def spec_from_gguf(keys: Keys, tensors: Tensors) -> ModelSpec:
    """Returns the spec that GGUF metadata of architecture ``qwen2`` describes; raises as ``spec_of_gguf``."""
    return checked(keys.source, spec_of_gguf(NAME, keys, own_keys(keys), tensors))


def sources(spec: ModelSpec, role: str, kind: str) -> tuple[Source, ...]:
    """Returns where a file of ``kind`` may keep a role."""
    return hf_source(role) if kind == "hf" else (gguf_source(role),)
