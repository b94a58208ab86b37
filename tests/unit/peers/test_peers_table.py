"""The peers harness: from samples to ratios, verdicts, tables and the picture."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from harness.cells import CELLS, SMALL, Cell, Kind, shrunk
from harness.chart import chart
from harness.llama import LlamaCpp
from harness.markdown import document
from harness.race import Race
from harness.results import Entry, Limit, Quality, Results, Sample, read, write
from harness.table import boundary_of, mode_of, rows, verdicts

DECODE = CELLS[SMALL][0]
START = next(cell for cell in CELLS[SMALL] if cell.kind is Kind.START)
SLOW, FAST = 40e9, 80e9
NAMES = (("headrace", "Q4_1"), ("b", "int8"), ("c", "int4"), ("d", "fp32"), ("e", "new"), ("f", "int8"))


def sample(engine: str, form: str, number: int, value: float | None, cell: Cell = DECODE, at: float = SLOW) -> Sample:
    error = "" if value else "it died: no memory"
    return Sample(0, number, SMALL, engine, form, cell.name, value, 1.0, at, at, 0.5, error)


def results() -> Results:
    """Ours twice as fast as the peer of our size in each round, and slower than a smaller format."""
    found = Results()
    for engine, form, bits in (("headrace", "Q4_1", 5.8), ("b", "int8", 8.5), ("c", "int4", 4.3), ("d", "fp32", 32.0)):
        found.remember(Entry(SMALL, engine, form, bits))
    # The second round met a slow minute: ratios within rounds do not move.
    for number, ours in enumerate((200.0, 100.0, 220.0)):
        found.samples.append(sample("headrace", "Q4_1", number, ours))
        found.samples.append(sample("b", "int8", number, ours / 2))
        found.samples.append(sample("c", "int4", number, ours * 1.1))
    found.samples.append(sample("d", "fp32", 0, None))
    found.limits.append(Limit(0, SMALL, "Q4_1", DECODE.name, 400.0, SLOW, 1e12, "int8"))
    found.judge(Quality(SMALL, "headrace", "Q4_1", 1000, kl_mean=5e-4, top1_ratio=0.988))
    return found


def test_a_ratio_is_taken_within_each_round() -> None:
    table = {row.engine: row for row in rows(results(), SMALL, DECODE)}

    assert table["b"].ratio == pytest.approx(2.0)
    assert table["c"].ratio == pytest.approx(1 / 1.1)
    assert table["headrace"].ratio is None
    assert (table["d"].median, table["d"].error) == (None, "it died: no memory")


def test_the_best_peer_of_our_bits_is_told_from_the_best_of_any() -> None:
    (verdict,) = verdicts(results(), SMALL)

    assert verdict.peer is not None
    assert verdict.any_peer is not None
    assert (verdict.peer.engine, verdict.any_peer.engine) == ("b", "c")
    assert verdict.share == pytest.approx(0.5)
    assert verdict.words == "≥ 1.68 × the best peer"


def test_a_cell_that_reaches_neither_goal_says_by_how_much() -> None:
    found = results()
    found.samples = [one for one in found.samples if one.engine != "b"]
    found.remember(Entry(SMALL, "c", "int4", 8.0))

    (verdict,) = verdicts(found, SMALL)

    assert verdict.words == "short: 54% of the way to 1.68 ×, 50% of the limit"


def test_less_is_better_for_a_start() -> None:
    found = Results()
    for engine, value in (("headrace", 0.5), ("b", 1.5), ("c", 1.0)):
        found.remember(Entry(SMALL, engine, "x", 8.0))
        found.samples.append(sample(engine, "x", 0, value, START))

    (verdict,) = verdicts(found, SMALL)

    assert verdict.peer is not None
    assert (verdict.peer.engine, verdict.peer.ratio) == ("c", pytest.approx(2.0))


def test_modes_are_told_apart_only_where_the_machine_has_two() -> None:
    one = [sample("b", "x", 0, 1.0, at=bandwidth) for bandwidth in (40e9, 45e9)]
    two = [*one, sample("b", "x", 0, 1.0, at=FAST)]

    boundary = boundary_of(two)

    assert boundary_of(one) is None
    assert [mode_of(each, boundary) for each in two] == ["near", "near", "far"]


def test_results_come_back_from_their_file_and_another_version_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "decoders.json"
    write(file, results())

    assert read(file) == results()
    file.write_text(file.read_text().replace('"schema": 1', '"schema": 7'))
    with pytest.raises(SystemExit, match="schema 7"):
        read(file)


def test_the_document_and_the_picture_hold_every_engine_that_has_a_figure() -> None:
    text, picture = document(results(), "decoders"), chart(results(), "decoders")

    assert "| decode c=1 | headrace | Q4_1 | 5.8 | 5.0e-04, 98.8% | 200 | 100–220 | 3 |  |" in text
    assert "failed: it died: no memory" in text
    words = [element.text for element in ET.fromstring(picture).iter() if element.text]
    assert {"headrace Q4_1", "b int8", "c int4"} <= set(words)


def test_a_shrunk_cell_keeps_what_it_needs_to_run() -> None:
    assert shrunk(DECODE, 16) == Cell("decode c=1", Kind.DECODE, 1, 8, 8)
    assert shrunk(START, 16) == START


def test_a_peer_far_behind_sits_out_and_a_new_one_is_measured() -> None:
    peers = {name: LlamaCpp(form, Path("programs"), Path(__file__), 2, {}) for name, form in NAMES}
    for name, peer in peers.items():
        peer.engine = name

    found = results()
    found.remember(Entry(SMALL, "f", "int8", 8.5))
    found.samples.append(sample("f", "int8", 0, 40.0))
    race = Race(found)
    near = {name: race.is_near(SMALL, DECODE, peer) for name, peer in peers.items()}

    # b is the best of its size though c is faster, f far behind it; d failed, e is new; ours always runs.
    assert near == {"headrace": True, "b": True, "c": True, "d": False, "e": True, "f": False}
    assert race.rank(SMALL, peers["c"]) > race.rank(SMALL, peers["b"])
