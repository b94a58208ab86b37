"""Percentiles, their intervals, and when a percentile says too little; pure functions of arrays.

**Percentile** here is the nearest rank: the smallest measured value that at least that share of values does not
exceed. No value is ever reported that was not measured.

**Interval**: 95 %, by a bootstrap over blocks of neighbours in time. Requests that ran together share their luck, a
bootstrap over single requests would call that independent and its intervals would be too narrow.
Source: Künsch, "The jackknife and the bootstrap for general stationary observations" (1989).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]

QUANTILES: Final = (0.5, 0.75, 0.9, 0.95, 0.99, 0.999)
CONFIDENCE: Final = 0.95
LEAST_BEYOND: Final = 10
"""A percentile with fewer requests beyond it than this is called indicative: its own spread is then over a third of
the tail it describes (1/√10). So a p99 takes 1,000 requests, a p90 100."""
NUM_BLOCKS: Final = 50
"""Long enough to hold what neighbours share, many enough to draw from."""
NUM_RESAMPLES: Final = 500
_PIECE: Final = 2**20
_MAX_RANKS: Final = 20_000


def needed_requests(quantile: float) -> int:
    """Gives how many requests a percentile takes before it is more than indicative."""
    return round(LEAST_BEYOND / (1 - quantile))


def is_indicative(quantile: float, num: int) -> bool:
    """Whether a percentile of ``num`` values says too little to rely on."""
    return num < needed_requests(quantile)


def percentiles(values: Floats, quantiles: Sequence[float] = QUANTILES) -> Floats:
    """Gives the nearest-rank percentiles of at least one value."""
    found: Floats = np.quantile(values, np.asarray(quantiles), method="inverted_cdf")
    return found


def blocks_of(num: int, num_blocks: int = NUM_BLOCKS) -> Counts:
    """Gives the block of each of ``num`` values in time order: [num] in [0, min(num, num_blocks))."""
    return np.arange(num, dtype=np.int64) * min(num, num_blocks) // max(num, 1)


def block_weights(num_blocks: int, seed: int, num_resamples: int = NUM_RESAMPLES) -> Counts:
    """Gives how often each block is drawn in each resample: [num_resamples, num_blocks]."""
    return np.random.default_rng(seed).multinomial(num_blocks, np.full(num_blocks, 1 / num_blocks), num_resamples)


def percentile_intervals(values: Floats, quantiles: Sequence[float] = QUANTILES, *, seed: int = 0) -> Floats:
    """Gives lower and upper end for each quantile: [len(quantiles), 2].

    Args:
        values: at least one, in time order.

    Cost: a sort, and 500 passes over at most 20,000 ranks; 24 MB.
    """
    blocks = blocks_of(len(values))
    order = np.argsort(values, kind="stable")
    ordered, block_of = values[order], blocks[order]
    # Values are taken together where there are more than ranks worth telling apart.
    num_bins = min(len(values), _MAX_RANKS)
    bins = np.arange(len(values)) * num_bins // len(values)
    num_blocks = int(blocks[-1]) + 1
    counts = np.bincount(block_of * num_bins + bins, minlength=num_blocks * num_bins).reshape(num_blocks, num_bins)
    largest = ordered[np.flatnonzero(np.diff(bins, append=num_bins))]
    weights = block_weights(num_blocks, seed)
    found = np.empty((NUM_RESAMPLES, len(quantiles)))
    rows = max(1, _PIECE // num_bins)
    for start in range(0, NUM_RESAMPLES, rows):
        # How many values of each resample lie at or below each bin's largest; products of floats, as they are quicker.
        reached = np.cumsum(weights[start : start + rows].astype(np.float64) @ counts.astype(np.float64), axis=1)
        found[start : start + rows] = largest[_places(reached, np.asarray(quantiles))]
    return _ends(found)


def mean_interval(values: Floats, *, seed: int = 0) -> tuple[float, float]:
    """Gives the interval of the mean of at least one value, in time order."""
    blocks = blocks_of(len(values))
    num_blocks = int(blocks[-1]) + 1
    sums = np.bincount(blocks, weights=values, minlength=num_blocks)
    sizes = np.bincount(blocks, minlength=num_blocks)
    weights = block_weights(num_blocks, seed)
    low, high = _ends(((weights @ sums) / (weights @ sizes))[:, None])[0]
    return float(low), float(high)


def _ends(found: Floats) -> Floats:
    tail = (1 - CONFIDENCE) / 2
    ends: Floats = np.quantile(found, [tail, 1 - tail], axis=0, method="inverted_cdf").T
    return ends


# A bin is 0.1 % wide, so a percentile is off by at most half of that; 1 µs to 1,000 s.
_BIN_RATIO: Final = 1.001
_LOWEST_S: Final = 1e-6
_NUM_BINS: Final = int(np.ceil(np.log(1e9) / np.log(_BIN_RATIO))) + 2


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts of durations, for what comes in too large numbers to keep: the gaps between chunks.

    Args:
        counts: [blocks, bins]; a block is a stretch of neighbours in time.
        sums: [blocks] seconds.
        extremes: [2] the smallest and the largest, exact.
    """

    counts: Counts
    sums: Floats
    extremes: Floats

    @classmethod
    def empty(cls, num_blocks: int = NUM_BLOCKS) -> Histogram:
        """Makes one without values. Memory: 166 kB a block."""
        return cls(
            np.zeros((num_blocks, _NUM_BINS), np.int64), np.zeros(num_blocks), np.array([np.inf, -np.inf], np.float64)
        )

    def add(self, durations_s: Floats, block: int) -> None:
        """Counts at least one duration."""
        with np.errstate(divide="ignore"):
            bins = np.log(np.maximum(durations_s, 0) / _LOWEST_S) / np.log(_BIN_RATIO) + 1
        np.add.at(self.counts[block], np.clip(bins, 0, _NUM_BINS - 1).astype(np.int64), 1)
        self.sums[block] += durations_s.sum()
        self.extremes[0] = min(self.extremes[0], durations_s.min())
        self.extremes[1] = max(self.extremes[1], durations_s.max())

    @property
    def num(self) -> int:
        """How many it holds."""
        return int(self.counts.sum())

    @property
    def mean_s(self) -> float:
        """Their mean."""
        return float(self.sums.sum() / self.num)

    def percentiles(self, quantiles: Sequence[float] = QUANTILES) -> Floats:
        """Gives percentiles of at least one value, off by at most 0.05 %."""
        bins = np.flatnonzero(self.counts.any(axis=0))
        reached = np.cumsum(self.counts[:, bins].sum(axis=0))[None]
        found: Floats = self._middles(bins)[_places(reached, np.asarray(quantiles))[0]]
        return found

    def percentile_intervals(self, quantiles: Sequence[float] = QUANTILES, *, seed: int = 0) -> Floats:
        """Gives lower and upper end for each quantile: [len(quantiles), 2]."""
        used = self.counts[self.counts.sum(axis=1) > 0]
        bins = np.flatnonzero(used.any(axis=0))
        weights = block_weights(len(used), seed).astype(np.float64)  # products of whole numbers are slow, and all fit
        reached = np.cumsum(weights @ used[:, bins].astype(np.float64), axis=1)
        return _ends(self._middles(bins)[_places(reached, np.asarray(quantiles))])

    def mean_interval(self, *, seed: int = 0) -> tuple[float, float]:
        """Gives the interval of the mean."""
        sizes = self.counts.sum(axis=1)
        used = sizes > 0
        weights = block_weights(int(used.sum()), seed)
        low, high = _ends(((weights @ self.sums[used]) / (weights @ sizes[used]))[:, None])[0]
        return float(low), float(high)

    def _middles(self, bins: Counts) -> Floats:
        found = np.where(bins == 0, 0.0, _LOWEST_S * _BIN_RATIO ** (bins - 0.5))
        return np.asarray(np.clip(found, *self.extremes), np.float64)


def _places(reached: NDArray[np.int32] | Counts | Floats, quantiles: Floats) -> Counts:
    """Gives [rows, quantiles]: the first place at which a row of running counts has that share of its last one."""
    return np.stack([np.searchsorted(line, np.maximum(np.ceil(quantiles * line[-1] - 1e-9), 1)) for line in reached])
