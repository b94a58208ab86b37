"""Tiny random models of every family: configurations that use what is special about each, and weights made from names.

Weights are not stored: ``tiny_weights`` makes each tensor from its name, so that the script which asks transformers
(scripts/family-goldens) and the tests that ask the VM hold the same model. Names and shapes come from the program's own
weight table; transformers refuses the files where these are wrong.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from headrace.program.families.registry import family_of
from headrace.program.families.source import Role, Source
from headrace.program.ir import WeightSpec
from headrace.program.model import Architecture, RopeKind, RopeSpec
from headrace.program.spec import build_program, spec_from_config
from headrace.testing import tiny_blocks
from headrace.testing.tiny import permute_rows
from headrace.testing.tiny_files import gguf_bytes, safetensors_bytes

VOCAB = 256
"""As many as a step reports log-probabilities of, so that whole rows of logits can be read back."""
TEXT_TOKENS = 100
"""Longer than every window below."""
POSITIONS = (0, 1, 7, 31, 40, 64, 90, 99)
"""Rows of the text whose logits the golden holds."""

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GEMMA: dict[str, Any] = {
    **_BASE,
    "num_hidden_layers": 3,
    "head_dim": 64,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 64,
    "sliding_window": 24,
    "final_logit_softcapping": 8.0,
    "tie_word_embeddings": True,
}
_GEMMA3_ROPES: dict[str, Any] = {
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}
_EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def _case(architecture: str, model_type: str, base: dict[str, Any], **own: Any) -> dict[str, Any]:
    return {"architectures": [architecture], "model_type": model_type, **base, **own}


def _without(base: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in base.items() if key not in keys}


_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.02 * index for index in range(24)],
    "long_factor": [1.0 + 0.5 * index for index in range(24)],
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

CASES: dict[str, dict[str, Any]] = {
    "llama": _case("LlamaForCausalLM", "llama", _BASE, rope_parameters=_LLAMA3),
    "llama_biases": _case("LlamaForCausalLM", "llama", _BASE, attention_bias=True, mlp_bias=True),
    "mistral": _case("MistralForCausalLM", "mistral", _BASE, sliding_window=24),
    "qwen2": _case("Qwen2ForCausalLM", "qwen2", _without(_BASE, "head_dim"), hidden_size=128),
    "qwen2_window": _case(
        "Qwen2ForCausalLM",
        "qwen2",
        _without(_BASE, "head_dim"),
        hidden_size=128,
        use_sliding_window=True,
        sliding_window=24,
        max_window_layers=1,
    ),
    "qwen3": _case("Qwen3ForCausalLM", "qwen3", _BASE, tie_word_embeddings=True),
    "qwen3_moe": _case("Qwen3MoeForCausalLM", "qwen3_moe", {**_BASE, **_EXPERTS}, norm_topk_prob=True),
    "qwen3_moe_mixed": _case(
        "Qwen3MoeForCausalLM", "qwen3_moe", {**_BASE, **_EXPERTS}, norm_topk_prob=False, mlp_only_layers=[0]
    ),
    "mixtral": _case("MixtralForCausalLM", "mixtral", _BASE, num_local_experts=4, num_experts_per_tok=2),
    "gemma2": _case("Gemma2ForCausalLM", "gemma2", _GEMMA, attn_logit_softcapping=3.0),
    # Six layers: GGUF files leave it to the reader that every sixth one sees everything.
    "gemma3": _case("Gemma3ForCausalLM", "gemma3_text", {**_GEMMA, **_GEMMA3_ROPES}, num_hidden_layers=6),
    "gemma3_scalar": _case(
        "Gemma3ForCausalLM",
        "gemma3_text",
        {**_GEMMA, **_GEMMA3_ROPES},
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        query_pre_attn_scalar=24,
    ),
    "phi3": _case("Phi3ForCausalLM", "phi3", _without(_BASE, "head_dim"), hidden_size=128, sliding_window=40),
    "phi3_longrope": _case(
        "Phi3ForCausalLM",
        "phi3",
        _without(_BASE, "head_dim"),
        hidden_size=256,
        rope_scaling=_LONGROPE,
        partial_rotary_factor=0.75,
        original_max_position_embeddings=64,
    ),
    "smollm3": _case(
        "SmolLM3ForCausalLM", "smollm3", _without(_BASE, "head_dim"), hidden_size=128, num_hidden_layers=4
    ),
    "granite": _case(
        "GraniteForCausalLM",
        "granite",
        _without(_BASE, "head_dim"),
        hidden_size=128,
        embedding_multiplier=12.0,
        residual_multiplier=0.22,
        attention_multiplier=0.1,
        logits_scaling=8.0,
    ),
    "stablelm": _case(
        "StableLmForCausalLM",
        "stablelm",
        _without(_BASE, "head_dim", "rms_norm_eps"),
        hidden_size=256,
        use_qkv_bias=True,
        layer_norm_eps=1e-5,
        partial_rotary_factor=0.25,
    ),
    "starcoder2": _case(
        "Starcoder2ForCausalLM",
        "starcoder2",
        _without(_BASE, "head_dim", "rms_norm_eps"),
        hidden_size=128,
        sliding_window=24,
        tie_word_embeddings=True,
    ),
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": VOCAB,
        "n_embd": 64,
        "n_head": 2,
        "n_layer": 2,
        "n_positions": 128,
        "n_ctx": 128,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
}
"""config.json of the decoders, by case."""

_ENCODER = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_hidden_layers": 3,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": _case("BertModel", "bert", _ENCODER),
    "roberta": _case("RobertaModel", "roberta", {**_ENCODER, "pad_token_id": 1}, type_vocab_size=1),
    "xlm_roberta": _case("XLMRobertaModel", "xlm-roberta", {**_ENCODER, "pad_token_id": 1}, type_vocab_size=1),
    "distilbert": {
        "architectures": ["DistilBertModel"],
        "model_type": "distilbert",
        "vocab_size": VOCAB,
        "dim": 64,
        "hidden_dim": 96,
        "n_heads": 2,
        "n_layers": 3,
        "max_position_embeddings": 128,
    },
    "qwen3_embedding": _case("Qwen3ForCausalLM", "qwen3", _BASE),
    "mistral_embedding": _case("MistralForCausalLM", "mistral", _BASE, sliding_window=24),
    "albert": _case("AlbertModel", "albert", _ENCODER, embedding_size=32),
    "modernbert": _case("ModernBertModel", "modernbert", _ENCODER, local_attention=16, num_hidden_layers=4),
    "modernbert_biases": _case(
        "ModernBertModel",
        "modernbert",
        _ENCODER,
        local_attention=16,
        norm_bias=True,
        attention_bias=True,
        mlp_bias=True,
        classifier_pooling="mean",
    ),
}
"""config.json of the encoders, by case; decoders among them come with a pooling."""
_HEAD_CLASSES = ("ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
_HEADED = ("bert", "roberta", "xlm_roberta", "distilbert", "albert", "modernbert", "modernbert_biases")
HEADED: dict[str, dict[str, Any]] = {
    f"{case}_{head}": {
        **ENCODERS[case],
        "architectures": [ENCODERS[case]["architectures"][0].removesuffix("Model") + head],
        **({} if head == "ForMaskedLM" else {"id2label": {"0": "a", "1": "b", "2": "c"}}),
        **({"classifier_bias": True} if case == "modernbert_biases" else {}),
    }
    for case in _HEADED
    for head in _HEAD_CLASSES
}
"""config.json of the encoders with something on top, by case."""
MARKS = (0, 20, 36)
"""Rows of the 37-token text whose token scores the golden of a masked-LM class holds."""
LAST_TOKEN = {"word_embedding_dimension": 64, "pooling_mode_lasttoken": True}
"""The pooling of decoders that make vectors."""
ENCODER_LENGTHS = (1, 37, 100)
"""Tokens of the texts whose vectors the golden holds; each is a start of ``text()``."""


def text() -> list[int]:
    """Returns the token ids that all goldens speak of."""
    return [int(token) for token in np.random.default_rng(7).integers(3, VOCAB, TEXT_TOKENS)]


def tiny_weights(config: dict[str, Any]) -> dict[str, NDArray[np.float32]]:
    """Returns every stored tensor of the model by the name that transformers gives it, f32."""
    spec = spec_from_config(config)
    tensors: dict[str, NDArray[np.float32]] = {}
    for weight in build_program(spec).weights:
        for part in weight.parts:
            places = family_of(spec).sources(spec, part.role, "hf")
            source = _own_place(places, config)
            if source.name not in tensors:
                tensors[source.name] = _values(source, weight, part.n, Role.of(part.role))
    return tensors


# BERT, RoBERTa and DistilBERT share a family; where each of them keeps what stands on top, and what is below it.
_HEAD_STEMS = {
    "bert": ("cls.", "classifier.weight", "classifier.bias", "bert.pooler."),
    "roberta": ("lm_head.", "classifier.dense.", "classifier.out_proj."),
    "xlm-roberta": ("lm_head.", "classifier.dense.", "classifier.out_proj."),
    "distilbert": ("vocab_", "pre_classifier.", "classifier.weight", "classifier.bias"),
}
_PREFIXES = {"xlm-roberta": "roberta.", "modernbert": "model."}


def _own_place(places: Sequence[Source], config: dict[str, Any]) -> Source:
    """Returns the place by the name that transformers gives it in this class."""
    kind, architecture = config["model_type"], config["architectures"][0]
    heads = _HEAD_STEMS.get(kind, ())
    if kind.endswith("roberta") and architecture.endswith("ForTokenClassification"):
        heads = ("classifier.weight", "classifier.bias")
    if found := [place for place in places if place.name.startswith(heads)]:
        return found[0]
    own = [place for place in places if place.name.startswith("transformer.layer.")]
    source = own[0] if own and kind == "distilbert" else places[0]
    prefix = _PREFIXES.get(kind, f"{kind}.")
    has_prefix = architecture.endswith(_HEAD_CLASSES) and f"{prefix}{source.name}" in {place.name for place in places}
    return replace(source, name=f"{prefix}{source.name}") if has_prefix else source


def _values(source: Source, weight: WeightSpec, n: int, role: Role) -> NDArray[np.float32]:
    """Returns a whole stored tensor. Products keep a variance near 1, scores spread enough for caps to be felt."""
    random = np.random.default_rng(crc32(source.name.encode()))
    rows = n if source.rows is None else source.rows
    if weight.kind == "vector":
        values = 0.3 * random.standard_normal(rows)
        is_norm = role.name.endswith("norm") and not role.is_bias
        return (values + (1.0 - source.offset if is_norm else 0.0)).astype(np.float32)
    shape = (weight.k, rows) if source.is_transposed else (rows, weight.k)
    scale = 0.5 if role.layer < 0 else 1.5 * weight.k**-0.5
    return (scale * random.standard_normal(shape)).astype(np.float32)


def tiny_gguf_weights(config: dict[str, Any]) -> dict[str, NDArray[np.float32]]:
    """Returns the same model's tensors by GGUF name, changed as llama.cpp's converter changes them."""
    spec = spec_from_config(config)
    stored = tiny_weights(config)
    if spec.architecture is Architecture.ENCODER_ONLY:
        stored["embeddings.position_embeddings.weight"] = stored["embeddings.position_embeddings.weight"][
            spec.position_offset :
        ]
    architecture = config["architectures"][0]
    is_interleaved = architecture.startswith(("Granite", "Llama", "Mistral", "Mixtral", "SmolLM3"))
    tensors: dict[str, NDArray[np.float32]] = {}
    for name, values in stored.items():
        target = _gguf_name(name, is_gemma=architecture.startswith("Gemma"))
        if target.endswith(("attn_qkv.weight", "attn_output.weight", "ffn_up.weight", "ffn_down.weight")):
            values = values.T if architecture == "GPT2LMHeadModel" else values
        if is_interleaved and ".attn_q." in target:
            values = _permuted(values, spec.heads)
        if is_interleaved and ".attn_k." in target:
            values = _permuted(values, spec.kv_heads)
        if architecture.startswith("Gemma") and target.endswith("norm.weight"):
            values = values + np.float32(1)
        if "_exps." in target:
            values = np.stack([*tensors[target], values]) if target in tensors else values[None]
        tensors[target] = np.ascontiguousarray(values)
    rope = spec.rope
    if rope is not None and rope.kind is RopeKind.LONGROPE:
        tensors["rope_factors_long.weight"] = np.array(rope.long_factors, np.float32)
        tensors["rope_factors_short.weight"] = np.array(rope.factors, np.float32)
    if rope is not None and rope.kind is RopeKind.LLAMA3:
        tensors["rope_freqs.weight"] = _llama3_factors(rope, spec.head_size)
    return tensors


def _llama3_factors(rope: RopeSpec, head_size: int) -> NDArray[np.float32]:
    """Returns what each frequency is divided by, as the converter has it."""
    wavelengths = 2 * np.pi * rope.theta ** (np.arange(0, head_size, 2) / head_size)
    original, low, high = rope.original_context_tokens, rope.low_freq_factor, rope.high_freq_factor
    smooth = (original / wavelengths - low) / (high - low)
    factors = 1 / ((1 - smooth) / rope.factor + smooth)
    factors = np.where(wavelengths < original / high, 1.0, np.where(wavelengths > original / low, rope.factor, factors))
    return factors.astype(np.float32)


def _permuted(values: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    return permute_rows(values.reshape(len(values), -1), heads).reshape(values.shape)


_GGUF_STEMS = {
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "input_layernorm": "attn_norm",
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "self_attn.qkv_proj": "attn_qkv",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "gate_proj": "ffn_gate_exps",
    "w1": "ffn_gate_exps",
    "up_proj": "ffn_up_exps",
    "w3": "ffn_up_exps",
    "down_proj": "ffn_down_exps",
    "w2": "ffn_down_exps",
}
_GGUF_ENCODER_STEMS = {
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}
_GGUF_WHOLE = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
    "model.embed_tokens": "token_embd",
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "model.norm": "output_norm",
    "transformer.ln_f": "output_norm",
    "lm_head": "output",
}


def _gguf_name(name: str, is_gemma: bool = False) -> str:
    """Returns the GGUF name by a table of its own: the engine's tables are what is tested."""
    stem, _, suffix = name.rpartition(".")
    if stem in _GGUF_WHOLE:
        return f"{_GGUF_WHOLE[stem]}.{suffix}"
    if stem.startswith("encoder.layer."):
        _, _, layer, inner = stem.split(".", 3)
        return f"blk.{layer}.{_GGUF_ENCODER_STEMS[inner]}.{suffix}"
    words = stem.removeprefix("model.layers.").removeprefix("transformer.h.").split(".")
    layer, inner = words[0], ".".join(words[1:])
    if ".experts." in inner:
        inner = words[-1]
    if inner == "post_attention_layernorm":
        return f"blk.{layer}.{'post_attention_norm' if is_gemma else 'ffn_norm'}.{suffix}"
    return f"blk.{layer}.{_GGUF_STEMS[inner]}.{suffix}"


def write_tiny_family_gguf(path: Path, case: str, metadata: dict[str, Any]) -> Path:
    """Writes the case as one GGUF file of f32 tensors, without a tokenizer, and returns the path.

    Args:
        metadata: ``general.architecture`` and the architecture's own keys, as llama.cpp's converter writes them.
    """
    tensors = {
        name: tiny_blocks.encode(values, "F32")
        for name, values in tiny_gguf_weights({**CASES, **ENCODERS}[case]).items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gguf_bytes(metadata, tensors))
    return path


def write_tiny_family(folder: Path, case: str, *, dtype: str = "F32") -> Path:
    """Writes the case as config.json and model.safetensors, without a tokenizer, and returns the folder."""
    config = {**CASES, **ENCODERS, **HEADED}[case]
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tiny_blocks.encode(values, dtype) for name, values in tiny_weights(config).items()}
    (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors, metadata={"format": "pt"}))
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    if case.endswith("_embedding"):
        (folder / "modules.json").write_text(
            json.dumps([{"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}])
        )
        (folder / "1_Pooling").mkdir(exist_ok=True)
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(LAST_TOKEN))
    return folder
