"""A list of tests of another server's suite that are foreign here, and the pytest plugin that applies it.

A line of a list is ``test id | what makes it foreign``. An id is a whole file (which is not run at all), a test with
all its parameters, or one parametrised test. What makes it foreign begins with one of ``KINDS`` and names the thing.
A listed test is run all the same, but for unit tests of that server's own code (``class``): where every test of an
entry passes, and it is not about what a model says, the entry is a fault, so lists only shrink.

As a plugin it needs the environment: FOREIGN_LIST, and FOREIGN_FOUND, where one JSON line is written for each test.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

# route, field, flag: of that server alone. text: of the model that the suite was written with; model: needs another
# kind of model. class: a unit test of that server's own code. keys, responses: a part of the API that comes later.
# choice: both answers keep to the contract, and ours is documented.
KINDS = ("route", "field", "flag", "text", "model", "class", "later", "choice")


@dataclass(frozen=True)
class Entry:
    """A line of a list."""

    test: str
    reason: str

    @property
    def is_run(self) -> bool:
        """Whether its tests are run: none of a whole file, none of that server's own code."""
        return not self.is_file and not self.reason.startswith("class ")

    @property
    def is_file(self) -> bool:
        return "::" not in self.test

    def covers(self, node: str) -> bool:
        """Whether the entry is about the test ``node``."""
        return node == self.test or node.startswith((self.test + "::", self.test + "["))


def read(path: Path) -> list[Entry]:
    """Reads a list.

    Raises:
        ValueError: a line without a reason, an unknown kind of reason, or a test that stands twice.
    """
    entries: list[Entry] = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        test, found, reason = (part.strip() for part in line.partition(" | "))
        kind, _, what = reason.partition(" ")
        if not found or kind not in KINDS or not what:
            raise ValueError(f"{path.name}:{number}: a line is `test id | {' or '.join(KINDS)} what`, got {line!r}")
        if any(entry.test == test for entry in entries):
            raise ValueError(f"{path.name}:{number}: {test} stands twice")
        entries.append(Entry(test, reason))
    return entries


def pytest_collection_modifyitems(config, items) -> None:  # type: ignore[no-untyped-def]  # as below
    entries = [entry for entry in read(Path(os.environ["FOREIGN_LIST"])) if not entry.is_run]
    left_out = [item for item in items if any(entry.covers(item.nodeid) for entry in entries)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def pytest_runtest_logreport(report) -> None:  # type: ignore[no-untyped-def]  # pytest is not installed where this is checked
    if report.when == "call" or (report.when == "setup" and report.outcome != "passed"):
        why = "" if report.outcome == "passed" else str(report.longrepr)
        _write(report.nodeid, report.outcome, why)


def pytest_collectreport(report) -> None:  # type: ignore[no-untyped-def]  # as above
    if report.outcome == "failed":
        _write(report.nodeid, "failed", str(report.longrepr))


def _write(node: str, outcome: str, why: str) -> None:
    lines = [line for line in why.splitlines() if line.startswith("E ")] or why.splitlines()[-1:]
    with open(os.environ["FOREIGN_FOUND"], "a") as out:
        out.write(json.dumps({"node": node, "outcome": outcome, "why": " ".join(lines)[:300]}) + "\n")
