"""A tiny BERT through the loader, the encode scheduler and the VM, against a plain float64 forward pass."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from headrace.base.errors import ModelFormatError, ModelUnsupportedError
from headrace.engine.loader import inspect
from headrace.kernels.vm import available_isas
from headrace.protocol.launch import WorkerLaunch
from headrace.testing.encoder import encoded
from headrace.testing.tiny_bert import POSITIONS, WORDS, tiny_bert_scores, tiny_bert_vector, write_tiny_bert

RANDOM = np.random.default_rng(5)
TEXTS = [RANDOM.integers(0, len(WORDS), length).tolist() for length in (1, 5, 31, 32, 33, POSITIONS, 2, 17)]


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_the_exact_path_is_the_definition(tmp_path: Path, pooling: str, isa: str) -> None:
    write_tiny_bert(tmp_path, pooling=pooling)

    got = encoded(tmp_path, TEXTS, isa=isa)

    expected = np.stack([tiny_bert_vector(ids, pooling=pooling) for ids in TEXTS])
    assert np.abs(got - expected).max() < 1e-5


def test_company_step_size_and_threads_change_no_bit(tmp_path: Path) -> None:
    write_tiny_bert(tmp_path)
    together = encoded(tmp_path, TEXTS, dtype="bf16")

    alone = np.concatenate([encoded(tmp_path, [ids], dtype="bf16", threads=1) for ids in TEXTS])
    small_steps = encoded(tmp_path, TEXTS, dtype="bf16", max_step_tokens=POSITIONS, max_sequences=2, threads=3)

    assert np.array_equal(together, alone)
    assert np.array_equal(together, small_steps)


@pytest.mark.parametrize(
    ("settings", "least"), [({"dtype": "bf16"}, 0.9999), ({"dtype": "bf16", "quantization": "int8"}, 0.999)]
)
def test_served_formats_stay_close(tmp_path: Path, settings: dict[str, str], least: float) -> None:
    write_tiny_bert(tmp_path)

    got = encoded(tmp_path, TEXTS, **settings)

    cosines = [float(vector @ tiny_bert_vector(ids)) for vector, ids in zip(got, TEXTS, strict=True)]
    assert min(cosines) >= least


def test_names_with_a_prefix_are_found(tmp_path: Path) -> None:
    write_tiny_bert(tmp_path / "a")
    write_tiny_bert(tmp_path / "b", prefix="bert.")

    assert np.array_equal(encoded(tmp_path / "a", TEXTS[:2]), encoded(tmp_path / "b", TEXTS[:2]))


@pytest.mark.parametrize(
    ("file", "text", "error", "word"),
    [
        ("modules.json", '[{"type": "a.Dense", "path": "2_Dense"}]', ModelUnsupportedError, "Dense"),
        ("modules.json", '[{"type": "a.Pooling", "path": "../x"}]', ModelFormatError, "folder"),
        ("modules.json", '{"type": "a.Pooling"}', ModelFormatError, "list of modules"),
        ("modules.json", '[{"type": "a.Pooling", "path": "9_Missing"}]', ModelFormatError, "9_Missing"),
        ("1_Pooling/config.json", '{"pooling_mode_max_tokens": true}', ModelUnsupportedError, "max_tokens"),
        ("1_Pooling/config.json", '{"pooling_mode_mean_tokens": false}', ModelFormatError, "must be true"),
        ("1_Pooling/config.json", '{"word_embedding_dimension": 9}', ModelFormatError, "word_embedding_dimension"),
        ("1_Pooling/config.json", '{"pooling_mode": "max"}', ModelUnsupportedError, "max"),
    ],
)  # fmt: skip
def test_a_pooling_that_cannot_be_computed_is_refused(
    tmp_path: Path, file: str, text: str, error: type[Exception], word: str
) -> None:
    write_tiny_bert(tmp_path)
    (tmp_path / file).write_text(text)

    with pytest.raises(error, match=word):
        inspect(WorkerLaunch(str(tmp_path), "tiny", socket_fd=-1))


@pytest.mark.parametrize("labels", [1, 3, 16])
def test_scores_of_classes_are_the_definition(tmp_path: Path, labels: int) -> None:
    write_tiny_bert(tmp_path, labels=labels)
    starts = [1, 2, 31, 20, 33, 7, 2, 9]

    got = encoded(tmp_path, TEXTS, second_starts=starts)

    expected = [
        tiny_bert_scores(ids, labels=labels, second_start=start) for ids, start in zip(TEXTS, starts, strict=True)
    ]
    assert np.abs(got - np.stack(expected)).max() < 1e-4
