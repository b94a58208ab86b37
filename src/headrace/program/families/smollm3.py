"""SmolLM3: Llama's block, every fourth layer without rotary embedding (NoPE), and GGUF's ``smollm3``."""

from __future__ import annotations

from collections.abc import Sequence
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
from headrace.program.families.llama import sources
from headrace.program.keys import Keys
from headrace.program.model import ModelSpec

__all__ = ["NAME", "build", "sources", "spec_from_config", "spec_from_gguf"]

NAME = "smollm3"
_DEFAULTS = Defaults(
    width=2048,
    layers=36,
    heads=16,
    kv_heads=4,
    vocab_size=128256,
    context_tokens=32768,
    theta=2e6,
    is_tied=True,
    bos_token_ids=(128000,),
    eos_token_ids=(128001,),
)


def spec_from_config(architecture: str, keys: Keys, generation: Keys) -> ModelSpec:
    """Returns the spec that a ``config.json`` describes; raises as ``spec_of_config``."""
    spec = spec_of_config(NAME, keys, generation, _DEFAULTS)
    has_bias = keys.boolean("attention_bias", False)
    spec = replace(
        spec,
        has_attention_bias=has_bias,
        has_output_bias=has_bias,
        has_mlp_bias=keys.boolean("mlp_bias", False),
    )
    interval = keys.integer("no_rope_layer_interval", 1, LIMITS["layers"][1], default=4)
    turns = [(index + 1) % interval != 0 for index in range(spec.layers)]
    if (listed := keys.sequence("no_rope_layers", spec.layers)) is not None:
        turns = [item.integer("", 0, 1) == 1 for item in listed]
    if keys.boolean("use_sliding_window", False):
        is_sliding = sliding_layers(keys, spec.layers) or [not turn for turn in turns]
        spec = with_windows(spec, is_sliding, optional_window(keys))
    return checked(keys.source, _without_positions(spec, turns))


def _without_positions(spec: ModelSpec, turns: Sequence[bool]) -> ModelSpec:
    """Returns the spec with no rotary embedding on the layers that do not turn."""
    layers = [spec.layer(index) for index in range(spec.layers)]
    return replace(
        spec,
        per_layer=tuple(
            layer if turn else replace(layer, rope=None) for layer, turn in zip(layers, turns, strict=True)
        ),
    )


def spec_from_gguf(keys: Keys, tensors: Tensors) -> ModelSpec:
    """Returns the spec that GGUF metadata of architecture ``smollm3`` describes; raises as ``spec_of_gguf``.

    The files do not name the layers without positions: llama.cpp takes every fourth.
    """
    spec = spec_of_gguf(NAME, keys, own_keys(keys), tensors)
    return checked(keys.source, _without_positions(spec, [(index + 1) % 4 != 0 for index in range(spec.layers)]))
