"""What a model is, apart from its weights: plain frozen values that builders, loaders and schedulers read.

A spec is checked when it is made (``program.spec``), so readers may trust every number in it. Fields of a ModelSpec
hold for all layers; where layers differ, ``per_layer`` has one entry per layer and ``layer(i)`` is the one to ask.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Architecture(StrEnum):
    """Which of the three classes a model belongs to (the words of ``inference_engine.architecture``)."""

    DECODER_ONLY = "decoder-only"
    ENCODER_ONLY = "encoder-only"
    ENCODER_DECODER = "encoder-decoder"


class RopeKind(StrEnum):
    """How rotary frequencies are scaled. FACTORS divides each frequency by its own given factor (GGUF rope_freqs)."""

    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"
    FACTORS = "factors"


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding over the whole head, half-split pairing (element i turns with i + D/2).

    Args:
        theta: base of the frequencies.
        kind: scaling; the fields below are read only by the kinds named.
        factor: linear, llama3, yarn: how many times longer the context became.
        original_context_tokens: llama3, yarn: context before scaling.
        low_freq_factor, high_freq_factor: llama3: wavelength limits as parts of the original context.
        beta_fast, beta_slow: yarn: turns within the original context where the ramp starts and ends.
        is_truncated: yarn: ramp limits are rounded outwards to whole dimensions.
        attention_factor: multiplies both cosine and sine (yarn's mscale; 1 for the other kinds).
        factors: factors: divisors of the D/2 frequencies.
    """

    theta: float
    kind: RopeKind = RopeKind.DEFAULT
    factor: float = 1.0
    original_context_tokens: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    is_truncated: bool = True
    attention_factor: float = 1.0
    factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer's own shape.

    Args:
        hidden: width of the gated MLP.
        window: last positions that attention sees, 0 for all.
    """

    heads: int
    kv_heads: int
    head_size: int
    hidden: int
    window: int


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model's shape and constants.

    Args:
        family: name in ``families.registry``; decides which file builds the program.
        architecture: one of the three classes.
        layers: number of blocks.
        width: elements of the residual stream.
        hidden: width of the gated MLP.
        context_tokens: positions the model was made for; a request's prompt and output together stay below.
        window: last positions that attention sees, 0 for all.
        has_attention_bias, has_output_bias, has_mlp_bias: q/k/v, o, and gate/up/down products add a bias vector.
        attention_scale: multiplies the scores; None is 1/√head_size.
        per_layer: empty when all layers are alike.
    """

    family: str
    architecture: Architecture
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_size: int
    hidden: int
    vocab_size: int
    context_tokens: int
    norm_eps: float
    rope: RopeSpec | None
    is_tied: bool
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    window: int = 0
    has_attention_bias: bool = False
    has_output_bias: bool = False
    has_mlp_bias: bool = False
    attention_scale: float | None = None
    per_layer: tuple[LayerSpec, ...] = ()

    def layer(self, index: int) -> LayerSpec:
        """Returns the shape of layer ``index``."""
        if self.per_layer:
            return self.per_layer[index]
        return LayerSpec(self.heads, self.kv_heads, self.head_size, self.hidden, self.window)
