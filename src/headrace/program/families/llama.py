"""The Llama family: pre-norm blocks of grouped-query attention with RoPE and a SiLU-gated MLP.

Covers LlamaForCausalLM (Llama 2 and 3, SmolLM2, …), MistralForCausalLM with its sliding window, and GGUF's ``llama``.
Reads a spec from either description, builds the program, and says under which names a source keeps each weight.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from headrace.base.errors import ModelFormatError, ModelUnsupportedError
from headrace.program.builder import Builder
from headrace.program.ir import NONE, Part, Program
from headrace.program.keys import Keys, show
from headrace.program.model import Architecture, ModelSpec, RopeKind, RopeSpec
from headrace.program.opcodes import LANES, Epilogue
from headrace.program.tensors import TensorLike, tensor_f32

NAME = "llama"

# Ranges of what a description may say, (low, high). Upper limits are several times the largest published model of the
# family (Llama 3.1 405B: 126 layers, width 16384, 128 heads, MLP 53248, vocabulary 128256, context 131072), small
# enough that no product of two of them leaves 64 bits and no table is made before the numbers have been seen.
LIMITS: dict[str, tuple[int, int]] = {
    "layers": (1, 1024),
    "width": (32, 2**16),
    "heads": (1, 1024),
    "head_size": (32, 512),
    "hidden": (32, 2**18),
    "vocab_size": (2, 2**20),
    "context_tokens": (2, 2**24),
    "window": (1, 2**24),
}
_EPS = (1e-12, 0.1)
_THETA = (1.0 + 1e-3, 1e12)
_FACTOR = (1.0, 1e4)
_MULTIPLE = 32  # of k (activation groups) and of head sizes (KV pages)

_CONFIG_DEFAULTS: dict[str, dict[str, int | None]] = {
    # What transformers 5 assumes where config.json is silent.
    "LlamaForCausalLM": {"intermediate_size": 11008, "num_key_value_heads": None, "max_position_embeddings": 2048},
    "MistralForCausalLM": {"intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 4096 * 32},
}


def spec_from_config(architecture: str, keys: Keys, generation: Keys) -> ModelSpec:
    """Returns the spec that a ``config.json`` describes.

    Args:
        architecture: entry of ``architectures``, one that the registry gave to this family.
        generation: ``generation_config.json``, whose end-of-sequence ids are added to the config's own.

    Raises:
        ModelFormatError: a value is of the wrong type, out of range, or contradicts another.
        ModelUnsupportedError: a variant that this family's program does not compute.
    """
    defaults = _CONFIG_DEFAULTS[architecture]
    width = keys.integer("hidden_size", *LIMITS["width"], default=4096)
    heads = keys.integer("num_attention_heads", *LIMITS["heads"], default=32)
    kv_heads = keys.integer(
        "num_key_value_heads", *LIMITS["heads"], default=_or(defaults["num_key_value_heads"], heads)
    )
    head_size = keys.integer("head_dim", *LIMITS["head_size"], default=width // heads)
    context_tokens = keys.integer(
        "max_position_embeddings", *LIMITS["context_tokens"], default=_or(defaults["max_position_embeddings"], 2048)
    )
    vocab_size = keys.integer("vocab_size", *LIMITS["vocab_size"], default=32000)
    activation = keys.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise _unsupported(keys, "hidden_act", activation, "silu")
    if keys.number("partial_rotary_factor", 0.0, 1.0, default=1.0) != 1.0:
        raise _unsupported(keys, "partial_rotary_factor", keys.values["partial_rotary_factor"], "1.0")
    window = 0
    has_bias = has_mlp_bias = False
    if architecture == "MistralForCausalLM":
        # A missing key means 4096, as in transformers; an explicit null means full attention.
        if "sliding_window" not in keys.values:
            window = 4096
        elif keys.has("sliding_window"):
            window = keys.integer("sliding_window", *LIMITS["window"])
    else:
        has_bias = keys.boolean("attention_bias", False)
        has_mlp_bias = keys.boolean("mlp_bias", False)
    rope, context_tokens = _rope_from_config(keys, context_tokens)
    ends = (
        *_token_ids(keys, "eos_token_id", vocab_size, (2,)),
        *_token_ids(generation, "eos_token_id", vocab_size, ()),
    )
    begin = _token_ids(keys, "bos_token_id", vocab_size, (1,))
    return _checked(
        keys.source,
        ModelSpec(
            family=NAME,
            architecture=Architecture.DECODER_ONLY,
            layers=keys.integer("num_hidden_layers", *LIMITS["layers"], default=32),
            width=width,
            heads=heads,
            kv_heads=kv_heads,
            head_size=head_size,
            hidden=keys.integer("intermediate_size", *LIMITS["hidden"], default=defaults["intermediate_size"]),
            vocab_size=vocab_size,
            context_tokens=context_tokens,
            norm_eps=keys.number("rms_norm_eps", *_EPS, default=1e-6),
            rope=rope,
            is_tied=keys.boolean("tie_word_embeddings", False),
            bos_token_id=begin[0] if begin else None,
            eos_token_ids=tuple(dict.fromkeys(ends)),
            window=window if window < context_tokens else 0,
            has_attention_bias=has_bias,
            has_output_bias=has_bias,
            has_mlp_bias=has_mlp_bias,
        ),
    )


def _token_ids(keys: Keys, key: str, vocab_size: int, default: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the ids under ``key``; a missing key gives the default as far as the vocabulary has it, null gives ()."""
    if key not in keys.values:
        return tuple(token_id for token_id in default if token_id < vocab_size)
    return keys.integers(key, 0, vocab_size - 1, most=64)


