"""The real ALBERT of rxnmapper against transformers in fp32: token ids, and vectors in every served format."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from headrace.registry.cache import default_cache_path
from headrace.registry.model import open_model
from headrace.testing.encoder import encoded
from headrace.text.tokenizer import Tokenizer

from .reactions import write_rxnmapper

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "rxnmapper.npz")
IDS = [row.tolist() for row in np.split(GOLDEN["ids"], np.cumsum(GOLDEN["lengths"])[:-1])]
WHEEL = default_cache_path() / "goldens" / "rxnmapper-0.4.3.whl"
pytestmark = pytest.mark.skipif(not WHEEL.exists(), reason="the reaction model is not in the cache")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rxnmapper(WHEEL, tmp_path_factory.mktemp("rxnmapper") / "model")


def test_reactions_become_the_same_tokens(model: Path) -> None:
    tokenizer = Tokenizer.from_files(open_model(model).tokenizer_files)

    assert [tokenizer.encode(text, add_special=True) for text in GOLDEN["texts"].tolist()] == IDS


def test_the_exact_path_is_that_of_transformers(model: Path) -> None:
    golden = GOLDEN["vectors"]

    error = np.abs(encoded(model, IDS) - golden).max() / np.sqrt((golden**2).mean())

    assert error <= 1e-4


@pytest.mark.parametrize(
    ("settings", "least"),
    [({"dtype": "bf16"}, 0.9999), ({"dtype": "bf16", "quantization": "int8"}, 0.999)],
    ids=["bf16", "int8"],
)
def test_served_formats_stay_close(model: Path, settings: dict[str, str], least: float) -> None:
    cosines = (encoded(model, IDS, **settings).astype(np.float64) * GOLDEN["vectors"]).sum(axis=1)

    assert cosines.min() >= least, np.sort(cosines)[:3]
