"""What a model is, apart from its weights: plain frozen values that builders, loaders and schedulers read.

A spec is checked when it is made (``program.spec``), so readers may trust every number in it. Fields of a ModelSpec
hold for all layers; where layers differ, ``per_layer`` has one entry per layer and ``layer(i)`` is the one to ask.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from headrace.program.opcodes import Activation, Norm, Pooling


class Architecture(StrEnum):
    """Which of the three classes a model belongs to (the words of ``inference_engine.architecture``)."""

    DECODER_ONLY = "decoder-only"
    ENCODER_ONLY = "encoder-only"
    ENCODER_DECODER = "encoder-decoder"


class RopeKind(StrEnum):
    """How rotary frequencies are scaled.

    FACTORS divides each frequency by its own given factor (GGUF rope_freqs). LONGROPE does so with one set of factors
    where at most the original context is served, and with another where more is (Phi-3 and 4).
    """

    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"
    FACTORS = "factors"
    LONGROPE = "longrope"


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding of the first R elements of a head, half-split pairing (element i turns with i + R/2).

    Args:
        theta: base of the frequencies.
        kind: scaling; the fields below are read only by the kinds named.
        factor: linear, llama3, yarn: how many times longer the context became.
        original_context_tokens: llama3, yarn, longrope: context before scaling.
        low_freq_factor, high_freq_factor: llama3: wavelength limits as parts of the original context.
        beta_fast, beta_slow: yarn: turns within the original context where the ramp starts and ends.
        is_truncated: yarn: ramp limits are rounded outwards to whole dimensions.
        attention_factor: multiplies both cosine and sine (yarn's mscale, longrope's; 1 for the other kinds).
        factors: factors, longrope: divisors of the R/2 frequencies.
        long_factors: longrope: those of contexts beyond the original one.
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
    long_factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer's own shape.

    Args:
        hidden: width of the MLP, or of one expert.
        window: last positions that attention sees, 0 for all.
        rope: None for a layer that knows no positions.
        experts: routed MLPs, 0 for a plain one.
    """

    heads: int
    kv_heads: int
    head_size: int
    hidden: int
    window: int
    rope: RopeSpec | None = None
    experts: int = 0


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model's shape and constants.

    Args:
        family: name in ``families.registry``; decides which file builds the program.
        architecture: one of the three classes.
        layers: number of blocks.
        width: elements of the residual stream.
        hidden: width of the MLP, or of one expert.
        context_tokens: positions the model was made for; a request's prompt and output together stay below.
        window: last positions that attention sees, 0 for all.
        has_attention_bias, has_output_bias, has_mlp_bias: q/k/v, o, and gate/up/down products add a bias vector.
        attention_scale: multiplies the scores; None is 1/√head_size.
        attention_softcap, logit_softcap: tanh caps of scores and logits, 0 for none.
        logit_scale: multiplies the logits, before their cap.
        norm: of the residual stream.
        has_norm_bias: LAYER norms have one.
        activation: of the MLP, or of its gate.
        is_gated: the MLP is activation(gate) × up instead of activation(up).
        has_qk_norm: an RMS norm of every q and k head before RoPE.
        has_output_norms: what attention and MLP give is normed before it is added (Gemma).
        has_learned_positions: a table of context_tokens rows is added to the embedding.
        embed_scale: multiplies the embedding.
        embed_width: elements of an embedding that a product widens (ALBERT), 0 where it is as wide as the stream.
        rotary_size: elements of a head that turn, 0 for all.
        experts, top_k: routed MLPs of a layer, and how many of them a row takes; 0 for a plain MLP.
        is_renormalised: the shares of a row's experts are divided by their sum.
        position_offset: row of the learned positions that position 0 has.
        token_types: rows of the table of token types, 0 without one.
        pooling: encoders: how the rows of a sequence become its vector.
        is_causal: encoders: a row sees what is before it only (decoders that make vectors); decoders always do.
        labels: encoders that classify: the names of their classes, whose scores come out instead of a vector.
        has_token_labels: every row has scores of the classes, not the text.
        has_masked_head: encoders that also say which token stands behind a mask.
        head_activation, has_head_bias: of the masked head's first product, and of ModernBERT's classifiers.
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
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    logit_scale: float = 1.0
    norm: Norm = Norm.RMS
    has_norm_bias: bool = False
    activation: Activation = Activation.SILU
    is_gated: bool = True
    has_qk_norm: bool = False
    has_output_norms: bool = False
    has_learned_positions: bool = False
    embed_scale: float = 1.0
    embed_width: int = 0
    rotary_size: int = 0
    experts: int = 0
    top_k: int = 0
    is_renormalised: bool = False
    position_offset: int = 0
    token_types: int = 0
    pooling: Pooling = Pooling.MEAN
    is_causal: bool = False
    labels: tuple[str, ...] = ()
    has_token_labels: bool = False
    has_masked_head: bool = False
    head_activation: Activation = Activation.GELU_ERF
    has_head_bias: bool = True
    per_layer: tuple[LayerSpec, ...] = ()

    def layer(self, index: int) -> LayerSpec:
        """Returns the shape of layer ``index``."""
        if self.per_layer:
            return self.per_layer[index]
        return LayerSpec(self.heads, self.kv_heads, self.head_size, self.hidden, self.window, self.rope, self.experts)
