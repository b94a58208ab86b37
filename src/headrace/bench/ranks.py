"""Rank tests for a handful of rounds: is there a difference, how large is it, and between which bounds does it lie.

Both are exact: their distributions under "no difference" are counted, not approximated, so they hold from the first
few rounds on and one wild round does not decide. Working on logarithms, a shift is a ratio.

Source: Wilcoxon, "Individual comparisons by ranking methods" (1945); Mann and Whitney (1947); Hodges and Lehmann,
"Estimates of location based on rank tests" (1963).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
MAX_VALUES: Final = 60
"""Of a side; more would not fit the exact counts' 64 bits."""


@dataclass(frozen=True, slots=True)
class Shift:
    """How far the second side lies above the first.

    Args:
        estimate: Hodges–Lehmann.
        low, high: ends of the interval; infinite where so few rounds cannot bound it.
        p: two-sided.
    """

    estimate: float
    low: float
    high: float
    p: float


def paired_shift(first: Floats, second: Floats, confidence: float) -> Shift:
    """Wilcoxon's signed-rank test of pairs: round ``i`` of both sides ran next to each other.

    Args:
        first, second: at least one and at most 60 values each, equally many.
        confidence: of the interval, in (0, 1).
    """
    difference = second - first
    num = len(difference)
    assert 1 <= num <= MAX_VALUES
    assert num == len(first)
    row, column = np.triu_indices(num)
    walsh = np.sort((difference[row] + difference[column]) / 2)
    above = int((walsh > 0).sum())
    tied = int((walsh == 0).sum())
    chance = _signed_rank_chance(num)
    return _shift(walsh, above, tied, chance, confidence)


def unpaired_shift(first: Floats, second: Floats, confidence: float, *, memory: float = 0.0) -> Shift:
    """Mann and Whitney's rank-sum test of two sides that ran at different times.

    Values of a side are in time order. Where neighbours resemble each other, as on a machine that drifts, they say less
    than their number; the interval is widened and p made larger by what their correlation costs a mean.

    Args:
        first, second: at least one and at most 60 values each.
        memory: correlation of neighbours, in [0, 1); see ``memory_of``.
    """
    assert 1 <= len(first) <= MAX_VALUES
    assert 1 <= len(second) <= MAX_VALUES
    differences = np.sort((second[:, None] - first[None, :]).ravel())
    above = int((differences > 0).sum())
    tied = int((differences == 0).sum())
    chance = _rank_sum_chance(len(first), len(second))
    return _widened(_shift(differences, above, tied, chance, confidence), memory)


def memory_of(first: Floats, second: Floats) -> float:
    """Gives how much neighbours of both sides resemble each other: in [0, 0.9], made larger by its known bias."""
    sides = [side - side.mean() for side in (first, second)]
    spread = sum(float((side**2).sum()) for side in sides)
    if spread == 0:
        return 0.0
    rho = sum(float((side[1:] * side[:-1]).sum()) for side in sides) / spread
    # Source: Kendall, "Note on bias in the estimation of autocorrelation" (1954).
    rho += (1 + 4 * max(rho, 0.0)) / min(len(first), len(second))
    return min(max(rho, 0.0), 0.9)


def _widened(shift: Shift, memory: float) -> Shift:
    factor = math.sqrt((1 + memory) / (1 - memory))
    normal = NormalDist()
    z = normal.inv_cdf(max(shift.p, 1e-300) / 2) / factor
    return Shift(
        shift.estimate,
        shift.estimate - (shift.estimate - shift.low) * factor,
        shift.estimate + (shift.high - shift.estimate) * factor,
        min(1.0, 2 * normal.cdf(z)),
    )


def _shift(differences: Floats, above: int, tied: int, chance: Floats, confidence: float) -> Shift:
    """Reads both tests' answer off their ordered differences.

    Args:
        chance: [len(differences) + 1] of each number of positive differences, where there is no shift.
    """
    reached = np.cumsum(chance)
    fewer = len(differences) - above - tied
    extreme = max(above, fewer)  # ties speak for no difference
    p = min(1.0, 2 * float(chance[extreme:].sum()))
    # The interval leaves out so many differences on each side that fewer positive ones are no rarer than the tail.
    left_out = int(np.searchsorted(reached, (1 - confidence) / 2, side="right"))
    is_bounded = left_out > 0
    return Shift(
        float(np.median(differences)),
        float(differences[left_out - 1]) if is_bounded else -np.inf,
        float(differences[-left_out]) if is_bounded else np.inf,
        p,
    )


@lru_cache(maxsize=64)
def _signed_rank_chance(num: int) -> Floats:
    """Chance of each sum of positive ranks of ``num`` pairs."""
    counts = np.zeros(num * (num + 1) // 2 + 1)
    counts[0] = 1.0
    for rank in range(1, num + 1):
        counts[rank:] = counts[rank:] + counts[:-rank]
    return counts / 2.0**num


@lru_cache(maxsize=64)
def _rank_sum_chance(num_first: int, num_second: int) -> Floats:
    """Chance of each number of pairs in which the second side's value is larger.

    The counts are the coefficients of the Gaussian binomial, by dividing polynomials exactly in whole numbers.
    """
    size = num_first * num_second
    counts = [0] * (size + 1)
    counts[0] = 1
    for index in range(1, num_first + 1):
        for at in range(size, num_second + index - 1, -1):  # times 1 − q^(num_second + index)
            counts[at] -= counts[at - num_second - index]
        for at in range(index, size + 1):  # over 1 − q^index
            counts[at] += counts[at - index]
    total = sum(counts)
    return np.array([count / total for count in counts])


def holm(p_values: Floats) -> Floats:
    """Gives p values made larger so that the chance of any false alarm among them stays as stated.

    Source: Holm, "A simple sequentially rejective multiple test procedure" (1979).
    """
    order = np.argsort(p_values)
    num = len(p_values)
    stepped = np.maximum.accumulate(p_values[order] * (num - np.arange(num)))
    adjusted = np.empty(num)
    adjusted[order] = np.minimum(stepped, 1.0)
    return adjusted
