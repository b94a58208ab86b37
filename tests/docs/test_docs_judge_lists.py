"""The lists of what is foreign in other servers' suites: each entry has its reason, and they only shrink."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

from judging.foreign import Entry, read  # noqa: E402

# How many entries each list has. Taking one off lowers its number here; a higher number is no fix.
SIZES = {"llama_cpp": 72, "vllm": 77}


@pytest.mark.parametrize("name", SIZES)
def test_a_list_is_well_formed_and_no_longer_than_it_was(name: str) -> None:
    entries = read(SCRIPTS / "judging" / name / "foreign.txt")

    assert len(entries) == SIZES[name]


@pytest.mark.parametrize(
    "line",
    [
        "a.py::test_x",
        "a.py::test_x | ",
        "a.py::test_x | route",
        "a.py::test_x | flaky today",
        "a.py | text x\na.py | text y",
    ],
)
def test_a_line_without_a_reason_is_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / "foreign.txt").write_text(line + "\n")

    with pytest.raises(ValueError, match=r"foreign\.txt:\d: "):
        read(tmp_path / "foreign.txt")


def test_an_entry_is_about_its_test_and_no_other() -> None:
    entry = Entry("a.py::test_x", "route /x")

    assert entry.covers("a.py::test_x")
    assert entry.covers("a.py::test_x[1]")
    assert not entry.covers("a.py::test_xy")
    assert Entry("a.py", "route /x").covers("a.py::test_x")
