"""Qwen3: Llama's block with an RMS norm of every q and k head, and GGUF's ``qwen3``."""

from __future__ import annotations

from dataclasses import replace

from headrace.program.families.checks import checked
from headrace.program.families.config_json import spec_of_config
from headrace.program.families.decoder import build
from headrace.program.families.gguf_metadata import Tensors, own_keys, spec_of_gguf
from headrace.program.families.qwen2 import DEFAULTS, sources, with_qwen_windows
from headrace.program.keys import Keys
from headrace.program.model import ModelSpec

__all__ = ["NAME", "build", "sources", "spec_from_config", "spec_from_gguf"]

NAME = "qwen3"


def spec_from_config(architecture: str, keys: Keys, generation: Keys) -> ModelSpec:
    """Returns the spec that a ``config.json`` describes; raises as ``spec_of_config``."""
    spec = spec_of_config(NAME, keys, generation, replace(DEFAULTS, kv_heads=32, head_size=128))
    has_bias = keys.boolean("attention_bias", False)
    spec = replace(
        with_qwen_windows(spec, keys), has_qk_norm=True, has_attention_bias=has_bias, has_output_bias=has_bias
    )
    return checked(keys.source, spec)


def spec_from_gguf(keys: Keys, tensors: Tensors) -> ModelSpec:
    """Returns the spec that GGUF metadata of architecture ``qwen3`` describes; raises as ``spec_of_gguf``."""
    return checked(keys.source, replace(spec_of_gguf(NAME, keys, own_keys(keys), tensors), has_qk_norm=True))
