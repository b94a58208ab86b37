"""Batching decisions on hand-made columns."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from headrace.policy.batch import BatchConfig, BatchState, BatchView, decide

CONFIG = BatchConfig(max_sequences=4, max_step_tokens=64)
EMPTY = BatchView(
    run_rows=(),
    run_computed=(),
    run_blocks=(),
    run_releasable_blocks=(),
    wait_rows=(),
    wait_blocks=(),
    available_blocks=100,
    total_blocks=100,
)


def decoding(*computed: int, available: int = 100) -> BatchView:
    blocks = [-(-count // 32) for count in computed]
    return replace(
        EMPTY,
        run_rows=[1] * len(computed),
        run_computed=list(computed),
        run_blocks=blocks,
        run_releasable_blocks=blocks,
        available_blocks=available,
    )


def test_every_decoding_sequence_gets_its_row() -> None:
    _, decision = decide(decoding(10, 32, 500), BatchState(), CONFIG, 0.0)

    assert decision.run_rows == (1, 1, 1)
    assert decision.num_kept == 3


def test_prefill_fills_what_decode_rows_leave_of_the_budget() -> None:
    view = replace(EMPTY, run_rows=[1, 500], run_computed=[10, 0], run_blocks=[1, 16])

    _, decision = decide(view, BatchState(), CONFIG, 0.0)

    assert decision.run_rows == (1, 63)


def test_prompts_take_no_more_rows_beside_decode_rows_than_they_may() -> None:
    view = replace(
        EMPTY, run_rows=[1, 500], run_computed=[10, 0], run_blocks=[1, 16], wait_rows=[40], wait_blocks=[2],
        prefill_rows=20,
    )  # fmt: skip

    _, decision = decide(view, BatchState(), CONFIG, 0.0)
    _, alone = decide(replace(view, run_rows=[500, 500]), BatchState(), CONFIG, 0.0)

    assert (decision.run_rows, decision.admit_rows) == ((1, 20), ())
    assert "20 prefill rows" in decision.reason
    assert sum(alone.run_rows) == 64


def test_waiting_ones_are_let_in_in_order_until_the_budget_is_spent() -> None:
    view = replace(EMPTY, wait_rows=[40, 40, 40], wait_blocks=[2, 2, 2])

    _, decision = decide(view, BatchState(), CONFIG, 0.0)

    assert decision.admit_rows == (40, 24)
    assert "row budget spent" in decision.reason


def test_a_head_that_does_not_fit_is_not_overtaken() -> None:
    view = replace(decoding(10, available=20), wait_rows=[1000, 10], wait_blocks=[30, 1])

    _, decision = decide(view, BatchState(), CONFIG, 0.0)

    assert decision.admit_rows == ()
    assert "needs 30 blocks, 20 are available" in decision.reason


def test_no_more_sequences_run_than_the_limit() -> None:
    view = replace(decoding(1, 1, 1), wait_rows=[5, 5], wait_blocks=[1, 1])

    _, decision = decide(view, BatchState(), CONFIG, 0.0)

    assert decision.admit_rows == (5,)
    assert "4 sequences run, the limit" in decision.reason


def test_without_a_block_the_least_important_is_preempted_for_the_most_important() -> None:
    state, decision = decide(decoding(32, 10, 40, available=0), BatchState(), CONFIG, 0.0)

    assert decision.run_rows[:2] == (1, 1)
    assert decision.num_kept == 2
    assert state.admit_below == 2


def test_the_one_that_needs_the_block_gives_way_when_it_is_the_least_important() -> None:
    _, decision = decide(decoding(10, 32, available=0), BatchState(), CONFIG, 0.0)

    assert decision.run_rows == (1, 0)
    assert decision.num_kept == 1


def test_the_first_one_goes_on_even_when_shared_blocks_hide_what_the_others_release() -> None:
    view = replace(decoding(32, 32, available=0), run_releasable_blocks=[0, 0])

    _, decision = decide(view, BatchState(), CONFIG, 0.0)

    assert decision.run_rows == (1, 0)
    assert decision.num_kept == 1


def test_after_a_preemption_nobody_enters_until_somebody_left() -> None:
    view = replace(decoding(5, 5), wait_rows=[4], wait_blocks=[1])

    held, decision = decide(view, BatchState(admit_below=2), CONFIG, 0.0)
    freed, later = decide(replace(decoding(5), wait_rows=[4], wait_blocks=[1]), held, CONFIG, 0.0)

    assert decision.admit_rows == ()
    assert "fewer than 2 run" in decision.reason
    assert later.admit_rows == (4,)
    assert freed.admit_below is None


@pytest.mark.parametrize("seed", range(200))
def test_random_decisions_stay_inside_budget_slots_and_blocks(seed: int) -> None:
    rng = random.Random(seed)
    num_running = rng.randint(0, 4)
    computed = [rng.randint(0, 400) for _ in range(num_running)]
    rows = [rng.choice([1, 1, rng.randint(2, 300)]) for _ in range(num_running)]
    blocks = [-(-(c + (r if r > 1 else 0)) // 32) or 1 for c, r in zip(computed, rows, strict=True)]
    available = rng.choice([0, 1, 2, 8]) if num_running != 1 else 1  # alone, a sequence always fits
    waiting = [(rng.randint(1, 300), rng.randint(1, 10)) for _ in range(rng.randint(0, 5))]
    view = BatchView(
        run_rows=rows,
        run_computed=computed,
        run_blocks=blocks,
        run_releasable_blocks=blocks,
        wait_rows=[row for row, _ in waiting],
        wait_blocks=[block for _, block in waiting],
        available_blocks=available,
        total_blocks=sum(blocks) + available,
    )

    _, decision = decide(view, BatchState(rng.choice([None, 1, 3])), CONFIG, 0.0)

    kept = range(decision.num_kept)
    assert sum(decision.run_rows) + sum(decision.admit_rows) <= CONFIG.max_step_tokens
    assert decision.num_kept + len(decision.admit_rows) <= CONFIG.max_sequences
    assert all(decision.run_rows[i] == 0 for i in range(decision.num_kept, num_running))
    assert all(0 <= decision.run_rows[i] <= rows[i] for i in kept)
    released = sum(blocks[decision.num_kept :])
    needed = sum(max(0, -(-(computed[i] + decision.run_rows[i]) // 32) - blocks[i]) for i in kept)
    admitted = sum(block for _, block in waiting[: len(decision.admit_rows)])
    assert needed + admitted <= view.available_blocks + released
    if num_running or waiting:
        held = num_running > 0 and not any(decision.run_rows)
        assert not held, "something always moves"
    assert decision.reason
