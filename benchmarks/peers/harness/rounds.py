"""Runs the rounds: every cell by every engine in turn, the bandwidth probed around each, within a budget of time.

A round measures a cell with ours, then with each peer (A B C, A B C, …), so that a slow minute of the machine meets
them alike. All are measured in the first round of a cell; after that, a peer far behind the best one sits out, since
it decides nothing. What does not fit into the budget is not begun, and peers that did best so far come first.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from harness.cells import CELLS, PARAMETERS, Cell, Kind, shrunk
from harness.contender import Contender
from harness.engines import OUR_ENCODER_FORMATS, OURS, Setting, contenders
from harness.limits import Costs, Machine, probe_peaks
from harness.processes import CellError
from harness.race import Race
from harness.results import Entry, Limit, Results, Sample, write
from headrace.kernels.vm import probe_bandwidth

PROBE_S = 0.1
LEAST_PROBE_BYTES = 64 * 2**20  # above the last-level cache


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run.

    Args:
        names: parts of "engine format" that are wanted; none means all. Ours always runs.
        cells: names of cells; none means all of the model. Their tokens are divided by ``divisor``.
        minutes: of the session; None means that the rounds decide.
    """

    models: Sequence[str]
    names: Sequence[str]
    cells: Sequence[str]
    rounds: int
    minutes: float | None
    divisor: int = 1


class Session:
    """One run of the harness over the models of a plan; every sample is written as soon as it is there."""

    def __init__(self, setting: Setting, plan: Plan, results: Results, file: Path) -> None:
        self._setting, self._plan, self._results, self._file = setting, plan, results, file
        self._race = Race(results)
        self._number = len(results.sessions) - 1
        self._until_s = monotonic() + 60 * plan.minutes if plan.minutes else float("inf")

    def run(self) -> None:
        """Runs every model; the time is shared out by what is left."""
        for index, model in enumerate(self._plan.models):
            left_s = self._until_s - monotonic()
            until_s = monotonic() + left_s / (len(self._plan.models) - index)
            self._run_model(model, until_s)

    def _run_model(self, model: str, until_s: float) -> None:
        found, missing = contenders(self._setting, model)
        for line in missing:
            say(f"left out: {line}")
        wanted = [each for each in found if self._is_wanted(each)]
        started = [each for each in wanted if self._start(model, each)]
        named = [cell for cell in CELLS[model] if not self._plan.cells or cell.name in self._plan.cells]
        cells = [shrunk(cell, self._plan.divisor) for cell in named]
        try:
            self._note_limits(model, cells)
            for index, cell in enumerate(cells):
                # A cell may use its share of what is left; what cheap ones do not need goes to the others.
                share_s = (until_s - monotonic()) / (len(cells) - index)
                self._run_cell(model, cell, started, monotonic() + share_s)
        finally:
            for each in started:
                each.end()

    def _is_wanted(self, contender: Contender) -> bool:
        names = self._plan.names
        label = f"{contender.engine} {contender.format}".lower()
        return contender.engine == OURS or not names or any(name.lower() in label for name in names)

    def _start(self, model: str, contender: Contender) -> bool:
        label = f"{contender.engine} {contender.format}"
        bits = 8 * contender.weight_bytes / PARAMETERS[model]
        self._results.remember(Entry(model, contender.engine, contender.format, bits))
        try:
            say(f"{model}: {label} took {contender.start():.1f} s to its first output")
            contender.pause()
        except CellError as error:
            say(f"{model}: {label} does not run: {error}")
            contender.end()
            self._keep(model, contender, Cell("start to first token", Kind.START), 0, None, 0.0, (0.0, 0.0), str(error))
            return False
        return True

    def _run_cell(self, model: str, cell: Cell, started: list[Contender], until_s: float) -> None:
        """Runs the cell's rounds, as many as are wanted and fit."""
        for number in range(self._plan.rounds):
            racing = self._racing(model, cell, started, until_s - monotonic())
            if not any(each.engine == OURS for each in racing):
                say(f"{model}, {cell.name}: no time for round {number + 1}")
                return
            self._round(model, cell, number, racing)

    def _racing(self, model: str, cell: Cell, started: list[Contender], left_s: float) -> list[Contender]:
        """Returns who is measured: ours, then the peers that are near the best, the best first, while they fit."""
        able = [each for each in started if each.can(cell)]
        near = [each for each in able if self._race.is_near(model, cell, each)]
        ordered = sorted(near, key=lambda each: (each.engine != OURS, -self._race.rank(model, each)))
        chosen: list[Contender] = []
        for each in ordered:
            expected_s = self._race.expected_s(model, cell, each) + PROBE_S
            if expected_s <= left_s:
                chosen.append(each)
                left_s -= expected_s
            elif each.engine != OURS:
                say(f"{model}, {cell.name}: {each.engine} {each.format} would take {expected_s:.0f} s, it waits")
        return chosen

    def _round(self, model: str, cell: Cell, number: int, racing: list[Contender]) -> None:
        before = self._probe(model)
        shown = []
        for each in racing:
            started_at_s = monotonic()
            value, error = None, ""
            each.resume()
            try:
                value = each.measure(cell)
            except CellError as problem:
                error = str(problem)
            each.pause()
            wall_s = monotonic() - started_at_s
            after = self._probe(model)
            self._keep(model, each, cell, number, value, wall_s, (before, after), error)
            before = after
            shown.append(f"{each.engine} {each.format} {'failed' if value is None else f'{value:,.4g}'}")
        left_s = self._until_s - monotonic()
        left = "" if left_s == float("inf") else f", {left_s / 60:.1f} min left"
        say(f"{model}, {cell.name}, round {number + 1} ({cell.unit}{left}): {'; '.join(shown)}")

    def _probe(self, model: str) -> float:
        size = max(LEAST_PROBE_BYTES, min(entry.bits for entry in self._results.entries) * PARAMETERS[model] / 8)
        return probe_bandwidth(int(size), self._setting.threads, PROBE_S)

    def _keep(
        self,
        model: str,
        contender: Contender,
        cell: Cell,
        number: int,
        value: float | None,
        wall_s: float,
        bandwidths: tuple[float, float],
        error: str,
    ) -> None:
        load = os.getloadavg()[0]
        names = (model, contender.engine, contender.format, cell.name)
        self._results.samples.append(Sample(self._number, number, *names, value, wall_s, *bandwidths, load, error))
        write(self._file, self._results)

    def _note_limits(self, model: str, cells: Sequence[Cell]) -> None:
        """The limits of our formats in this session, at the bandwidth and peaks probed now."""
        machine = Machine(statistics.median(self._probe(model) for _ in range(5)), probe_peaks(self._setting.threads))
        for form, path in our_paths(self._setting, model).items():
            costs = Costs(path, form, self._setting.threads)
            peak = machine.peaks[costs.arithmetic]
            for cell in cells:
                best = costs.best(cell, machine)
                if best is not None:
                    name = costs.arithmetic.name.lower()
                    limit = Limit(self._number, model, form, cell.name, best, machine.bandwidth, peak, name)
                    self._results.limits.append(limit)
        write(self._file, self._results)


def our_paths(setting: Setting, model: str) -> dict[str, Path]:
    """Returns the model of each of our formats."""
    if (setting.models / model / "modules.json").exists():
        return dict.fromkeys(OUR_ENCODER_FORMATS, setting.models / model)
    found = {form: setting.models / f"{model}.{form}.gguf" for form in ("Q4_1", "Q8_0")}
    return {form: path for form, path in found.items() if path.exists()}


def say(text: str) -> None:
    """Progress, on stderr."""
    print(text, file=sys.stderr, flush=True)
