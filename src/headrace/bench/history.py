"""Holds a version's load runs against an earlier one's: the regression check that is run each release or quarter.

A drop is **real** when a figure is worse by at least 5 % and the rounds of both versions tell them apart beyond chance
(1 of 100 for all figures together). Less than that is noise, or too small to hold a release for. Several runs of a
version, at different hours, make the check sharper than one long one, as they show how much the machine itself varies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec
import numpy as np

from headrace.base.errors import ConfigError
from headrace.bench import wording
from headrace.bench.compare import CONFIDENCE, FIGURES, LEAST_ROUNDS, Figure, Round
from headrace.bench.page import Page
from headrace.bench.plots import Axis, Series, line_chart
from headrace.bench.ranks import MAX_VALUES, Floats, holm, memory_of, unpaired_shift

DROP_RATIO: Final = 0.05
_CHART_VERSIONS: Final = 24


class Measured(Protocol):
    """What is needed of a kept run; ``store.measurements.Measurement`` is one."""

    @property
    def version(self) -> str:
        """Of the server."""
        ...

    @property
    def measured_at_s(self) -> float:
        """Since 1970 UTC."""
        ...

    @property
    def figures(self) -> Mapping[str, Sequence[float]]:
        """By name, one value a round."""
        ...


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """How one figure went from one version to another.

    Args:
        before, now: middle of the rounds; seconds, or per second.
        ratio: now ÷ before, with the ends of its 99 % interval; null where too few rounds bound it.
        p: chance of so clear a change between equal versions.
        is_drop: worse by the limit or more, and beyond chance.
    """

    name: str
    is_higher_better: bool
    before: float
    now: float
    ratio: float
    ratio_low: float | None
    ratio_high: float | None
    p: float
    is_drop: bool


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """The regression check of a series."""

    series: str
    version_before: str
    version_now: str
    runs_before: int
    runs_now: int
    drop_ratio: float
    changes: tuple[Change, ...]

    @property
    def drops(self) -> tuple[Change, ...]:
        """What became worse for real."""
        return tuple(change for change in self.changes if change.is_drop)


@dataclass(frozen=True, slots=True)
class Version:
    """A version's runs, in order of time."""

    name: str
    runs: tuple[Measured, ...]

    def values(self, figure: str) -> Floats:
        """Gives the rounds of all runs, at most 60, evenly taken."""
        found = np.array([value for run in self.runs for value in run.figures.get(figure, ()) if value > 0])
        if len(found) <= MAX_VALUES:
            return found
        return np.asarray(found[np.linspace(0, len(found) - 1, MAX_VALUES).round().astype(int)])


def figures_of(rounds: Sequence[Round]) -> dict[str, list[float]]:
    """Gives what is kept of a run: each figure's value in every round."""
    return {
        figure.name: values
        for figure in FIGURES
        if (values := [one.values[figure.name] for one in rounds if figure.name in one.values])
    }


def versions_of(runs: Sequence[Measured]) -> list[Version]:
    """Groups runs by version, in order of each version's first run."""
    by_name: dict[str, list[Measured]] = {}
    for run in sorted(runs, key=lambda run: run.measured_at_s):
        by_name.setdefault(run.version, []).append(run)
    return [Version(name, tuple(found)) for name, found in by_name.items()]


def check(
    series: str, runs: Sequence[Measured], *, against: str | None = None, drop_ratio: float = DROP_RATIO
) -> Check:
    """Holds the newest version against the one before it, or against ``against``.

    Raises:
        ConfigError: there are not two versions, or no figure of theirs has rounds enough.
    """
    versions = versions_of(runs)
    if len(versions) < 2:
        raise ConfigError(f"series {series!r} has {len(versions)} versions: a check takes two")
    *earlier, now = versions
    before = earlier[-1] if against is None else next((one for one in earlier if one.name == against), None)
    if before is None:
        known = ", ".join(one.name for one in earlier)
        raise ConfigError(f"series {series!r} has no version {against!r} before {now.name}; there are {known}")
    found = [
        (figure, before.values(figure.name), now.values(figure.name))
        for figure in FIGURES
        if min(len(before.values(figure.name)), len(now.values(figure.name))) >= LEAST_ROUNDS
    ]
    if not found:
        raise ConfigError(f"{before.name} and {now.name} have no figure with {LEAST_ROUNDS} rounds of each in common")
    return Check(
        series=series,
        version_before=before.name,
        version_now=now.name,
        runs_before=len(before.runs),
        runs_now=len(now.runs),
        drop_ratio=drop_ratio,
        changes=_changes(found, drop_ratio),
    )


