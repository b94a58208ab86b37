"""What one engine step runs: who gets rows, who is let in, who gives its blocks back.

Pure: columns in, a decision out. The scheduler builds the columns each step and carries the decision out; the
simulator calls the same function. The rules, in order:

1. Decode rows first: every running sequence with one row left gets it.
2. A sequence that needs a block when none is available takes it from the least important one running, which is
   preempted: it gives all its blocks back and waits. The most important one always goes on, so nothing deadlocks.
3. Prefill chunks of running sequences fill what is left of the row budget, and beside decode rows no more than
   ``policy.chunk`` allows.
4. Then waiting ones are let in, most important first. Nobody overtakes a head of the queue that does not fit yet.

How the rows are cut into chunks never shows in the results (the determinism contract), so this file is free to choose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BatchConfig:
    """Limits of a step.

    Args:
        max_sequences: sequences that may run together.
        max_step_tokens: rows of one step, ≥ ``max_sequences`` so that every decode row fits.
    """

    max_sequences: int
    max_step_tokens: int
    block_tokens: int = 32


@dataclass(frozen=True, slots=True)
class BatchView:
    """What there is, as columns; the most important sequence comes first in both groups.

    Args:
        run_rows: tokens without KV yet, ≥ 1; 1 means decoding.
        run_computed: tokens with KV.
        run_blocks: blocks held.
        run_releasable_blocks: blocks that become available when it is preempted (others may share some). May be empty
            while ``available_blocks`` ≥ number of running sequences: nobody can run short then.
        wait_rows: tokens to compute after what the prefix cache gives.
        wait_blocks: available blocks that letting it in takes, for all its tokens.
        available_blocks: free or evictable.
        total_blocks: blocks of the pool; any one sequence fits it alone.
        prefill_rows: rows of prompts that may run beside decode rows; None for as many as the step holds.
    """

    run_rows: Sequence[int]
    run_computed: Sequence[int]
    run_blocks: Sequence[int]
    run_releasable_blocks: Sequence[int]
    wait_rows: Sequence[int]
    wait_blocks: Sequence[int]
    available_blocks: int
    total_blocks: int
    prefill_rows: int | None = None


@dataclass(frozen=True, slots=True)
class BatchState:
    """What is remembered from step to step.

    Args:
        admit_below: after a preemption nobody is let in until fewer than this many run: the blocks that were short
            then are shorter now, and letting the victim back in would only recompute it in vain.
    """

    admit_below: int | None = None


@dataclass(frozen=True, slots=True)
class BatchDecision:
    """What to run.

    Args:
        run_rows: rows of each running sequence; 0 sits this step out.
        num_kept: running sequences from this index on are preempted.
        admit_rows: rows of the first waiting sequences, in order; those behind stay.
        reason: what was decided, and what stopped it from being more.
    """

    run_rows: tuple[int, ...]
    num_kept: int
    admit_rows: tuple[int, ...]
    reason: str


def decide(view: BatchView, state: BatchState, config: BatchConfig, now_s: float) -> tuple[BatchState, BatchDecision]:
    """Decides one step. Cost: O(running + admitted), a few microseconds.

    ``now_s`` belongs to the shape of every policy; batching looks at no clock.
    """
    num_running = len(view.run_rows)
    rows, num_kept, available = _give_decode_rows(view, config)
    num_decoding = sum(rows)
    budget = config.max_step_tokens - num_decoding
    if num_decoding and view.prefill_rows is not None:
        budget = min(budget, view.prefill_rows)
    whole_budget = budget

    for index in range(num_kept):
        if budget == 0:
            break
        if view.run_rows[index] > 1:
            rows[index] = min(view.run_rows[index], budget)
            budget -= rows[index]

    if num_kept < num_running:
        reason = f"{num_running - num_kept} preempted: no block left"
        state = BatchState(admit_below=max(num_kept, 1))
        admitted: list[int] = []
    else:
        if state.admit_below is not None and num_running < state.admit_below:
            state = BatchState()
        admitted, reason = _admit(view, state, config, budget, available)
        budget -= sum(admitted)

    num_prefill_rows = whole_budget - budget
    reason = f"{num_decoding} decode rows, {num_prefill_rows} prefill rows; {reason}"
    return state, BatchDecision(tuple(rows), num_kept, tuple(admitted), reason)


def _give_decode_rows(view: BatchView, config: BatchConfig) -> tuple[list[int], int, int]:
    """Returns rows per running sequence, how many are kept, and the blocks still available."""
    num_kept = len(view.run_rows)
    rows = [0] * num_kept
    available = view.available_blocks
    block_tokens = config.block_tokens
    index = 0
    while index < num_kept:
        if view.run_rows[index] == 1:
            # Prefill holds blocks for all its tokens since it was let in; only a decode row can need one more.
            if view.run_computed[index] >= view.run_blocks[index] * block_tokens:
                if index == 0 and available == 0:
                    # Shared blocks make the releasable counts pessimistic. Alone, a sequence always fits.
                    num_kept, available = _preempt_for_first(view, num_kept)
                while available == 0 and num_kept > index + 1:
                    num_kept -= 1
                    available += view.run_releasable_blocks[num_kept]
                if available == 0:
                    num_kept = index
                    break
                available -= 1
            rows[index] = 1
        index += 1
    return rows, num_kept, available


def _preempt_for_first(view: BatchView, num_kept: int) -> tuple[int, int]:
    available = 0
    while available == 0 and num_kept > 1:
        num_kept -= 1
        available += view.run_releasable_blocks[num_kept]
    return num_kept, available or view.total_blocks - view.run_blocks[0]


def _admit(
    view: BatchView, state: BatchState, config: BatchConfig, budget: int, available: int
) -> tuple[list[int], str]:
    """Returns the rows of those let in, and what stopped it."""
    admitted: list[int] = []
    if state.admit_below is not None:
        return admitted, f"admission waits until fewer than {state.admit_below} run"
    num_running = len(view.run_rows)
    for wait_rows, wait_blocks in zip(view.wait_rows, view.wait_blocks, strict=True):
        if num_running == config.max_sequences:
            return admitted, f"{config.max_sequences} sequences run, the limit"
        if budget == 0:
            return admitted, "row budget spent"
        # One block of headroom for each sequence that runs: it decodes at least a block's worth before any of them
        # can be preempted, so a step's prefill is never thrown away in the next step.
        if wait_blocks + num_running > available:
            return admitted, f"head of the queue needs {wait_blocks} blocks, {available} are available"
        admitted.append(min(wait_rows, budget))
        budget -= admitted[-1]
        available -= wait_blocks
        num_running += 1
    return admitted, "nobody else waits"
