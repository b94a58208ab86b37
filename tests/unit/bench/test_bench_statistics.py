import numpy as np
import pytest

from headrace.base.errors import ConfigError
from headrace.bench.slo import Limit, parse_slo
from headrace.bench.statistics import (
    Histogram,
    is_indicative,
    mean_interval,
    needed_requests,
    percentile_intervals,
    percentiles,
)


def test_percentiles_are_measured_values_by_nearest_rank() -> None:
    values = np.arange(1.0, 101.0)

    assert percentiles(values, (0.5, 0.95, 0.99, 1.0)).tolist() == [50, 95, 99, 100]
    assert percentiles(np.array([7.0]), (0.01, 0.99)).tolist() == [7, 7]


@pytest.mark.parametrize(("quantile", "needed"), [(0.5, 20), (0.9, 100), (0.99, 1000), (0.999, 10_000)])
def test_a_percentile_takes_ten_requests_beyond_it(quantile: float, needed: int) -> None:
    assert needed_requests(quantile) == needed
    assert is_indicative(quantile, needed - 1)
    assert not is_indicative(quantile, needed)


def correlated(random: np.random.Generator, num: int, rho: float) -> np.ndarray:
    """Standard normal values whose neighbours resemble each other."""
    noise = random.standard_normal(num) * np.sqrt(1 - rho**2)
    values = np.empty(num)
    last = random.standard_normal()
    for index in range(num):
        last = rho * last + noise[index]
        values[index] = last
    return values


# Of 40 intervals at 95 %, 38 are expected to hold the truth; three standard errors are 4. A bootstrap's intervals are a
# little narrow by nature and correlated values make them more so; one over single values holds it 20 times.
@pytest.mark.parametrize(("rho", "least"), [(0.0, 34), (0.8, 31)], ids=["independent", "correlated"])
def test_intervals_hold_the_truth_also_where_neighbours_are_alike(rho: float, least: int) -> None:
    random = np.random.default_rng(5)
    hits = np.zeros(3, int)

    for seed in range(40):
        values = np.exp(correlated(random, 1000, rho))
        ends = percentile_intervals(values, (0.5, 0.9), seed=seed)
        low, high = mean_interval(values, seed=seed)
        truths = np.exp([0.0, 1.2815516])
        hits[:2] += (ends[:, 0] <= truths) & (truths <= ends[:, 1])
        hits[2] += low <= np.exp(0.5) <= high

    assert hits.min() >= least


def test_the_same_seed_gives_the_same_interval() -> None:
    values = np.random.default_rng(1).exponential(size=500)

    assert percentile_intervals(values, seed=3).tolist() == percentile_intervals(values, seed=3).tolist()
    assert percentile_intervals(values, seed=3).tolist() != percentile_intervals(values, seed=4).tolist()


def test_histogram_is_within_its_bins_of_the_exact_figures() -> None:
    random = np.random.default_rng(2)
    values = random.lognormal(np.log(0.02), 1.0, 20_000)
    histogram = Histogram.empty()

    for block, part in enumerate(values.reshape(50, 400)):
        histogram.add(part, block)

    assert histogram.num == 20_000
    assert histogram.mean_s == pytest.approx(values.mean())
    assert histogram.percentiles() == pytest.approx(percentiles(values), rel=6e-4)
    # Its blocks are those of the exact way, so the intervals agree as well.
    assert histogram.percentile_intervals(seed=1) == pytest.approx(percentile_intervals(values, seed=1), rel=2e-3)
    assert histogram.mean_interval(seed=1) == pytest.approx(mean_interval(values, seed=1))


def test_histogram_holds_zero_and_what_is_out_of_range() -> None:
    histogram = Histogram.empty()
    histogram.add(np.array([0.0, 0.0, 0.0, 5e4]), 0)

    assert histogram.percentiles((0.5, 1.0)).tolist() == [0.0, pytest.approx(1000, rel=2e-3)]
    assert histogram.extremes.tolist() == [0.0, 5e4]


def test_objectives_are_read_with_their_units() -> None:
    assert parse_slo("ttft=500ms, itl<=50ms,e2e=2s") == (Limit("ttft", 0.5), Limit("itl", 0.05), Limit("e2e", 2.0))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ttft=500", "has 'ttft=500': write METRIC=DURATION with a unit"),
        ("", "has ''"),
        ("speed=5ms", "names 'speed'; known are ttft, itl, gap, tpot, e2e"),
        ("ttft=5ms,ttft=6ms", "names ttft twice"),
        ("ttft=0ms", "must be over 0"),
        ("ttft=1.2.3s", "must be over 0"),
    ],
)
def test_objectives_that_say_nothing_are_refused(text: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        parse_slo(text)
