"""The derived safetensors folder against the tensors that a tiny GGUF was made of."""

from pathlib import Path

import numpy as np
import pytest

from headrace.engine.quality import Subject, compare
from headrace.program.lanes import bf16_bits, round_bf16
from headrace.registry.model import open_model
from headrace.testing.derive import dequantise, hf_tensors, tensors_sha256, write_bf16_folder
from headrace.testing.tiny import TinyShape, tiny_tensors, write_tiny_gguf


@pytest.mark.parametrize("stored", ["F32", "F16", "BF16"])
def test_plain_tensors_come_back_in_hf_order(tmp_path: Path, stored: str) -> None:
    gguf = write_tiny_gguf(tmp_path / "tiny.gguf", matrix_type=stored, embedding_type=stored)

    derived = dict(hf_tensors(gguf))

    wanted = tiny_tensors(TinyShape(), 0)
    assert derived.keys() == wanted.keys()
    for name, values in wanted.items():
        # Half precision keeps 11 bits, bf16 8.
        np.testing.assert_allclose(derived[name], values, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize(("stored", "steps"), [("Q8_0", 127), ("Q4_0", 8), ("Q4_1", 15)])
def test_blocks_are_dequantised_within_a_step(tmp_path: Path, stored: str, steps: int) -> None:
    gguf = write_tiny_gguf(tmp_path / "tiny.gguf", matrix_type=stored, embedding_type=stored)

    derived = dict(hf_tensors(gguf))

    for name, values in tiny_tensors(TinyShape(), 0).items():
        if values.ndim == 2:
            blocks = values.reshape(-1, 32)
            spread = np.ptp(blocks, axis=1) if stored == "Q4_1" else np.abs(blocks).max(1)
            # Half a step for rounding; up to a step at the clipped end of Q4_0; float16 scales add 2⁻¹⁰ of the range.
            bound = spread / steps + spread * 2**-9
            assert (np.abs(derived[name].reshape(-1, 32) - blocks) <= bound[:, None] + 1e-6).all(), name


def test_folder_holds_the_rounded_weights_and_scores_like_the_source(tmp_path: Path) -> None:
    gguf = write_tiny_gguf(tmp_path / "tiny.gguf")
    text = [int(token) for token in np.random.default_rng(0).integers(0, 320, 60)]

    digest = write_bf16_folder(gguf, tmp_path / "hf")

    tensors = open_model(tmp_path / "hf").tensors
    source = dict(hf_tensors(gguf))
    assert digest == tensors_sha256({name: bf16_bits(values) for name, values in source.items()})
    for name, values in source.items():
        np.testing.assert_array_equal(dequantise(tensors[name]), round_bf16(values))
    exact = Subject(gguf, dtype="fp32").distributions([text])
    assert compare(exact, Subject(tmp_path / "hf", dtype="fp32").distributions([text])).kl_mean < 1e-3


def test_digest_speaks_of_names_shapes_and_bytes() -> None:
    array = np.arange(6, dtype=np.float32)
    digests = {
        tensors_sha256({"a": array}),
        tensors_sha256({"b": array}),
        tensors_sha256({"a": array.reshape(2, 3)}),
        tensors_sha256({"a": array + 1}),
    }

    assert len(digests) == 4
