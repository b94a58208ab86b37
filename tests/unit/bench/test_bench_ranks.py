import itertools
import math

import numpy as np
import pytest

from headrace.bench.ranks import holm, paired_shift, unpaired_shift


@pytest.mark.parametrize("num", [1, 4, 9])
def test_paired_p_is_the_share_of_sign_patterns_that_are_as_extreme(num: int) -> None:
    difference = np.random.default_rng(num).normal(0.3, 1.0, num)
    ranks = np.argsort(np.argsort(np.abs(difference))) + 1
    total = num * (num + 1) // 2

    found = paired_shift(np.zeros(num), difference, 0.95)

    seen = ranks[difference > 0].sum()
    extreme = max(seen, total - seen)
    sums = [sum(rank for rank, sign in zip(ranks, signs, strict=True) if sign)
            for signs in itertools.product([0, 1], repeat=num)]  # fmt: skip
    expected = min(1.0, 2 * sum(value >= extreme for value in sums) / 2**num)
    assert found.p == pytest.approx(expected)


@pytest.mark.parametrize(("num_first", "num_second"), [(1, 1), (3, 4), (5, 5)])
def test_unpaired_p_is_the_share_of_labellings_that_are_as_extreme(num_first: int, num_second: int) -> None:
    values = np.random.default_rng(num_first).normal(size=num_first + num_second)
    first, second = values[:num_first], values[num_first:]

    found = unpaired_shift(first, second, 0.95)

    def above(chosen: tuple[int, ...]) -> int:
        rest = [index for index in range(len(values)) if index not in chosen]
        return sum(values[one] > values[other] for one in chosen for other in rest)

    every = [above(chosen) for chosen in itertools.combinations(range(len(values)), num_second)]
    seen = above(tuple(range(num_first, len(values))))
    extreme = max(seen, num_first * num_second - seen)
    assert found.p == pytest.approx(min(1.0, 2 * sum(value >= extreme for value in every) / len(every)))


# Published critical values: signed rank, n = 12, two-sided 1 %: 7 (so 8 Walsh averages are left out on each side);
# rank sum, 12 and 12, two-sided 1 %: 27 (Wilcoxon & Wilcox 1964; Milton 1964).
@pytest.mark.parametrize(("is_paired", "critical"), [(True, 7), (False, 27)])
def test_intervals_end_at_the_tables_critical_values(is_paired: bool, critical: int) -> None:
    random = np.random.default_rng(0)
    first, second = random.normal(size=12), random.normal(size=12)

    found = (paired_shift if is_paired else unpaired_shift)(first, second, 0.99)

    difference = second - first
    every = (
        sorted((difference[i] + difference[j]) / 2 for i in range(12) for j in range(i, 12))
        if is_paired
        else sorted((second[:, None] - first).ravel())
    )
    assert found.low == pytest.approx(every[critical])
    assert found.high == pytest.approx(every[-1 - critical])
    assert found.estimate == pytest.approx(np.median(every))


@pytest.mark.parametrize("shift", [paired_shift, unpaired_shift])
def test_interval_leaves_zero_out_exactly_when_p_is_small(shift: object) -> None:
    random = np.random.default_rng(1)
    for _ in range(300):
        num = int(random.integers(5, 15))
        first, second = random.normal(size=num), random.normal(0.8, 1, size=num)

        found = shift(first, second, 0.95)  # type: ignore[operator]

        assert (found.p <= 0.05) == (found.low > 0 or found.high < 0)


def test_too_few_rounds_bound_nothing() -> None:
    found = paired_shift(np.zeros(3), np.array([1.0, 2.0, 3.0]), 0.95)

    assert (found.low, found.high, found.p) == (-math.inf, math.inf, 0.25)


def test_equal_sides_are_no_difference() -> None:
    same = np.array([1.0, 2.0, 3.0, 4.0] * 3)

    assert paired_shift(same, same, 0.99).p == 1.0
    assert unpaired_shift(same, same, 0.99).p == 1.0


def test_holm_takes_the_smallest_times_their_number() -> None:
    assert holm(np.array([0.01, 0.04, 0.03])) == pytest.approx([0.03, 0.06, 0.06])
    assert holm(np.array([0.5, 0.9])) == pytest.approx([1.0, 1.0])
