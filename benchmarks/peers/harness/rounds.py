"""Runs the rounds: every cell by every engine in turn, the bandwidth probed around each, within a budget of time.

A round measures a cell with ours, then with each peer (A B C, A B C, …), so that a slow minute of the machine meets
them alike. Rounds go over the cells in turn. Within a budget the first three rounds of each cell are for ours and the
two peers that did best in it so far, because they decide; all others follow, and are measured again only where they
come near. A peer is started when its turn comes first. What does not fit is not begun.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
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
from headrace.program.cost import Arithmetic

PROBE_S = 0.1
LEAST_ROUNDS = 3
LEAST_LEFT_S = 1.0
DEAR_RATIO = 0.25
"""A round that takes a larger share of what is left waits until the others had theirs."""
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
        self._model = ""
        self._ready: list[Contender] = []
        self._failed: list[Contender] = []
        self._bandwidths: list[float] = []
        self._peaks: dict[Arithmetic, float] = {}

    def run(self) -> None:
        """Runs every model; the time is shared out by what is left.

        Raises:
            KeyboardInterrupt: it was stopped; all processes have ended, and the results hold what was measured.
        """
        for index, model in enumerate(self._plan.models):
            left_s = self._until_s - monotonic()
            until_s = monotonic() + left_s / (len(self._plan.models) - index)
            self._run_model(model, until_s)

    def _run_model(self, model: str, until_s: float) -> None:
        found, missing = contenders(self._setting, model)
        for line in missing:
            say(f"left out: {line}")
        self._model, self._ready, self._failed = model, [], []
        self._bandwidths, self._peaks = [], {}
        wanted = [each for each in found if self._is_wanted(each)]
        named = [cell for cell in CELLS[model] if not self._plan.cells or cell.name in self._plan.cells]
        cells = [shrunk(cell, self._plan.divisor) for cell in named]
        for each in wanted:
            bits = 8 * each.weight_bytes / PARAMETERS[model]
            self._results.remember(Entry(model, each.engine, each.format, bits))
        try:
            self._probe_peaks()
            timed = [cell for cell in cells if cell.kind is not Kind.MEMORY]
            for number, cell in product(range(self._plan.rounds), timed):
                if until_s - monotonic() < LEAST_LEFT_S:
                    say(f"{model}: the time is up")
                    break
                self._begin_round(cell, number, wanted, until_s)
                self._probe_peaks()
            for cell in cells:
                if cell.kind is Kind.MEMORY:
                    # Once, at the end: what each held at most over all that it ran.
                    self._round(cell, 0, [each for each in self._ready if each.can(cell)])
        finally:
            for each in self._ready:
                each.end()
            self._note_limits(cells)

    def _is_wanted(self, contender: Contender) -> bool:
        names = self._plan.names
        label = f"{contender.engine} {contender.format}".lower()
        return contender.engine == OURS or not names or any(name.lower() in label for name in names)

    def _is_running(self, contender: Contender) -> bool:
        """Starts it where that was not done yet; one that does not start is noted, and left alone from then on."""
        if contender in self._ready:
            return True
        label = f"{self._model}: {contender.engine} {contender.format}"
        try:
            say(f"{label} took {contender.start():.1f} s to its first output")
            contender.pause()
        except CellError as error:
            say(f"{label} does not run: {error}")
            contender.end()
            self._failed.append(contender)
            start = Cell("start to first token", Kind.START)
            self._keep(self._model, contender, start, 0, None, 0.0, (0.0, 0.0), str(error))
            return False
        except BaseException:
            contender.end()
            raise
        self._ready.append(contender)
        return True

    def _begin_round(self, cell: Cell, number: int, wanted: list[Contender], until_s: float) -> None:
        """Runs a round of a cell, with as many as fit; without ours it is none."""
        able = [each for each in wanted if each.can(cell) and each not in self._failed]
        if self._plan.minutes is not None and number < LEAST_ROUNDS:
            able = self._race.few(self._model, cell, able)
        else:
            able = [each for each in able if self._race.is_near(self._model, cell, each)]
        left_s = until_s - monotonic()
        ordered = self._race.ordered(self._model, cell, able)
        costs = [self._cost_s(cell, each) for each in ordered]
        if self._is_dear(cell, number, sum(costs), left_s):
            say(f"{self._model}, {cell.name}: a round would take {sum(costs):.0f} s, it waits")
            return
        racing: list[Contender] = []
        for each, cost_s in zip(ordered, costs, strict=True):
            if cost_s > left_s:
                if each.engine == OURS:
                    say(f"{self._model}, {cell.name}: no time for round {number + 1}")
                    return
                say(f"{self._model}, {cell.name}: {each.engine} {each.format} would take {cost_s:.0f} s, it waits")
            elif self._is_running(each):
                racing.append(each)
                left_s -= cost_s
        if racing and racing[0].engine == OURS:
            self._round(cell, number, racing)

    def _cost_s(self, cell: Cell, contender: Contender) -> float:
        """The seconds that a measurement is expected to take, a first start included."""
        start_s = 0.0 if contender in self._ready else self._race.start_s(self._model, contender)
        return start_s + self._race.expected_s(self._model, cell, contender) + PROBE_S

    def _is_dear(self, cell: Cell, number: int, cost_s: float, left_s: float) -> bool:
        """Whether a round takes so much of the time that the other cells would not get their least rounds.

        Such a cell is measured in the last of these rounds, with what is left then.
        """
        return number < LEAST_ROUNDS - 1 and len(self._plan.cells) != 1 and cost_s > DEAR_RATIO * left_s

    def _round(self, cell: Cell, number: int, racing: list[Contender]) -> None:
        model = self._model
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
        found = probe_bandwidth(int(size), self._setting.threads, PROBE_S)
        self._bandwidths.append(found)
        return found

    def _probe_peaks(self) -> None:
        """Keeps the best of the session: a neighbour halves what a probe of 0.1 s sees, and nothing makes it larger."""
        for kind, peak in probe_peaks(self._setting.threads).items():
            self._peaks[kind] = max(peak, self._peaks.get(kind, 0.0))

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

    def _note_limits(self, cells: Sequence[Cell]) -> None:
        """The limits of our formats: at the median of the session's bandwidths and the best of its peaks."""
        model = self._model
        machine = Machine(statistics.median(self._bandwidths or [self._probe(model)]), self._peaks)
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