def _or(value: int | None, default: int) -> int:
    return default if value is None else value


def _rope_from_config(keys: Keys, context_tokens: int) -> tuple[RopeSpec, int]:
    """Returns the rotary spec and the context that it holds for. ``rope_scaling`` wins, as in transformers."""
    theta = keys.number("rope_theta", *_THETA, default=10000.0)
    scaling = next((found for key in ("rope_scaling", "rope_parameters") if (found := keys.mapping(key))), None)
    if scaling is None or not scaling.values:
        return RopeSpec(theta), context_tokens
    theta = scaling.number("rope_theta", *_THETA, default=theta)
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    if scaling.number("partial_rotary_factor", 0.0, 1.0, default=1.0) != 1.0:
        raise _unsupported(scaling, "partial_rotary_factor", scaling.values["partial_rotary_factor"], "1.0")
    match kind:
        case "default":
            return RopeSpec(theta), context_tokens
        case "linear":
            return RopeSpec(theta, RopeKind.LINEAR, factor=scaling.number("factor", *_FACTOR)), context_tokens
        case "dynamic":
            # The base grows only past max_position_embeddings: below it the table is static and is the default one.
            scaling.number("factor", *_FACTOR)
            return RopeSpec(theta), context_tokens
        case "llama3":
            low = scaling.number("low_freq_factor", 1e-3, 1e3)
            high = scaling.number("high_freq_factor", 1e-3, 1e3)
            if high <= low:
                raise scaling.refuse("high_freq_factor", f"must be above low_freq_factor ({low:g})")
            return (
                RopeSpec(
                    theta,
                    RopeKind.LLAMA3,
                    factor=scaling.number("factor", *_FACTOR),
                    original_context_tokens=_original_context(keys, scaling, context_tokens),
                    low_freq_factor=low,
                    high_freq_factor=high,
                ),
                context_tokens,
            )
        case "yarn":
            return _yarn_from_config(keys, scaling, theta, context_tokens), context_tokens
        case _:
            raise _unsupported(scaling, "rope_type", kind, "default, linear, dynamic, llama3, yarn")


def _original_context(keys: Keys, scaling: Keys, context_tokens: int) -> int:
    limits = LIMITS["context_tokens"]
    inner = scaling.integer("original_max_position_embeddings", *limits, default=context_tokens)
    return keys.integer("original_max_position_embeddings", *limits, default=inner)


