"""Gemma 3, text only: Gemma 2's block with q and k norms, no cap of the scores, and two rotary bases.

Five of six layers see a window and turn with the local base; the sixth sees everything and turns with the global one.
Of Gemma3ForConditionalGeneration (4B and more) the language model runs and the vision tower is left aside: nothing here
takes images. GGUF's ``gemma3`` is read too.
"""

from __future__ import annotations

from dataclasses import replace

from headrace.program.families.checks import THETA, checked, unsupported
from headrace.program.families.config_json import sliding_layers, text_half
from headrace.program.families.config_rope import rope_from_parameters
from headrace.program.families.decoder import build
from headrace.program.families.gemma2 import (
    CAP,
    DEFAULTS,
    gemma_spec,
    gemma_window,
    gguf_attention_scale,
    gguf_sliding_layers,
    with_gemma_block,
)
from headrace.program.families.gemma2 import sources as gemma_sources
from headrace.program.families.gguf_metadata import Tensors, optional_window, own_keys, spec_of_gguf
from headrace.program.families.source import Source, beside_vision
from headrace.program.keys import Keys
from headrace.program.model import ModelSpec, RopeSpec

__all__ = ["NAME", "build", "sources", "spec_from_config", "spec_from_gguf"]

NAME = "gemma3"
_DEFAULTS = replace(DEFAULTS, vocab_size=262208, context_tokens=131072, theta=1e6)
_GLOBAL_THETA, _LOCAL_THETA = 1e6, 1e4
_LAYERS_OF_27B = 62


def spec_from_config(architecture: str, keys: Keys, generation: Keys) -> ModelSpec:
    """Returns the spec that a ``config.json`` describes; raises as ``spec_of_config``."""
    if architecture == "Gemma3ForConditionalGeneration":
        keys = text_half(keys)
    if keys.has("attn_logit_softcapping"):
        raise unsupported(keys, "attn_logit_softcapping", keys.values["attn_logit_softcapping"], "null")
    spec = gemma_spec(NAME, keys, generation, _DEFAULTS)
    pattern = keys.integer("sliding_window_pattern", 1, 1024, default=6)
    is_sliding = sliding_layers(keys, spec.layers) or [(index + 1) % pattern != 0 for index in range(spec.layers)]
    widest, local = _ropes(keys, spec.context_tokens)
    spec = replace(
        spec, has_qk_norm=True, logit_softcap=keys.number("final_logit_softcapping", *CAP, default=0.0), rope=widest
    )
    return checked(keys.source, _with_local_layers(spec, is_sliding, gemma_window(keys), local))


def _ropes(keys: Keys, context_tokens: int) -> tuple[RopeSpec, RopeSpec]:
    """Returns the global and the local rotary spec, in either spelling; scaling is the global one's."""
    theta = keys.number("rope_theta", *THETA, default=_GLOBAL_THETA)
    local_theta = keys.number("rope_local_base_freq", *THETA, default=_LOCAL_THETA)
    nested = keys.mapping("rope_parameters") or Keys(keys.source, {})
    widest = keys.mapping("rope_scaling") or nested.mapping("full_attention")
    return (
        rope_from_parameters(keys, widest, theta, context_tokens),
        rope_from_parameters(keys, nested.mapping("sliding_attention"), local_theta, context_tokens),
    )


def _with_local_layers(
    spec: ModelSpec, is_sliding: list[bool] | tuple[bool, ...], window: int, local: RopeSpec
) -> ModelSpec:
    """Returns the spec with window and local rotary base on the layers that slide."""
    window = window if window < spec.context_tokens else 0
    layers = [replace(spec.layer(index), window=0) for index in range(spec.layers)]
    return replace(
        spec,
        per_layer=tuple(
            replace(layer, window=window, rope=local) if slides else layer
            for layer, slides in zip(layers, is_sliding, strict=True)
        ),
    )


def spec_from_gguf(keys: Keys, tensors: Tensors) -> ModelSpec:
    """Returns the spec that GGUF metadata of architecture ``gemma3`` describes; raises as ``spec_of_gguf``."""
    own = own_keys(keys)
    spec = with_gemma_block(spec_of_gguf(NAME, keys, own, tensors))
    spec = replace(
        spec,
        has_qk_norm=True,
        logit_softcap=own.number("final_logit_softcapping", *CAP, default=0.0),
        attention_scale=gguf_attention_scale(spec, _LAYERS_OF_27B),
    )
    if window := optional_window(own):
        # As llama.cpp: scaling is the global layers' only, and the local base is 10⁴ where the file is silent.
        local = RopeSpec(own.number("rope.freq_base_swa", *THETA, default=_LOCAL_THETA))
        spec = _with_local_layers(spec, gguf_sliding_layers(own, spec.layers, 6), window, local)
    return checked(keys.source, spec)


def sources(spec: ModelSpec, role: str, kind: str) -> tuple[Source, ...]:
    """Returns where a file of ``kind`` may keep a role; files with a vision tower name the language model apart."""
    (plain,) = gemma_sources(spec, role, kind)
    return (plain,) if kind == "gguf" else beside_vision(plain)