def _changes(found: Sequence[tuple[Figure, Floats, Floats]], drop_ratio: float) -> tuple[Change, ...]:
    shifts = []
    for _, before, now in found:
        first, second = np.log(before), np.log(now)
        shifts.append(unpaired_shift(first, second, CONFIDENCE, memory=memory_of(first, second)))
    adjusted = holm(np.array([shift.p for shift in shifts]))
    changes = []
    for (figure, before, now), shift, p in zip(found, shifts, adjusted, strict=True):
        ratio = math.exp(shift.estimate)
        loss_ratio = 1 - ratio if figure.is_higher_better else ratio - 1
        changes.append(
            Change(
                name=figure.name,
                is_higher_better=figure.is_higher_better,
                before=float(np.median(before)),
                now=float(np.median(now)),
                ratio=ratio,
                ratio_low=math.exp(shift.low) if math.isfinite(shift.low) else None,
                ratio_high=math.exp(shift.high) if math.isfinite(shift.high) else None,
                p=float(p),
                is_drop=loss_ratio >= drop_ratio and float(p) < 1 - CONFIDENCE,
            )
        )
    return tuple(changes)


def check_words(found: Check) -> str:
    """Gives the check's result in a sentence."""
    where = f"from {found.version_before} ({found.runs_before} runs) to {found.version_now} ({found.runs_now} runs)"
    if not found.drops:
        return f"{found.series}: no real drop of {found.drop_ratio:.0%} or more {where}."
    drops = ", ".join(f"{change.name} {change.ratio - 1:+.1%}" for change in found.drops)
    return f"{found.series}: DROP {where}: {drops}."


def figure_words(name: str, value: float) -> str:
    """Gives a figure's value with its unit."""
    is_rate = any(figure.name == name and figure.is_higher_better for figure in FIGURES)
    return wording.amount(value) if is_rate else wording.duration(value)


def history_page(series: str, runs: Sequence[Measured], found: Check | None) -> str:
    """Gives the HTML: every figure over the latest 24 versions."""
    versions = versions_of(runs)[-_CHART_VERSIONS:]
    page = Page(f"History of {series}", f"{len(versions)} versions, {sum(len(one.runs) for one in versions)} runs")
    if found is not None:
        page.notes([check_words(found)])
    page.charts([chart for figure in FIGURES if (chart := _chart(figure, versions)) is not None])
    names = [figure.name for figure in FIGURES if any(len(one.values(figure.name)) for one in versions)]
    page.heading("Figures")
    page.table(
        "Middle of all rounds of a version",
        ("version", "runs", *names),
        [
            (
                one.name,
                str(len(one.runs)),
                *(
                    figure_words(name, float(np.median(values))) if len(values := one.values(name)) else "–"
                    for name in names
                ),
            )
            for one in versions
        ],
    )
    return page.html()


def _chart(figure: Figure, versions: Sequence[Version]) -> tuple[str, str] | None:
    scale, unit = (1.0, "") if figure.is_higher_better else (1e3, ", ms")
    points: dict[str, list[tuple[float, float | None]]] = {"upper quarter": [], "middle": [], "lower quarter": []}
    for at, version in enumerate(versions):
        values = version.values(figure.name)
        marks = np.quantile(values, [0.75, 0.5, 0.25]) * scale if len(values) else [None] * 3
        for line, mark in zip(points.values(), marks, strict=True):
            line.append((float(at), None if mark is None else float(mark)))
    if all(mark is None for _, mark in points["middle"]):
        return None
    svg = line_chart(
        f"{figure.name} over versions",
        "Middle and quarters of the rounds of each version.",
        [Series(name, points[name]) for name in ("middle", "upper quarter", "lower quarter")],
        Axis("version", tick_labels=[version.name for version in versions]),
        Axis(f"{figure.name}{unit}"),
    )
    return f"{figure.name} over versions", svg
