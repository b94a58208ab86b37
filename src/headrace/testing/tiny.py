"""Tiny random Llama models on disk, as a safetensors folder or one GGUF file, for tests and benchmarks without weights.

``tiny_tensors`` is the truth: both writers store the same values (the GGUF one quantised, q and k rows permuted as
converters do), so what a loader made of them can be compared with it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.testing import tiny_blocks, tiny_vocabulary
from headrace.testing.tiny_files import gguf_bytes, safetensors_bytes

_NORM_EPS = 1e-5
_ROPE_BASE = 10000.0


@dataclass(frozen=True, slots=True)
class TinyShape:
    """Sizes of a tiny model, named as in DESIGN's shape legend."""

    layers: int = 2
    width: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 32
    hidden: int = 96
    vocab_size: int = 320
    is_tied: bool = True
    context_tokens: int = 512


def tiny_tensors(shape: TinyShape, seed: int) -> dict[str, NDArray[np.float32]]:
    """Returns every tensor by its Hugging Face name, f32 [out, in].

    Matrices have variance 1/in and the embedding 1/4, so activations stay near 1 and logits spread like a model's.
    """
    random = np.random.default_rng(seed)

    def matrix(rows: int, columns: int, scale: float) -> NDArray[np.float32]:
        return (random.standard_normal((rows, columns)) * scale).astype(np.float32)

    def norm() -> NDArray[np.float32]:
        return (1.0 + 0.1 * random.standard_normal(shape.width)).astype(np.float32)

    q_rows, kv_rows = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    tensors = {"model.embed_tokens.weight": matrix(shape.vocab_size, shape.width, 0.5)}
    for layer in range(shape.layers):
        name = f"model.layers.{layer}."
        tensors[name + "input_layernorm.weight"] = norm()
        for part, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows)):
            tensors[f"{name}self_attn.{part}_proj.weight"] = matrix(rows, shape.width, shape.width**-0.5)
        tensors[name + "self_attn.o_proj.weight"] = matrix(shape.width, q_rows, q_rows**-0.5)
        tensors[name + "post_attention_layernorm.weight"] = norm()
        for part in ("gate", "up"):
            tensors[f"{name}mlp.{part}_proj.weight"] = matrix(shape.hidden, shape.width, shape.width**-0.5)
        tensors[name + "mlp.down_proj.weight"] = matrix(shape.width, shape.hidden, shape.hidden**-0.5)
    tensors["model.norm.weight"] = norm()
    if not shape.is_tied:
        tensors["lm_head.weight"] = matrix(shape.vocab_size, shape.width, 0.5)
    return tensors


def tiny_config(shape: TinyShape, dtype: str) -> dict[str, Any]:
    """Returns the content of the model's config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.width,
        "intermediate_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.context_tokens,
        "rms_norm_eps": _NORM_EPS,
        "rope_theta": _ROPE_BASE,
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": shape.is_tied,
        "bos_token_id": tiny_vocabulary.BOS_ID,
        "eos_token_id": tiny_vocabulary.EOS_ID,
        "torch_dtype": {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}[dtype],
    }


def write_tiny_llama(
    folder: Path,
    *,
    seed: int = 0,
    layers: int = 2,
    width: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_size: int = 32,
    hidden: int = 96,
    vocab_size: int = 320,
    is_tied: bool = True,
    context_tokens: int = 512,
    dtype: str = "bf16",
) -> Path:
    """Writes a Hugging Face style folder (``dtype`` bf16, f16 or f32) and returns it. Same arguments, same bytes."""
    shape = TinyShape(layers, width, heads, kv_heads, head_size, hidden, vocab_size, is_tied, context_tokens)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tiny_blocks.encode(values, dtype.upper()) for name, values in tiny_tensors(shape, seed).items()}
    (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors, metadata={"format": "pt"}))
    generation = {"bos_token_id": tiny_vocabulary.BOS_ID, "eos_token_id": tiny_vocabulary.EOS_ID}
    for name, content in (
        ("config.json", tiny_config(shape, dtype)),
        ("generation_config.json", generation),
        ("tokenizer.json", tiny_vocabulary.tokenizer_json(vocab_size)),
        ("tokenizer_config.json", tiny_vocabulary.tokenizer_config(context_tokens)),
    ):
        (folder / name).write_text(json.dumps(content, indent=1, ensure_ascii=False), encoding="utf-8")
    return folder


_GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """Returns the GGUF name of a Hugging Face tensor name."""
    whole = {"model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm", "lm_head.weight": "output"}
    if name in whole:
        return whole[name] + ".weight"
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{_GGUF_NAMES[rest.removesuffix('.weight')]}.weight"


def permute_rows(values: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Returns q or k rows in the order of GGUF llama files: a head's two rotary halves alternate row by row."""
    rows, columns = values.shape
    return values.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_tiny_gguf(
    path: Path,
    *,
    seed: int = 0,
    layers: int = 2,
    width: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_size: int = 32,
    hidden: int = 96,
    vocab_size: int = 320,
    is_tied: bool = True,
    context_tokens: int = 512,
    matrix_type: str = "Q4_1",
    embedding_type: str = "Q8_0",
    types: dict[str, str] | None = None,
) -> Path:
    """Writes one GGUF file of architecture ``llama`` with its tokenizer and returns the path.

    Args:
        matrix_type: a type of ``tiny_blocks.encode``, for every matrix but the embedding and the head.
        types: overrides by GGUF tensor name, e.g. ``{"blk.0.attn_q.weight": "Q4_0"}``.
    """
    shape = TinyShape(layers, width, heads, kv_heads, head_size, hidden, vocab_size, is_tied, context_tokens)
    tensors: dict[str, tiny_blocks.Encoded] = {}
    for name, values in tiny_tensors(shape, seed).items():
        target = gguf_name(name)
        if "attn_q" in target or "attn_k" in target:
            values = permute_rows(values, heads if "attn_q" in target else kv_heads)
        is_vocabulary = target in ("token_embd.weight", "output.weight")
        default = "F32" if values.ndim == 1 else embedding_type if is_vocabulary else matrix_type
        tensors[target] = tiny_blocks.encode(values, (types or {}).get(target, default))
    metadata: dict[str, Any] = {
        "general.architecture": "llama",
        "general.name": "tiny",
        "general.file_type": 3,
        "llama.block_count": layers,
        "llama.context_length": context_tokens,
        "llama.embedding_length": width,
        "llama.feed_forward_length": hidden,
        "llama.attention.head_count": heads,
        "llama.attention.head_count_kv": kv_heads,
        "llama.attention.key_length": head_size,
        "llama.attention.value_length": head_size,
        "llama.attention.layer_norm_rms_epsilon": _NORM_EPS,
        "llama.rope.dimension_count": head_size,
        "llama.rope.freq_base": _ROPE_BASE,
        "llama.vocab_size": vocab_size,
        **tiny_vocabulary.gguf_tokenizer(vocab_size),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gguf_bytes(metadata, tensors))
    return path
