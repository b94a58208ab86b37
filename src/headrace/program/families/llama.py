"""The Llama family: pre-norm blocks of grouped-query attention with RoPE and a SiLU-gated MLP.

Covers LlamaForCausalLM (Llama 2 and 3, SmolLM2, …), MistralForCausalLM with its sliding window, the language model of
Mistral3ForConditionalGeneration (Mistral Small 3.1 and later; nothing here takes images), and GGUF's ``llama``.
"""

from __future__ import annotations

from dataclasses import replace

from headrace.program.families.checks import checked, unsupported
from headrace.program.families.config_json import Defaults, optional_window, spec_of_config, text_half
from headrace.program.families.decoder import build
from headrace.program.families.gguf_metadata import Tensors, own_keys, spec_of_gguf
from headrace.program.families.gguf_metadata import optional_window as optional_gguf_window
from headrace.program.families.source import HF_NAMES, Role, Source, beside_vision, gguf_source
from headrace.program.keys import Keys
from headrace.program.model import ModelSpec

__all__ = ["NAME", "build", "sources", "spec_from_config", "spec_from_gguf"]

NAME = "llama"
_MISTRAL = Defaults(hidden=14336, kv_heads=8, context_tokens=4096 * 32)
_DEFAULTS = {
    "LlamaForCausalLM": Defaults(),
    "MistralForCausalLM": _MISTRAL,
    "Mistral3ForConditionalGeneration": _MISTRAL,
}


def spec_from_config(architecture: str, keys: Keys, generation: Keys) -> ModelSpec:
    """Returns the spec that a ``config.json`` describes; raises as ``spec_of_config``."""
    if architecture == "Mistral3ForConditionalGeneration":
        keys = text_half(keys)
        if (kind := keys.text("model_type", "mistral")) != "mistral":
            raise unsupported(keys, "model_type", kind, "mistral")
    spec = spec_of_config(NAME, keys, generation, _DEFAULTS[architecture])
    if architecture == "LlamaForCausalLM":
        has_bias = keys.boolean("attention_bias", False)
        spec = replace(
            spec,
            has_attention_bias=has_bias,
            has_output_bias=has_bias,
            has_mlp_bias=keys.boolean("mlp_bias", False),
        )
    else:
        # A missing key means 4096, as in transformers; an explicit null means full attention.
        spec = replace(spec, window=optional_window(keys) if "sliding_window" in keys.values else 4096)
    return checked(keys.source, spec)


def spec_from_gguf(keys: Keys, tensors: Tensors) -> ModelSpec:
    """Returns the spec that GGUF metadata of architecture ``llama`` describes; raises as ``spec_of_gguf``.

    Mixtral comes under this name too, with experts.
    """
    own = own_keys(keys)
    spec = spec_of_gguf(NAME, keys, own, tensors)
    return checked(keys.source, replace(spec, window=optional_gguf_window(own)))


def sources(spec: ModelSpec, role: str, kind: str) -> tuple[Source, ...]:
    """Returns where a file of ``kind`` may keep a role. GGUF has q and k in interleaved RoPE order."""
    if kind == "hf":
        return beside_vision(HF_NAMES.source(role))
    is_interleaved = Role.of(role).name in ("q", "k")
    return (replace(gguf_source(role, spec.experts), is_interleaved=is_interleaved),)
