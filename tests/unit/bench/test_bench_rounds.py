from itertools import count
from typing import Any

import msgspec
import pytest

from headrace.base.errors import ConfigError
from headrace.bench.records import Run, Settings
from headrace.bench.rounds import run_rounds
from headrace.bench.sample import Sample

A, B = (Settings(url=url, model="m", concurrency=2, duration_s=9.0, warmup_requests=5) for url in ("a", "b"))


def samples() -> Any:
    return (Sample("chat", {"n": index}) for index in count())


class Servers:
    """Notes what it is asked for; an answer of B takes twice as long."""

    def __init__(self, runs: Any, *, cut_at: int | None = None) -> None:
        self.runs = runs
        self.cut_at = cut_at
        self.asked: list[tuple[str, list[int]]] = []
        self.settings: list[Settings] = []

    def measure(self, settings: Settings, batch: list[Sample]) -> Run:
        self.asked.append((settings.url, [sample.body["n"] for sample in batch]))  # type: ignore[misc]
        self.settings.append(settings)
        latency_s = 1.0 if settings.url == "a" else 2.0
        exchanges = [self.runs.exchange(index, ended_s=1.0 + latency_s) for index in range(len(batch))]
        return self.runs.run(exchanges, is_partial=len(self.asked) == self.cut_at)  # type: ignore[no-any-return]


def test_rounds_alternate_their_order_and_both_sides_get_the_same_requests(runs: Any) -> None:
    servers = Servers(runs)

    a, b, was_cut = run_rounds((A, B), samples(), servers.measure, rounds=3, requests=2)

    assert servers.asked == [
        ("b", [0, 1]), ("a", [0, 1]),  # warms up, thrown away
        ("a", [2, 3]), ("b", [2, 3]), ("b", [4, 5]), ("a", [4, 5]), ("a", [6, 7]), ("b", [6, 7]),
    ]  # fmt: skip
    assert [one.values["E2E p50"] for one in a] == [1.0] * 3
    assert [one.values["E2E p50"] for one in b] == [2.0] * 3
    assert not was_cut


def test_a_round_is_as_many_requests_as_wanted_and_nothing_else(runs: Any) -> None:
    servers = Servers(runs)

    run_rounds((A, B), samples(), servers.measure, rounds=1, requests=7)

    assert {(s.num_requests, s.duration_s, s.warmup_requests) for s in servers.settings} == {(7, None, 0)}
    assert [s.seed for s in servers.settings] == [0, 0, 1, 1]  # the arrivals of a pair are alike, too


def test_ctrl_c_keeps_the_pairs_that_are_whole(runs: Any) -> None:
    a, b, was_cut = run_rounds((A, B), samples(), Servers(runs, cut_at=6).measure, rounds=5, requests=2)

    assert (len(a), len(b), was_cut) == (1, 1, True)


@pytest.mark.parametrize(("num", "expected"), [(3, "a round takes 4 requests and the data has 3")])
def test_data_that_fills_no_round_is_refused(runs: Any, num: int, expected: str) -> None:
    few = (Sample("chat", {"n": index}) for index in range(num))

    with pytest.raises(ConfigError, match=expected):
        run_rounds((A, B), few, Servers(runs).measure, rounds=2, requests=4)


def test_data_that_ends_later_ends_the_rounds(runs: Any) -> None:
    some = (Sample("chat", {"n": index}) for index in range(15))

    a, _, _ = run_rounds((A, msgspec.structs.replace(B)), some, Servers(runs).measure, rounds=9, requests=4)

    assert len(a) == 2
