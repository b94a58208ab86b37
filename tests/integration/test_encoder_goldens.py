"""Encoder families against transformers: vectors of tiny random models on the exact path (scripts/family-goldens)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest

from headrace.base.errors import ModelError, ModelUnsupportedError
from headrace.kernels.vm import available_isas
from headrace.program.spec import spec_from_config
from headrace.testing.logits import vm_vectors
from headrace.testing.tiny_blocks import encode
from headrace.testing.tiny_families import (
    ENCODER_LENGTHS,
    ENCODERS,
    text,
    tiny_gguf_weights,
    tiny_weights,
    write_tiny_family,
    write_tiny_family_gguf,
)
from headrace.testing.tiny_files import safetensors_bytes

FOLDER = Path(__file__).parents[1] / "golden"
GOLDENS = np.load(FOLDER / "families.npz")
BOUND = 1e-4
TEXTS = [text()[:length] for length in ENCODER_LENGTHS]


def relative_error(case: str, vectors: np.ndarray) -> float:
    """Returns the largest difference over the root mean square of an element."""
    golden = GOLDENS[case]
    return float(np.abs(vectors - golden).max() / np.sqrt((golden**2).mean()))


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("case", ENCODERS)
def test_vectors_are_those_of_transformers(tmp_path: Path, case: str, isa: str) -> None:
    folder = write_tiny_family(tmp_path / case, case)

    assert relative_error(case, vm_vectors(folder, TEXTS, isa=isa)) <= BOUND


@pytest.mark.parametrize("case", ENCODERS)
def test_a_text_alone_has_the_same_bits_as_in_company(tmp_path: Path, case: str) -> None:
    folder = write_tiny_family(tmp_path / case, case)
    together = vm_vectors(folder, TEXTS, threads=2)

    for index, alone in enumerate(TEXTS):
        np.testing.assert_array_equal(vm_vectors(folder, [alone])[0], together[index])


@pytest.mark.parametrize("case", ["bert", "roberta"])
def test_a_gguf_file_is_the_converters_and_gives_the_same_vectors(tmp_path: Path, case: str) -> None:
    converted = json.loads((FOLDER / "families_gguf.json").read_text())[case]
    metadata = {"general.architecture": converted["architecture"], **converted["metadata"]}

    path = write_tiny_family_gguf(tmp_path / f"{case}.gguf", case, metadata)

    made = {
        name: [*values.shape, f"{crc32(values.tobytes()):08x}"]
        for name, values in tiny_gguf_weights(ENCODERS[case]).items()
    }
    assert made == converted["tensors"]
    assert relative_error(case, vm_vectors(path, TEXTS)) <= BOUND


WITHOUT = [
    ("albert", {"hidden_act": "relu"}),
    ("modernbert", {"local_attention": 14}),
    ("modernbert", {"global_attn_every_n_layers": 2}),
    ("modernbert", {"local_rope_theta": 160000.0}),
    ("modernbert_biases", {"classifier_pooling": "cls"}),
]


@pytest.mark.parametrize(
    ("case", "change"), WITHOUT, ids=lambda value: value if isinstance(value, str) else str(*value)
)
def test_the_golden_feels_what_the_family_has_of_its_own(tmp_path: Path, case: str, change: dict[str, Any]) -> None:
    folder = write_tiny_family(tmp_path / case, case)
    (folder / "config.json").write_text(json.dumps({**ENCODERS[case], **change}))

    assert relative_error(case, vm_vectors(folder, TEXTS)) > 10 * BOUND


@pytest.mark.parametrize(
    ("case", "architecture", "prefix", "extra"),
    [
        (
            "albert",
            "AlbertForMaskedLM",
            "albert.",
            ["predictions.bias", "predictions.decoder.bias", "albert.pooler.bias"],
        ),
        ("modernbert", "ModernBertForMaskedLM", "model.", ["head.norm.weight", "decoder.bias"]),
    ],
)
def test_files_with_a_masked_language_model_give_the_same_vectors(
    tmp_path: Path, case: str, architecture: str, prefix: str, extra: list[str]
) -> None:
    tensors = {f"{prefix}{name}": values for name, values in tiny_weights(ENCODERS[case]).items()}
    tensors |= {name: np.ones(64, np.float32) for name in extra}
    (tmp_path / "config.json").write_text(json.dumps({**ENCODERS[case], "architectures": [architecture]}))
    stored = {name: encode(values, "F32") for name, values in tensors.items()}
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(stored))

    assert relative_error(case, vm_vectors(tmp_path, TEXTS)) <= BOUND


def test_a_decoder_that_makes_vectors_comes_with_and_without_prefix_and_head(tmp_path: Path) -> None:
    folder = write_tiny_family(tmp_path / "m", "qwen3_embedding")
    tensors = {
        name.removeprefix("model."): values for name, values in tiny_weights(ENCODERS["qwen3_embedding"]).items()
    }
    del tensors["lm_head.weight"]  # which the folder's own file has
    stored = {name: encode(values, "F32") for name, values in tensors.items()}
    (folder / "model.safetensors").write_bytes(safetensors_bytes(stored))

    assert relative_error("qwen3_embedding", vm_vectors(folder, TEXTS)) <= BOUND


REFUSED = [
    ("albert", {"num_hidden_groups": 2}, "num_hidden_groups"),
    ("albert", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
    ("albert", {"embedding_size": 40}, "embedding_size"),
    ("albert", {"num_attention_heads": 3}, "num_attention_heads"),
    ("modernbert", {"classifier_pooling": "max"}, "classifier_pooling"),
    ("modernbert", {"layer_types": ["full_attention"]}, "layer_types"),
    ("modernbert", {"local_attention": 0}, "local_attention"),
]


@pytest.mark.parametrize(("case", "change", "named"), REFUSED, ids=lambda value: str(value)[:40])
def test_a_wrong_value_is_refused_by_name(case: str, change: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named) as caught:
        spec_from_config({**ENCODERS[case], **change})

    assert (
        not isinstance(caught.value, ModelUnsupportedError) or caught.value.hint == "--engine vllm may run this model"
    )