def _yarn_from_config(keys: Keys, scaling: Keys, theta: float, context_tokens: int) -> RopeSpec:
    original = _original_context(keys, scaling, context_tokens)
    factor = scaling.number("factor", *_FACTOR, default=max(1.0, context_tokens / original))

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    over = scaling.number("mscale", 0.0, 100.0, default=0.0)
    under = scaling.number("mscale_all_dim", 0.0, 100.0, default=0.0)
    inferred = mscale(over) / mscale(under) if over and under else mscale(1.0)
    fast = scaling.number("beta_fast", 0.0, 1e6, default=0.0) or 32.0
    slow = scaling.number("beta_slow", 0.0, 1e6, default=0.0) or 1.0
    if fast < slow:
        raise scaling.refuse("beta_fast", f"must not be below beta_slow ({slow:g})")
    return RopeSpec(
        theta,
        RopeKind.YARN,
        factor=factor,
        original_context_tokens=original,
        beta_fast=fast,
        beta_slow=slow,
        is_truncated=scaling.boolean("truncate", True),
        attention_factor=scaling.number("attention_factor", 1e-3, 100.0, default=inferred),
    )


def spec_from_gguf(keys: Keys, tensors: Mapping[str, TensorLike]) -> ModelSpec:
    """Returns the spec that GGUF metadata of architecture ``llama`` describes.

    Args:
        keys: the whole metadata.
        tensors: shapes decide the vocabulary, tying and biases; the values of ``rope_freqs.weight`` are read.

    Raises:
        ModelFormatError: a value is of the wrong type, out of range, or contradicts another.
        ModelUnsupportedError: a variant that this family's program does not compute.
    """
    own = Keys(keys.source, {k[6:]: v for k, v in keys.values.items() if k.startswith("llama.")}, "llama.")
    if own.integer("expert_count", 0, 2**16, default=0):
        raise _unsupported(own, "expert_count", own.values["expert_count"], "0 (no mixture of experts yet)")
    width = own.integer("embedding_length", *LIMITS["width"])
    heads = own.integer("attention.head_count", *LIMITS["heads"])
    head_size = own.integer("attention.key_length", *LIMITS["head_size"], default=width // heads)
    if own.integer("attention.value_length", *LIMITS["head_size"], default=head_size) != head_size:
        raise _unsupported(own, "attention.value_length", own.values["attention.value_length"], str(head_size))
    if own.integer("rope.dimension_count", 0, LIMITS["head_size"][1], default=head_size) != head_size:
        raise _unsupported(own, "rope.dimension_count", own.values["rope.dimension_count"], str(head_size))
    context_tokens = own.integer("context_length", *LIMITS["context_tokens"])
    vocab_size = _gguf_vocab(keys, own, tensors, width)
    window = own.integer("attention.sliding_window", 0, LIMITS["window"][1], default=0)
    ends = [
        token_id
        for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
        for token_id in keys.integers(key, 0, vocab_size - 1, most=1)
    ]
    begin = keys.integers("tokenizer.ggml.bos_token_id", 0, vocab_size - 1, most=1)
    return _checked(
        keys.source,
        ModelSpec(
            family=NAME,
            architecture=Architecture.DECODER_ONLY,
            layers=own.integer("block_count", *LIMITS["layers"]),
            width=width,
            heads=heads,
            kv_heads=own.integer("attention.head_count_kv", *LIMITS["heads"], default=heads),
            head_size=head_size,
            hidden=own.integer("feed_forward_length", *LIMITS["hidden"]),
            vocab_size=vocab_size,
            context_tokens=context_tokens,
            norm_eps=own.number("attention.layer_norm_rms_epsilon", *_EPS),
            rope=_rope_from_gguf(own, tensors, head_size, context_tokens),
            is_tied="output.weight" not in tensors,
            bos_token_id=begin[0] if begin else None,
            eos_token_ids=tuple(dict.fromkeys(ends)),
            window=window if window < context_tokens else 0,
            has_attention_bias="blk.0.attn_q.bias" in tensors,
            has_output_bias="blk.0.attn_output.bias" in tensors,
            has_mlp_bias="blk.0.ffn_down.bias" in tensors,
        ),
    )


def _gguf_vocab(keys: Keys, own: Keys, tensors: Mapping[str, TensorLike], width: int) -> int:
    """Returns the vocabulary's size; embedding rows, token list and ``vocab_size`` must agree where they exist."""
    table = tensors.get("token_embd.weight")
    if table is None:
        raise ModelFormatError(f"{keys.source}: tensor token_embd.weight is missing")
    if len(table.shape) != 2 or table.shape[1] != width:
        raise ModelFormatError(
            f"{keys.source}: token_embd.weight has shape {show(tuple(table.shape))}, expected [vocabulary, {width}]"
        )
    rows = Keys(keys.source, {"token_embd.weight rows": table.shape[0]}).integer(
        "token_embd.weight rows", *LIMITS["vocab_size"]
    )
    if own.integer("vocab_size", *LIMITS["vocab_size"], default=rows) != rows:
        raise own.refuse("vocab_size", f"but token_embd.weight has {rows} rows")
    tokens = keys.values.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list | tuple) and len(tokens) != rows:
        raise ModelFormatError(
            f"{keys.source}: tokenizer.ggml.tokens has {len(tokens)} entries, but token_embd.weight has {rows} rows"
        )
    return rows


