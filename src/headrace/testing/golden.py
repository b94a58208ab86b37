"""Reads the committed goldens of tests/golden (made by scripts/goldens, which documents the format)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headrace.engine.quality import Distributions

_STEPS_PER_NAT = 2048


@dataclass(frozen=True, slots=True)
class Golden:
    """What transformers said.

    Args:
        prompts: token ids in the model's chat template.
        greedy_ids: [prompts, 64].
        greedy_margin: [prompts, 64], logit of the best token minus that of the second.
        texts: token ids.
        reference: next-token distributions after every token of every text but its last, text after text.
        tensors_sha256: digest of the weights that it ran on.
    """

    prompts: list[list[int]]
    greedy_ids: NDArray[np.int64]
    greedy_margin: NDArray[np.float32]
    texts: list[list[int]]
    reference: Distributions
    tensors_sha256: str


def read_golden(path: Path) -> Golden:
    """Returns the golden in ``path``."""
    with np.load(path, allow_pickle=False) as data:
        rounded = -np.cumsum(data["top_steps"].astype(np.int64), axis=1) / _STEPS_PER_NAT
        # Rounding shifts the sum of the top by up to 2⁻¹², far more than a small tail: scale back to what is known.
        listed = np.log1p(-data["tail"].astype(np.float64)) - np.log(np.exp(rounded).sum(axis=1))
        logprobs = rounded + listed[:, None]
        return Golden(
            prompts=_cut(data["prompt_ids"], data["prompt_lengths"]),
            greedy_ids=data["greedy_ids"].astype(np.int64),
            greedy_margin=data["greedy_margin"],
            texts=_cut(data["text_ids"], data["text_lengths"]),
            reference=Distributions(data["top_ids"].astype(np.int32), logprobs),
            tensors_sha256=str(data["tensors_sha256"]),
        )


def _cut(ids: NDArray[np.uint16], lengths: NDArray[np.uint16]) -> list[list[int]]:
    stops = np.cumsum(lengths.astype(np.int64))
    return [ids[stop - length : stop].tolist() for stop, length in zip(stops, lengths, strict=True)]
