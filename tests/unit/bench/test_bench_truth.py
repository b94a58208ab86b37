"""How `scripts/bench-accuracy` holds what tools noted against what the mock server did."""

from __future__ import annotations

import pytest
from bench_tools import Noted, Reading
from bench_truth import compare, cpu_s, paired, percentile

from headrace.bench.mock.truth import Truth


def truth(arrival_s: float, *writes_s: float) -> Truth:
    return Truth(0, "", "/v1/chat/completions", arrival_s, status=200, write_s=[arrival_s + at for at in writes_s])


def noted(started: float, ttft: float, e2e: float, *gaps: float) -> Noted:
    return Noted(started, ttft, e2e, gaps)


@pytest.mark.parametrize(
    ("num", "quantile", "rank"),
    [(800, 0.99, 792), (800, 0.5, 400), (1000, 0.99, 990), (3, 0.5, 2), (1, 0.99, 1), (7, 0.99, 7)],
)
def test_percentile_is_the_nearest_rank_and_not_the_one_after_it(num: int, quantile: float, rank: int) -> None:
    values = [float(value) for value in range(num, 0, -1)]

    assert percentile(values, quantile) == rank


def test_tool_that_notes_what_was_so_is_off_by_nothing_however_few_requests() -> None:
    truths = [truth(10.0 * at, 0.1 * (at + 1), 0.1 * (at + 1) + 0.02) for at in range(8)]
    requests = [noted(5.0 + 10 * at, 0.1 * (at + 1), 0.1 * (at + 1) + 0.02, 0.02) for at in range(8)]

    found = compare(Reading(requests), truths)

    for off in found.values():
        assert off.p50_off_s == pytest.approx(0, abs=1e-9)
        assert off.p99_off_ratio == pytest.approx(0, abs=1e-6)
        assert off.pair_p99_s == pytest.approx(0, abs=1e-9)


def test_lateness_of_single_requests_shows_in_the_pairs_where_percentiles_hide_it() -> None:
    truths = [truth(0.0, 0.1, 0.3), truth(1.0, 0.2, 0.4)]
    requests = [noted(0.0, 0.2, 0.3, 0.1), noted(1.0, 0.1, 0.4, 0.3)]

    found = compare(Reading(requests), truths)["ttft"]

    assert (found.p50_off_s, found.p99_off_ratio) == pytest.approx((0, 0))
    assert found.pair_p50_s == pytest.approx(0.1)


def test_requests_of_one_moment_are_paired_by_their_answers() -> None:
    first, second = noted(0.0, 0.1, 0.9), noted(0.0001, 0.1, 0.2)
    true = [noted(7.0, 0.1, 0.2), noted(7.0001, 0.1, 0.9)]

    found = paired([first, second], true)

    assert [one for one, _ in found] == [second, first]


def test_no_pairs_where_a_tool_lost_requests() -> None:
    truths = [truth(0.0, 0.1), truth(1.0, 0.1)]

    found = compare(Reading([noted(0.0, 0.1, 0.1)]), truths)

    assert found["ttft"].pair_p50_s is None
    assert "itl" not in found


def test_mean_gaps_are_held_against_mean_gaps() -> None:
    truths = [truth(0.0, 0.1, 0.2, 0.5), truth(1.0, 0.1, 0.2, 0.5)]
    requests = [noted(0.0, 0.1, 0.5, 0.2), noted(1.0, 0.1, 0.5, 0.2)]

    found = compare(Reading(requests, has_mean_itl=True), truths)["itl"]

    assert found.p50_off_s == pytest.approx(0)


def test_printed_percentiles_stand_in_for_requests_that_a_tool_does_not_note() -> None:
    truths = [truth(0.0, 0.1), truth(1.0, 0.3)]

    found = compare(Reading([], {"e2e": (0.11, 0.3)}), truths)

    assert found["e2e"].p50_off_s == pytest.approx(0.01)
    assert found["e2e"].pair_p50_s is None


def test_cpu_time_is_counted_between_the_first_request_and_the_last_answer() -> None:
    readings = [(0.0, 4.0), (10.0, 5.0), (20.0, 7.0), (30.0, 9.0)]

    assert cpu_s(readings, 5.0, 25.0) == pytest.approx(8.0 - 4.5)
    assert cpu_s(readings, 20.0, 99.0) == pytest.approx(2.0)
    assert cpu_s([], 0.0, 1.0) == 0
