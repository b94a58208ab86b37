"""The demo model's tokenizer against ids from a plain BPE written straight from its lists (no shared code)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.registry.model import open_model
from headrace.text.tokenizer import Tokenizer

GOLDEN = Path(__file__).parents[1] / "golden" / "smollm2_tokens.json"

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> Tokenizer:
    return Tokenizer.from_gguf(open_model(demo_model).metadata)


@pytest.mark.parametrize("case", json.loads(GOLDEN.read_text("utf-8")), ids=lambda case: ascii(case["text"])[1:16])
def test_demo_model_encodes_hard_strings_exactly(tokenizer: Tokenizer, case: dict[str, object]) -> None:
    text = str(case["text"])

    ids = tokenizer.encode(text, add_special=False)

    assert ids == case["ids"]
    assert tokenizer.decode(ids, skip_special=False) == text


def test_demo_model_names_its_special_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.special_tokens["bos_token"] == "<|im_start|>"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.vocab_size) == (1, 2, 49152)
    assert tokenizer.encode("x", add_special=True) == tokenizer.encode("x", add_special=False)
