"""AWQ and GPTQ: what was packed comes out, on the exact path to the bit and in four bits within f16 of a minimum."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.engine.quality import Subject, compare
from headrace.engine.weights import load_weights
from headrace.kernels.vm import unpack
from headrace.program.opcodes import Layout
from headrace.program.spec import build_program, spec_from_files
from headrace.registry.model import open_model
from headrace.testing.packed_models import Packing, write_packed_folder
from headrace.testing.tiny import write_tiny_llama

PACKINGS = {
    "awq": Packing("awq"),
    "awq_64": Packing("awq", group=64),
    "gptq": Packing("gptq"),
    "gptq_64": Packing("gptq", group=64),
    "gptq_symmetric": Packing("gptq", is_symmetric=True),
    "gptq_v2": Packing("gptq", is_v2=True),
    "gptq_act_order": Packing("gptq", is_ordered=True),
}


def models(tmp_path: Path, packing: Packing) -> tuple[Path, Path]:
    """Returns a tiny model packed, and the same with dequantised values."""
    source = write_tiny_llama(tmp_path / "source", width=128, hidden=128, layers=1, dtype="f32")
    truth = tmp_path / "truth"
    return write_packed_folder(source, tmp_path / "packed", packing, truth=truth), truth


def loaded(path: Path, dtype: str) -> dict[str, tuple[Layout, NDArray[np.float32]]]:
    files = open_model(path)
    program = build_program(spec_from_files(files))
    weights = load_weights(files, program, dtype=dtype)
    return {
        spec.name: (weight.layout, unpack(weight.layout, weight.data, weight.n, weight.k))
        for spec, weight in zip(program.weights, weights, strict=True)
        if spec.kind == "matrix"
    }


@pytest.mark.parametrize("packing", PACKINGS.values(), ids=PACKINGS)
def test_the_exact_path_reads_every_weight_to_the_bit(tmp_path: Path, packing: Packing) -> None:
    packed, truth = models(tmp_path, packing)

    found, wanted = loaded(packed, "fp32"), loaded(truth, "fp32")

    assert found.keys() == wanted.keys()
    for name, (layout, values) in found.items():
        assert layout is Layout.F32
        # (q − z) · s has at most 16 significant bits; −0 and 0 are the same weight.
        np.testing.assert_array_equal(values, wanted[name][1], err_msg=name)


@pytest.mark.parametrize("packing", PACKINGS.values(), ids=PACKINGS)
def test_four_bits_stay_four_bits(tmp_path: Path, packing: Packing) -> None:
    packed, truth = models(tmp_path, packing)

    found, wanted = loaded(packed, "bf16"), loaded(truth, "fp32")

    for name in ("layers.0.qkv", "layers.0.o", "layers.0.gate_up", "layers.0.down"):
        layout, values = found[name]
        assert layout is (Layout.Q8 if packing.is_ordered else Layout.Q4M)
        largest = np.abs(wanted[name][1]).max(1, keepdims=True)
        # The minimum −z · s in f16: 2^-11 of at most the range of a group. Act-order: half a step of 1/127.
        limit = largest * (1 / 254 + 2**-10 if packing.is_ordered else 2 * 2**-11)
        assert (np.abs(values - wanted[name][1]) <= limit).all(), name


@pytest.mark.parametrize("packing", PACKINGS.values(), ids=PACKINGS)
def test_a_packed_model_answers_as_its_dequantised_twin(tmp_path: Path, packing: Packing) -> None:
    packed, truth = models(tmp_path, packing)
    texts = [[int(token) for token in np.random.default_rng(seed).integers(0, 320, 90)] for seed in (1, 2)]

    exact = Subject(truth, dtype="fp32").distributions(texts)
    report = compare(exact, Subject(packed, dtype="bf16").distributions(texts))

    # As int8 of a random net (test_engine_quality.py): the weights are the same, activations have 8 bits.
    assert report.kl_mean < 5e-3
    assert compare(exact, Subject(packed, dtype="fp32").distributions(texts)).kl_mean == 0


@pytest.mark.parametrize("name", ["quantize_config.json", "quant_config.json"])
def test_settings_beside_config_json_are_read_and_enter_the_digest(tmp_path: Path, name: str) -> None:
    packed, _ = models(tmp_path, Packing("gptq" if name == "quantize_config.json" else "awq"))
    config = json.loads((packed / "config.json").read_text())
    settings = config.pop("quantization_config")
    (packed / "config.json").write_text(json.dumps(config))
    if name == "quant_config.json":
        settings = {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}
    (packed / name).write_text(json.dumps(settings))
    before = open_model(packed)

    (packed / name).write_text(json.dumps({**settings, "note": "another"}))

    assert {tensor.dtype for tensor in before.tensors.values()} >= {settings.get("quant_method", "awq").upper()}
    assert open_model(packed).digest != before.digest


def test_biases_of_zeros_that_the_architecture_lacks_are_ignored(tmp_path: Path) -> None:
    from headrace.registry.formats.safetensors import open_safetensors
    from headrace.testing.tiny_blocks import Encoded
    from headrace.testing.tiny_files import safetensors_bytes

    packed, _ = models(tmp_path, Packing("gptq"))
    tensors = {
        tensor.name: Encoded(tensor.dtype, tensor.shape, tensor.data.tobytes())
        for tensor in open_safetensors(packed / "model.safetensors").values()
    }
    tensors["model.layers.0.self_attn.o_proj.bias"] = Encoded("F16", (128,), bytes(256))
    (packed / "model.safetensors").write_bytes(safetensors_bytes(tensors))

    assert loaded(packed, "bf16")
