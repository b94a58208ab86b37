"""Makes the safetensors folder of a Llama-family GGUF: weights dequantised, rounded to bf16, rows in HF order.

It is the model that the goldens in tests/golden speak of. transformers is not needed: ``tensors_sha256`` of what is
made here equals the digest that the oracle script (scripts/goldens) took of transformers' own conversion.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.program.families.registry import family_of
from headrace.program.ir import Part, WeightSpec
from headrace.program.lanes import F32, bf16_bits, bf16_values
from headrace.program.model import ModelSpec, RopeKind
from headrace.program.spec import build_program, spec_from_files
from headrace.registry.formats.tensor import TensorView
from headrace.registry.model import open_model
from headrace.testing.tiny_blocks import Encoded
from headrace.testing.tiny_files import safetensors_bytes

_BLOCK = 32


def dequantise(tensor: TensorView) -> F32:
    """Returns a stored tensor as f32; products and sums are rounded one after the other, as ggml does."""
    match tensor.dtype:
        case "F32":
            values = tensor.data.view("<f4").astype(np.float32)
        case "F16":
            values = tensor.data.view("<f2").astype(np.float32)
        case "BF16":
            values = bf16_values(tensor.data.view("<u2"))
        case "Q8_0":
            blocks = tensor.data.reshape(-1, 2 + _BLOCK)
            values = blocks[:, 2:].view(np.int8).astype(np.float32) * _halves(blocks, 0)
        case "Q4_0":
            blocks = tensor.data.reshape(-1, 2 + _BLOCK // 2)
            values = (_nibbles(blocks[:, 2:]) - np.float32(8)) * _halves(blocks, 0)
        case "Q4_1":
            blocks = tensor.data.reshape(-1, 4 + _BLOCK // 2)
            values = _nibbles(blocks[:, 4:]) * _halves(blocks, 0) + _halves(blocks, 2)
        case _:
            raise NotImplementedError(f"{tensor.name} is {tensor.dtype}")
    return values.reshape(tensor.shape)


def _halves(blocks: NDArray[np.uint8], start: int) -> F32:
    return np.ascontiguousarray(blocks[:, start : start + 2]).view("<f2").astype(np.float32)


def _nibbles(quants: NDArray[np.uint8]) -> F32:
    return np.concatenate([quants & 15, quants >> 4], axis=1).astype(np.float32)


def unpermute(rows: NDArray[Any], head_size: int) -> NDArray[Any]:
    """Returns query or key rows from GGUF's interleaved RoPE order in half-split order, head by head."""
    heads = rows.reshape(-1, head_size // 2, 2, *rows.shape[1:])
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(rows.shape)


def hf_tensors(path: Path) -> Iterator[tuple[str, F32]]:
    """Yields HF name and f32 values of every tensor of a Llama-family GGUF."""
    files = open_model(path)
    spec = spec_from_files(files)
    family = family_of(spec)
    parts: list[tuple[WeightSpec, Part]] = [(w, p) for w in build_program(spec).weights for p in w.parts]
    for _, part in parts:
        source = family.sources(spec, part.role, "gguf")[0]
        values = dequantise(files.tensors[source.name])
        yield (
            family.sources(spec, part.role, "hf")[0].name,
            unpermute(values, spec.head_size) if source.is_interleaved else values,
        )


def tensors_sha256(tensors: Mapping[str, NDArray[Any]]) -> str:
    """Returns the digest of names, shapes and little-endian bytes, in name order."""
    hasher = hashlib.sha256()
    for name in sorted(tensors):
        hasher.update(f"{name} {list(tensors[name].shape)}\n".encode())
        hasher.update(np.ascontiguousarray(tensors[name]).tobytes())
    return hasher.hexdigest()


def write_bf16_folder(gguf: Path, folder: Path) -> str:
    """Writes config.json and model.safetensors (BF16) of a GGUF into ``folder``; returns ``tensors_sha256``.

    Cost: the model in bf16, twice, in memory.
    """
    tensors = {name: bf16_bits(values) for name, values in hf_tensors(gguf)}
    encoded = {name: Encoded("BF16", bits.shape, bits.tobytes()) for name, bits in tensors.items()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_config(spec_from_files(open_model(gguf))), indent=2))
    (folder / "model.safetensors").write_bytes(safetensors_bytes(encoded, {"format": "pt"}))
    return tensors_sha256(tensors)


def _config(spec: ModelSpec) -> dict[str, Any]:
    assert spec.rope is not None
    assert spec.rope.kind is RopeKind.DEFAULT
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "hidden_size": spec.width,
        "intermediate_size": spec.hidden,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_size,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.context_tokens,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope.theta,
        "tie_word_embeddings": spec.is_tied,
        "bos_token_id": spec.bos_token_id,
        "eos_token_id": list(spec.eos_token_ids),
    }
