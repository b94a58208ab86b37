"""Prompt rows that ride along with decode rows."""

import pytest

from headrace.policy.chunk import ChunkConfig, ChunkState, ChunkView, decide, observe

ROW_S, DECODE_S = 0.0002, 0.012
CONFIG = ChunkConfig()


def seen(*steps: tuple[int, int, float], state: ChunkState | None = None) -> ChunkState:
    """The state after steps of (decode rows, all rows, seconds)."""
    state = state or ChunkState()
    for num_decoding, num_rows, step_s in steps:
        state = observe(num_decoding, num_rows, step_s, state, CONFIG)
    return state


MEASURED = seen(*[(16, 16, DECODE_S), (16, 16 + 100, DECODE_S + 100 * ROW_S)] * 30)


def limit(state: ChunkState, num_decoding: int, num_prompts: int) -> int | None:
    same, decision = decide(ChunkView(num_decoding, num_prompts), state, CONFIG, 0.0)
    assert same == state
    assert decision.reason
    return decision.rows


def test_nothing_is_limited_before_anything_is_known_or_where_nobody_decodes() -> None:
    assert limit(ChunkState(), 16, 1) is None
    assert limit(MEASURED, 0, 5) is None


def test_one_prompt_among_many_streams_slows_them_by_its_least_share() -> None:
    rows = limit(MEASURED, 16, 1)

    assert rows == pytest.approx(0.45 / 0.55 * DECODE_S / ROW_S, abs=1)
    assert (DECODE_S + rows * ROW_S) / DECODE_S <= 1 / 0.55


def test_many_prompts_beside_few_streams_take_the_share_that_they_are() -> None:
    state = seen((2, 2, 0.004), (0, 512, 512 * ROW_S))

    assert limit(state, 2, 30) == pytest.approx(15 * 0.004 / ROW_S, abs=1)


def test_chunks_do_not_become_too_small_to_pay() -> None:
    state = seen((1, 1, 0.001), (0, 512, 512 * 0.001))

    assert limit(state, 1, 1) == CONFIG.least_rows == 4


def test_rows_that_become_dearer_become_fewer() -> None:
    before = limit(MEASURED, 16, 1)

    after = limit(seen(*[(16, 16 + 40, DECODE_S + 40 * 2 * ROW_S)] * 10, state=MEASURED), 16, 1)

    assert before is not None
    assert after is not None
    assert after < 0.6 * before


def test_a_number_of_streams_never_seen_takes_the_time_of_fewer() -> None:
    assert limit(MEASURED, 31, 1) == limit(MEASURED, 16, 1)
    assert limit(MEASURED, 64, 1) == limit(MEASURED, 16, 1)
    assert limit(MEASURED, 3, 1) is None


def test_the_last_rows_of_a_prompt_are_not_taken_for_what_rows_cost() -> None:
    assert seen(*[(16, 17, 3 * DECODE_S)] * 20, state=MEASURED) == MEASURED


def test_an_earlier_state_stays_as_it_was() -> None:
    before = seen((4, 4, 0.01))

    observe(4, 4, 0.02, before, CONFIG)

    assert before == seen((4, 4, 0.01))
