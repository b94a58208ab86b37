from typing import Any

import msgspec
import pytest

from headrace.base.errors import ConfigError
from headrace.bench.slo import parse_slo
from headrace.bench.summarize import summarize
from headrace.bench.summary import Summary
from headrace.bench.sweep import Sweep, between, doubling, run_sweep
from headrace.bench.sweep_page import render_sweep, sweep_page, sweep_words
from headrace.cli.bench_sweep import read_loads

SLOTS = 8


@pytest.fixture
def measure(runs: Any) -> Any:
    """A server with eight slots: an answer takes 1 s, and what finds no slot free waits for its turn."""

    def run(load: float, *, failed: int = 0) -> Summary:
        latency_s = max(1.0, load / SLOTS)
        exchanges = []
        for index in range(64):
            at = index // load * latency_s
            exchanges.append(
                runs.exchange(
                    index, scheduled_s=at, sent_s=at, first_s=at + latency_s - 0.8, ended_s=at + latency_s,
                    chunk_s=(at + latency_s - 0.8, at + latency_s), output_tokens=10,
                    error="timeout" if index < failed else None,
                )
            )  # fmt: skip
        return summarize(runs.run(exchanges), parse_slo("ttft=1s"))

    return run


def test_the_knee_is_where_the_slots_are_full_and_the_sweep_ends_behind_it(measure: Any) -> None:
    asked: list[float] = []

    found = run_sweep(doubling(1, 256), lambda load: asked.append(load) or measure(load), is_rate=False)

    assert found is not None
    assert asked == [1, 2, 4, 8, 16, 32, 6, 11]  # 64 and more would give no more; then both sides of the knee
    assert found.knee == 8
    assert found.most_per_s == pytest.approx(80, rel=0.02)
    assert found.is_full
    assert found.kept == 11  # until there 0.575 s, at 16 it waits 1.2 s


def test_a_server_that_is_not_full_is_said_to_have_more_to_give(measure: Any) -> None:
    found = run_sweep([1, 2, 4], measure, is_rate=False, can_refine=False)

    assert found is not None
    assert (found.knee, found.is_full) == (4, False)
    assert "it may have more to give" in found.notes[0]


def test_loads_that_fail_end_the_sweep_and_are_no_knee(measure: Any) -> None:
    found = run_sweep([1, 2, 4, 8], lambda load: measure(load, failed=20 if load >= 4 else 0), is_rate=False)

    assert found is not None
    assert [point.load for point in found.points] == [1, 2, 3, 4]
    assert found.knee == 3 or found.knee == 2
    assert any("Over 5% of requests failed from a load of" in note for note in found.notes)


def test_a_sweep_without_an_answer_has_no_curve(runs: Any) -> None:
    dead = summarize(runs.run([runs.exchange(0, error="connect")]))

    assert run_sweep([1, 2], lambda load: dead, is_rate=False) is None


def test_ctrl_c_keeps_what_there_is(measure: Any) -> None:
    def cut(load: float) -> Summary:
        found = measure(load)
        return msgspec.structs.replace(found, is_partial=load == 4)

    found = run_sweep([1, 2, 4, 8], cut, is_rate=False)

    assert found is not None
    assert [point.load for point in found.points] == [1, 2, 4]
    assert "stopped early" in found.notes[0]


def test_between_stays_inside_and_whole(measure: Any) -> None:
    found = run_sweep([7, 8, 9], measure, is_rate=False, can_refine=False)

    assert found is not None
    assert between(found.points, is_rate=False) == []
    assert between(found.points, is_rate=True) == [pytest.approx(7.483, abs=1e-3), pytest.approx(8.485, abs=1e-3)]


def test_a_sweep_can_be_read_in_every_form(measure: Any) -> None:
    found = run_sweep(doubling(1, 64), measure, is_rate=False)

    assert found is not None
    assert msgspec.json.decode(msgspec.json.encode(found), type=Sweep) == found
    markdown, html = render_sweep(found), sweep_page(found)
    assert "| 8 ← knee |" in markdown
    assert "The knee lies at 8 requests at once: 80 output tokens/s, E2E p50 1.00 s" in sweep_words(found)
    assert "ttft ≤ 1 s is kept by 99% of requests up to 11 requests at once." in sweep_words(found)
    assert html.count("<svg") == 5
    assert "knee, 8" in html


@pytest.mark.parametrize(
    ("text", "first", "last", "is_rate", "expected"),
    [
        ("1,x", 1, 2, False, "--loads is '1,x'"),
        ("0,4", 1, 2, False, "a load of 0 to 4"),
        ("1.5", 1, 2, False, "whole numbers"),
        (None, 5, 2, False, "--first is 5 and --last 2"),
        (None, 0, 2, True, "--first is 0"),
    ],
)
def test_loads_that_make_no_sense_are_refused(
    text: str | None, first: float, last: float, is_rate: bool, expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        read_loads(text, first, last, is_rate=is_rate)


def test_loads_are_doubled_or_given() -> None:
    assert read_loads(None, 1, 10, is_rate=False) == [1, 2, 4, 8, 10]
    assert read_loads("16, 4", 1, 10, is_rate=False) == [4, 16]
    assert read_loads("0.5,1.5", 1, 10, is_rate=True) == [0.5, 1.5]
