"""Memory of one machine among several models."""

from __future__ import annotations

import random

import pytest

from headrace.policy.shares import Wish, decide


@pytest.mark.parametrize(
    ("wishes", "available", "parts"),
    [
        pytest.param([Wish(10, 100, 1)], 50, (50,), id="alone"),
        pytest.param([Wish(10, 100, 1), Wish(10, 100, 1)], 60, (30, 30), id="equal"),
        pytest.param([Wish(10, 100, 3), Wish(10, 100, 1)], 60, (40, 20), id="weighted"),
        pytest.param([Wish(10, 12, 3), Wish(10, 100, 1)], 60, (12, 48), id="what one cannot use goes to the other"),
        pytest.param([Wish(10, 12, 1), Wish(10, 13, 1)], 60, (12, 13), id="more than anybody can use"),
        pytest.param([Wish(30, 99, 1), Wish(30, 99, 1)], 60, (30, 30), id="exactly the least"),
        pytest.param([Wish(30, 99, 1), Wish(31, 99, 1)], 60, None, id="not enough"),
        pytest.param([], 60, (), id="nobody"),
    ],
)
def test_each_gets_its_least_and_its_part_of_the_rest(
    wishes: list[Wish], available: int, parts: tuple[int, ...] | None
) -> None:
    assert decide(wishes, available).parts == parts


def test_parts_never_exceed_what_there_is_nor_leave_anybody_below_the_least() -> None:
    choose = random.Random(3)
    for _ in range(500):
        wishes = []
        for _ in range(choose.randint(1, 6)):
            least = choose.randint(0, 2**33)
            wishes.append(Wish(least, least + choose.randint(0, 2**34), choose.choice([0.1, 1, 2, 7.5])))
        available = sum(wish.least for wish in wishes) + choose.randint(0, 2**35)

        parts = decide(wishes, available).parts

        assert parts is not None
        assert sum(parts) <= available
        assert all(wish.least <= part <= wish.most for wish, part in zip(wishes, parts, strict=True))
        is_full = all(part == wish.most for wish, part in zip(wishes, parts, strict=True))
        assert is_full or available - sum(parts) <= len(wishes)  # nothing but rounding is left over
