"""The peers harness: which rounds are void, who is measured first, and our op-by-op arm beside llama.cpp."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.cells import CELLS, LARGE, SMALL, Kind
from harness.engines import OP_BY_OP
from harness.expected import (
    Expectation,
    expectations_of,
    judge,
    machine_of,
    read_expectations,
    write_expectations,
)
from harness.llama import LlamaCpp
from harness.markdown import document
from harness.race import Race
from harness.results import Entry, Results, Sample, Session
from harness.table import op_by_op

DECODE = CELLS[SMALL][0]
BATCH = next(cell for cell in CELLS[SMALL] if cell.kind is Kind.BATCH)
AT = 40e9


def session(started_at: str, isa: str = "avx2") -> Session:
    return Session(started_at, "abc", "AMD EPYC", 2, 2, isa, 2**34, "Linux", {}, [])


def sample(engine: str, form: str, number: int, value: float, at: float = AT, in_session: int = 1) -> Sample:
    return Sample(in_session, number, SMALL, engine, form, DECODE.name, value, 1.0, at, at, 0.5)


def expectation(engine: str, form: str, value: float, machine: str = "") -> Expectation:
    machine = machine or machine_of(session(""))
    return Expectation(machine, SMALL, DECODE.name, engine, form, value, AT, 5, "2026-01-01T00:00")


def results(*samples: Sample) -> Results:
    found = Results(sessions=[session("2026-01-01T00:00"), session("2026-02-01T00:00")], samples=list(samples))
    for engine, form, bits in (
        ("headrace", "Q4_1", 5.8),
        (OP_BY_OP, "Q4_1", 5.8),
        ("llama.cpp", "Q4_1", 5.8),
        ("llama.cpp", "Q4_0", 5.5),
        ("a", "int8", 8.0),
    ):
        found.remember(Entry(SMALL, engine, form, bits))
    return found


BOTH = [expectation("a", "int8", 100.0), expectation("llama.cpp", "Q4_1", 50.0)]


@pytest.mark.parametrize(("value", "is_kept"), [(114.0, True), (86.0, True), (116.0, False), (84.0, False)])
def test_round_is_void_when_its_best_peer_is_off_by_more_than_15_percent(value: float, is_kept: bool) -> None:
    good = [sample("headrace", "Q4_1", 1, 200.0), sample("a", "int8", 1, 100.0)]
    found = results(sample("headrace", "Q4_1", 0, 200.0), sample("a", "int8", 0, value), *good)

    judged = judge(found, BOTH)

    assert judged.results.samples == (found.samples if is_kept else good)
    assert ("a int8" in judged.words(SMALL)) is not is_kept
    assert judged.num_judged == 2


def test_peer_that_does_not_decide_loses_its_own_figure_only() -> None:
    ours, best = sample("headrace", "Q4_1", 0, 200.0), sample("a", "int8", 0, 100.0)
    found = results(ours, best, sample("llama.cpp", "Q4_1", 0, 20.0))

    judged = judge(found, BOTH)

    assert judged.results.samples == [ours, best]
    assert "llama.cpp Q4_1 at 20, expected 50 at 40 GB/s (its figure alone)" in judged.words(SMALL)


def test_nothing_is_judged_in_another_mode_on_another_machine_or_by_its_own_session() -> None:
    other = expectation("a", "int8", 100.0, machine_of(session("", isa="avx512bf16")))
    fast, own = sample("a", "int8", 0, 10.0, at=2 * AT), sample("a", "int8", 0, 10.0, in_session=0)

    for found, expectations in ((results(fast), BOTH), (results(own), BOTH), (results(own), [other])):
        judged = judge(found, expectations)

        assert judged.results.samples == found.samples
        assert "no round could be voided" in judged.words(SMALL)


def test_expectations_are_medians_of_three_rounds_in_one_mode(tmp_path: Path) -> None:
    slow = [sample("a", "int8", number, value) for number, value in enumerate((90.0, 100.0, 120.0))]
    fast = [sample("a", "int8", number, 150.0, at=2 * AT) for number in (3, 4)]
    found = results(*slow, *fast, *(sample("headrace", "Q4_1", number, 1.0) for number in range(3)))

    expectations = expectations_of(found)
    write_expectations(expectations, tmp_path / "expected.json")

    assert [(one.engine, one.value, one.bandwidth, one.rounds) for one in expectations] == [("a", 100.0, AT, 3)]
    assert read_expectations(tmp_path / "expected.json") == expectations
    assert read_expectations(tmp_path / "none.json") == []


def contender(engine: str, form: str) -> LlamaCpp:
    made = LlamaCpp(form, Path("programs"), Path(__file__), 2, {})
    made.engine = engine
    return made


def names(contenders: list[LlamaCpp]) -> list[str]:
    return [f"{each.engine} {each.format}" for each in contenders]


def test_first_rounds_are_for_ours_and_the_two_peers_that_the_table_names() -> None:
    found = results(
        sample("headrace", "Q4_1", 0, 200.0),
        sample("a", "int8", 0, 60.0),
        sample("llama.cpp", "Q4_1", 0, 100.0),
        sample("llama.cpp", "Q4_0", 0, 110.0),
    )
    able = [contender(*name) for name in (("a", "int8"), ("llama.cpp", "Q4_0"), ("llama.cpp", "Q4_1"))]
    able += [contender("headrace", "Q4_1"), contender(OP_BY_OP, "Q4_1")]

    few = Race(found).few(SMALL, DECODE, able)

    assert names(few) == ["headrace Q4_1", f"{OP_BY_OP} Q4_1", "llama.cpp Q4_1", "llama.cpp Q4_0"]


def test_a_model_without_figures_goes_by_those_of_the_small_one() -> None:
    found = results(sample("a", "int8", 0, 160.0), sample("llama.cpp", "Q4_1", 0, 100.0))
    able = [contender("llama.cpp", "Q4_1"), contender("b", "new"), contender("a", "int8")]

    assert names(Race(found).ordered(LARGE, CELLS[LARGE][0], able)) == ["a int8", "llama.cpp Q4_1", "b new"]


def test_of_our_formats_only_the_better_one_runs_where_a_round_is_long() -> None:
    able = [contender("headrace", form) for form in ("Q4_1", "Q8_0")]
    race = Race(results())

    assert len(race.few(SMALL, DECODE, able)) == 2
    assert len(race.few(SMALL, BATCH, able)) == 1


def test_op_by_op_arm_is_no_peer_and_stands_beside_llama_cpp() -> None:
    found = results(
        sample("headrace", "Q4_1", 0, 200.0),
        sample(OP_BY_OP, "Q4_1", 0, 150.0),
        sample("llama.cpp", "Q4_1", 0, 100.0),
        sample("llama.cpp", "Q4_0", 0, 120.0),
    )

    ((cell, arm, peers),) = op_by_op(found, SMALL)
    text = document(found, "decoders")

    assert (cell, arm.median) == (DECODE, 150.0)
    assert {peer.format: peer.ratio for peer in peers} == {"Q4_1": 1.5, "Q4_0": 1.25}
    assert "| decode c=1 | 150 Q4_1 | Q4_1: 100, 1.50 × | Q4_0: 120, 1.25 × |" in text
    assert "llama.cpp Q4_1: 100 | 2.00 | llama.cpp Q4_0: 120 | 1.67 |" in text
