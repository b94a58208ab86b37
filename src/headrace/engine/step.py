"""One step as values: the plan that the scheduler makes, and the result that the executor brings back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.engine.request import Request


class Chunk(NamedTuple):
    """Rows of one sequence in a step: its tokens ``start … start + rows − 1``.

    Args:
        request: read by the executor (tokens, blocks, sampling), changed by the scheduler only.
        is_sampled: the last row chooses a new token.
        score_start, score_stop: prompt positions whose tokens this chunk's rows score (the row before each of them).
    """

    request: Request
    start: int
    rows: int
    is_sampled: bool
    score_start: int = 0
    score_stop: int = 0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step runs. Output rows: the sampled ones in chunk order, then the scored ones in chunk order.

    Args:
        is_repeat: the plan before this one decoded the same sequences in the same order from the same blocks, and each
            has moved on by the tokens of its steps: what was prepared needs only new tokens and positions.
        num_steps: decode steps to run in a row, at most; above 1 only where every chunk is one sampled row whose choice
            needs nothing but the tokens before it, and holds the blocks of all steps.
    """

    chunks: tuple[Chunk, ...]
    num_rows: int
    num_sampled: int
    num_scored: int
    is_repeat: bool
    reason: str
    num_steps: int = 1


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the VM says, in the order of the plan's output rows; one step after the other where several were run.

    Args:
        results: [L] RESULT_DTYPE
        top_ids: [L, max_top] i32, the first ``num_top`` of a row are filled
        top_logprobs: [L, max_top] f32
    """

    results: npt.NDArray[np.void]
    top_ids: npt.NDArray[np.int32]
    top_logprobs: npt.NDArray[np.float32]
