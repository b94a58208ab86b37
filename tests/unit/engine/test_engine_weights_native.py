"""Loading with the native packer: what the VM reads is what was stored, for every stored type and layout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.engine.quantize import to_f32
from headrace.engine.weights import load_weights
from headrace.kernels.vm import packed_bytes as native_packed_bytes
from headrace.kernels.vm import unpack
from headrace.program.cost import layout_bytes
from headrace.program.opcodes import Layout
from headrace.program.spec import build_program, spec_from_files
from headrace.registry.model import open_model
from headrace.testing.tiny import TinyShape, tiny_tensors, write_tiny_gguf, write_tiny_llama
from headrace.testing.tiny_blocks import encode


def stored(values: NDArray[np.float32], kind: str) -> NDArray[np.float32]:
    """Returns the values as a file of ``kind`` holds them."""
    raw = np.frombuffer(encode(values, kind).data, np.uint8).reshape(len(values), -1)
    return to_f32(kind, raw, values.shape[1])


def fused(kind: str) -> dict[str, NDArray[np.float32]]:
    """Returns the matrices of layer 0 in program order, from the truth."""
    truth = {name: stored(values, kind) for name, values in tiny_tensors(TinyShape(), 0).items() if values.ndim == 2}
    name = "model.layers.0."
    gate, up = (truth[f"{name}mlp.{part}_proj.weight"].reshape(-1, 16, 64) for part in ("gate", "up"))
    return {
        "layers.0.qkv": np.concatenate([truth[f"{name}self_attn.{part}_proj.weight"] for part in "qkv"]),
        "layers.0.gate_up": np.stack([gate, up], axis=1).reshape(-1, 64),
        "layers.0.o": truth[f"{name}self_attn.o_proj.weight"],
        "layers.0.down": truth[f"{name}mlp.down_proj.weight"],
        "embed": truth["model.embed_tokens.weight"],
    }


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_packed_weights_hold_the_stored_values(tmp_path: Path, kind: str, dtype: str) -> None:
    files = open_model(write_tiny_gguf(tmp_path / "m.gguf", matrix_type=kind, embedding_type=kind))
    program = build_program(spec_from_files(files))

    weights = load_weights(files, program, dtype=dtype)

    by_name = {spec.name: weight for spec, weight in zip(program.weights, weights, strict=True)}
    for name, expected in fused(kind).items():
        weight = by_name[name]
        found = unpack(weight.layout, weight.data, weight.n, weight.k)
        if kind == "F32" and dtype == "bf16":
            expected = stored(expected, "BF16")
        # Q5_1 in Q8: half a step of 1/127 of a group's largest value, which is below 2 here.
        limit = 2 / 254 * 1.01 if kind == "Q5_1" and dtype == "bf16" else 0
        assert np.abs(found - expected).max() <= limit, name


# int4 may cut a tenth of the range off either end where that serves the other weights.
@pytest.mark.parametrize(("quantization", "limit_ratio"), [("int8", 0.5 / 127), ("int4", 0.5 / 15 + 0.1)])
def test_quantising_at_load_stays_near_what_was_stored(tmp_path: Path, quantization: str, limit_ratio: float) -> None:
    files = open_model(write_tiny_llama(tmp_path / "m"))
    program = build_program(spec_from_files(files))

    weights = load_weights(files, program, quantization=quantization)

    weight = next(w for spec, w in zip(program.weights, weights, strict=True) if spec.name == "layers.0.gate_up")
    found = unpack(weight.layout, weight.data, weight.n, weight.k).reshape(-1, 32)
    truth = fused("BF16")["layers.0.gate_up"].reshape(-1, 32)
    span = np.abs(truth).max(1) if quantization == "int8" else truth.max(1) - truth.min(1)
    # That, and as much again for scale and minimum rounded to f16 (2^-11 of the largest value).
    limit = limit_ratio * span + 2 * 2**-11 * np.abs(truth).max(1)
    assert weight.layout is (Layout.Q8 if quantization == "int8" else Layout.Q4M)
    assert (np.abs(found - truth).max(1) <= limit).all()


@pytest.mark.parametrize("layout", [layout for layout in Layout if layout not in (Layout.VECTOR_F32, Layout.ROPE_F32)])
def test_sizes_agree_with_the_native_library(layout: Layout) -> None:
    assert layout_bytes(layout, 33, 96) == native_packed_bytes(layout, 33, 96)
