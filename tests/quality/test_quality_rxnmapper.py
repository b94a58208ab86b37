"""The real ALBERT of rxnmapper against transformers in fp32: token ids, and vectors in every served format."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from headrace.base.errors import ModelUnsupportedError
from headrace.engine.encode_executor import likeliest
from headrace.registry.cache import default_cache_path
from headrace.registry.model import open_model
from headrace.registry.wheel import unpack_model
from headrace.testing.encoder import encoded, encoded_masks
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


def test_the_wheel_itself_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(ModelUnsupportedError, match=r"pytorch_model\.bin.*never fetched.*convert it"):
        unpack_model(WHEEL, tmp_path, "pypi:rxnmapper==0.4.3", lambda name, done, total: None)


def test_hidden_tokens_of_reactions_are_found(model: Path) -> None:
    tokenizer = Tokenizer.from_files(open_model(model).tokenizer_files)
    ids = [tokenizer.encode(text, add_special=True) for text in GOLDEN["masked"].tolist()]
    mask = tokenizer.mask_token_id()
    assert mask is not None

    found = encoded_masks(model, ids, [[row.index(mask)] for row in ids], 3)

    expected = likeliest(GOLDEN["scores"], 3)
    assert np.abs(np.concatenate(found)[:, :, 1] - expected[:, :, 1]).max() <= 1e-4
    assert np.array_equal(np.concatenate(found)[:, 0, 0], expected[:, 0, 0])
    # transformers misses one of the five: what a reduction leaves.
    assert sum(row[0, 0, 0] == token for row, token in zip(found, GOLDEN["hidden"], strict=True)) == 4
