"""Prompt rows that ride along with decode rows."""

import pytest

from headrace.policy.chunk import LEAST_ROWS, LEAST_SHARE, ChunkPolicy

ROW_S, DECODE_S = 0.0002, 0.012


def measured() -> ChunkPolicy:
    policy = ChunkPolicy()
    for _ in range(30):
        policy.observe(16, 16, DECODE_S)
        policy.observe(16, 16 + 100, DECODE_S + 100 * ROW_S)
    return policy


def test_nothing_is_limited_before_anything_is_known_or_where_nobody_decodes() -> None:
    assert ChunkPolicy().limit(16, 1) is None
    assert measured().limit(0, 5) is None


def test_one_prompt_among_many_streams_slows_them_by_its_least_share() -> None:
    rows = measured().limit(16, 1)

    assert rows is not None
    assert rows == pytest.approx(LEAST_SHARE / (1 - LEAST_SHARE) * DECODE_S / ROW_S, abs=1)
    assert (DECODE_S + rows * ROW_S) / DECODE_S <= 1 / (1 - LEAST_SHARE)


def test_many_prompts_beside_few_streams_take_the_share_that_they_are() -> None:
    policy = ChunkPolicy()
    policy.observe(2, 2, 0.004)
    policy.observe(0, 512, 512 * ROW_S)

    rows = policy.limit(2, 30)

    assert rows == pytest.approx(15 * 0.004 / ROW_S, abs=1)


def test_chunks_do_not_become_too_small_to_pay() -> None:
    policy = ChunkPolicy()
    policy.observe(1, 1, 0.001)
    policy.observe(0, 512, 512 * 0.001)

    assert policy.limit(1, 1) == LEAST_ROWS


def test_rows_that_become_dearer_become_fewer() -> None:
    policy = measured()
    before = policy.limit(16, 1)

    for _ in range(10):
        policy.observe(16, 16 + 40, DECODE_S + 40 * 2 * ROW_S)

    after = policy.limit(16, 1)
    assert before is not None
    assert after is not None
    assert after < 0.6 * before


def test_a_number_of_streams_never_seen_takes_the_time_of_fewer() -> None:
    policy = measured()

    assert policy.limit(31, 1) == policy.limit(16, 1)
    assert policy.limit(64, 1) == policy.limit(16, 1)
    assert policy.limit(3, 1) is None


def test_the_last_rows_of_a_prompt_are_not_taken_for_what_rows_cost() -> None:
    policy = measured()
    before = policy.limit(16, 1)

    for _ in range(20):
        policy.observe(16, 17, 3 * DECODE_S)

    assert policy.limit(16, 1) == before
