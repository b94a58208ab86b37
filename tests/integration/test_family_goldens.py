"""Every family against transformers: the logits of tiny random models on the exact path, from both kinds of file.

tests/golden/families.npz holds transformers' logits, families_gguf.json what llama.cpp's converter makes of the same
models (scripts/family-goldens).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest

from headrace.testing.logits import vm_logits
from headrace.testing.tiny_families import (
    CASES,
    POSITIONS,
    text,
    tiny_gguf_weights,
    write_tiny_family,
    write_tiny_family_gguf,
)

FOLDER = Path(__file__).parents[1] / "golden"
GOLDENS = np.load(FOLDER / "families.npz")
CONVERTED: dict[str, dict[str, Any]] = json.loads((FOLDER / "families_gguf.json").read_text())
BOUND = 1e-4
# GGUF has no key for these, so such a file is another model: Mistral's window, Gemma's other scale of the scores.
LOST_IN_GGUF = {"mistral", "gemma3_scalar"}


def assert_like_transformers(case: str, logits: np.ndarray) -> None:
    golden = GOLDENS[case].astype(np.float64)
    error = np.abs(logits - golden).max(axis=1) / np.sqrt((golden**2).mean(axis=1))
    assert error.max() <= BOUND, f"relative error by row {error}"


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(tmp_path: Path, case: str) -> None:
    folder = write_tiny_family(tmp_path / case, case)

    assert_like_transformers(case, vm_logits(folder, text(), POSITIONS))


@pytest.mark.parametrize("case", CONVERTED)
def test_gguf_tensors_are_those_of_the_converter(case: str) -> None:
    tensors = tiny_gguf_weights(CASES[case])

    made = {name: [*values.shape, f"{crc32(values.tobytes()):08x}"] for name, values in tensors.items()}

    expected = CONVERTED[case]["tensors"]
    if "rope_freqs.weight" in made:
        made["rope_freqs.weight"][-1] = expected["rope_freqs.weight"][-1]  # rounded elsewhere; the logits tell
    assert made == expected


@pytest.mark.parametrize("case", [case for case in CONVERTED if case not in LOST_IN_GGUF])
def test_logits_of_a_gguf_file_are_those_of_transformers(tmp_path: Path, case: str) -> None:
    golden = CONVERTED[case]
    metadata = {"general.architecture": golden["architecture"], **golden["metadata"]}

    path = write_tiny_family_gguf(tmp_path / f"{case}.gguf", case, metadata)

    assert_like_transformers(case, vm_logits(path, text(), POSITIONS))