def _rope_from_gguf(own: Keys, tensors: Mapping[str, TensorLike], head_size: int, context_tokens: int) -> RopeSpec:
    theta = own.number("rope.freq_base", *_THETA, default=10000.0)
    factors: tuple[float, ...] = ()
    if (tensor := tensors.get("rope_freqs.weight")) is not None:
        values = tensor_f32(own.source, "rope_freqs.weight", tensor, head_size // 2)
        low, high = 1e-6, 1e6
        if not all(low <= value <= high for value in values):  # NaN fails too
            raise ModelFormatError(f"{own.source}: rope_freqs.weight has values outside {low:g}..{high:g}")
        factors = tuple(float(value) for value in values)
    kind = own.text("rope.scaling.type", "none")
    factor = own.number("rope.scaling.factor", 0.0, _FACTOR[1], default=own.number("rope.scale_linear", 0, 1e4, 0.0))
    is_scaled = factor not in (0.0, 1.0)
    if kind == "none" and is_scaled and not own.has("rope.scaling.type"):
        kind = "linear"  # files older than the key carry only the factor
    if kind in ("linear", "yarn") and factors:
        raise _unsupported(own, "rope.scaling.type", kind, "none beside rope_freqs.weight")
    match kind:
        case "none":
            return RopeSpec(theta, RopeKind.FACTORS, factors=factors) if factors else RopeSpec(theta)
        case "linear":
            return RopeSpec(theta, RopeKind.LINEAR, factor=factor) if is_scaled else RopeSpec(theta)
        case "yarn":
            if factor < 1.0:
                raise own.refuse("rope.scaling.factor", f"must be in 1..{_FACTOR[1]:g} for yarn")
            inferred = 0.1 * math.log(factor) + 1.0
            return RopeSpec(
                theta,
                RopeKind.YARN,
                factor=factor,
                original_context_tokens=own.integer(
                    "rope.scaling.original_context_length", *LIMITS["context_tokens"], default=context_tokens
                ),
                attention_factor=inferred * own.number("rope.scaling.attn_factor", 1e-3, 100.0, default=1.0),
            )
        case _:
            raise _unsupported(own, "rope.scaling.type", kind, "none, linear, yarn")


def _checked(source: str, spec: ModelSpec) -> ModelSpec:
    """Returns the spec when its numbers fit each other."""

    def refuse(what: str, value: int, must: str) -> ModelFormatError:
        return ModelFormatError(f"{source}: {what} is {value}, {must}")

    if spec.heads % spec.kv_heads:
        raise refuse("number of attention heads", spec.heads, f"must be a multiple of the {spec.kv_heads} KV heads")
    low, high = LIMITS["head_size"]
    if not low <= spec.head_size <= high:
        raise refuse("head size (width ÷ heads)", spec.head_size, f"must be in {low}..{high}")
    for what, value in (("width", spec.width), ("head size", spec.head_size), ("MLP width", spec.hidden)):
        if value % _MULTIPLE:
            raise ModelUnsupportedError(
                f"{source}: {what} is {value}, this engine needs a multiple of {_MULTIPLE}",
                hint="--engine vllm may run this model",
            )
    return spec


def _unsupported(keys: Keys, key: str, value: object, supported: str) -> ModelUnsupportedError:
    return ModelUnsupportedError(
        f"{keys.source}: {keys.prefix}{key} is {show(value)}, this engine runs only {supported} for this family",
        hint="--engine vllm may run this model",
    )


def build(spec: ModelSpec) -> Program:
    """Returns the program of one step: 5 instructions per layer between the embedding and the head."""
    b = Builder(spec)
    table = b.matrix("embed", spec.width, Part("embed", spec.vocab_size))
    rope = NONE if spec.rope is None else b.rope("rope", spec.context_tokens, spec.head_size)
    x = b.embed("x", table)
    for index in range(spec.layers):
        _layer(b, index, x, rope)
    norm = b.vector("final_norm", Part("final_norm", spec.width))
    head = table if spec.is_tied else b.matrix("head", spec.width, Part("head", spec.vocab_size))
    b.head(x, head, norm_weight=norm)
    return b.program()


def _layer(b: Builder, index: int, x: int, rope: int) -> None:
    """Adds one block; ``x`` is updated in place."""
    spec, shape, at = b.spec, b.spec.layer(index), f"layers.{index}"
    q_size, kv_size = shape.heads * shape.head_size, shape.kv_heads * shape.head_size

    def parts(suffix: str, *sizes: tuple[str, int]) -> list[Part]:
        return [Part(f"{at}.{name}{suffix}", n) for name, n in sizes]

    qkv = (("q", q_size), ("k", kv_size), ("v", kv_size))
    gate_up = (("gate", shape.hidden), ("up", shape.hidden))
    q = b.qkv(
        f"{at}.q",
        x,
        b.matrix(f"{at}.qkv", spec.width, *parts("", *qkv)),
        layer=index,
        rope=rope,
        norm_weight=b.vector(f"{at}.attention_norm", *parts("", ("attention_norm", spec.width))),
        bias=b.vector(f"{at}.qkv_bias", *parts("_bias", *qkv)) if spec.has_attention_bias else NONE,
    )
    mixed = b.attention(f"{at}.attention", q, layer=index)
    b.linear(
        f"{at}.o",
        mixed,
        b.matrix(f"{at}.o", q_size, *parts("", ("o", spec.width))),
        bias=b.vector(f"{at}.o_bias", *parts("_bias", ("o", spec.width))) if spec.has_output_bias else NONE,
        epilogue=Epilogue.ADD,
        add_to=x,
    )
    gated = b.linear(
        f"{at}.gated",
        x,
        b.matrix(f"{at}.gate_up", spec.width, *parts("", *gate_up), interleave=LANES),
        norm_weight=b.vector(f"{at}.mlp_norm", *parts("", ("mlp_norm", spec.width))),
        bias=b.vector(f"{at}.gate_up_bias", *parts("_bias", *gate_up), interleave=LANES) if spec.has_mlp_bias else NONE,
        epilogue=Epilogue.SILU_GLU,
    )
    b.linear(
        f"{at}.down",
        gated,
        b.matrix(f"{at}.down", shape.hidden, *parts("", ("down", spec.width))),
        bias=b.vector(f"{at}.down_bias", *parts("_bias", ("down", spec.width))) if spec.has_mlp_bias else NONE,
        epilogue=Epilogue.ADD,
        add_to=x,
    )


_HF_LAYER = {
    "attention_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_GGUF_LAYER = {
    "attention_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "mlp_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}
_HF_TOP = {"embed": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "head": "lm_head.weight"}
_GGUF_TOP = {"embed": "token_embd.weight", "final_norm": "output_norm.weight", "head": "output.weight"}


def source_name(role: str, kind: str) -> str:
    """Returns the tensor's name in a source of ``kind`` ``hf`` or ``gguf``."""
    assert kind in ("hf", "gguf")
    top, layer = (_HF_TOP, _HF_LAYER) if kind == "hf" else (_GGUF_TOP, _GGUF_LAYER)
    if role in top:
        return top[role]
    _, index, name = role.split(".")
    suffix = "bias" if name.endswith("_bias") else "weight"
    stem = layer[name.removesuffix("_bias")]
    return f"model.layers.{index}.{stem}.{suffix}" if kind == "hf" else f"blk.{index}.{stem}.{suffix}"


def needs_unpermute(role: str, kind: str) -> bool:
    """Says whether the source keeps this role's rows in interleaved RoPE order (GGUF ``llama``: q and k).

    Source row ``2·i + j`` of a head is row ``i + j·D/2`` of the half-split order that the VM turns.
    """
    return kind == "gguf" and role.rsplit(".", 1)[-1] in ("q", "k", "q_bias", "k_bias")
