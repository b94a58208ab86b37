"""The in-process recorder: counts, gauges and histograms by the names of the catalogue, and nothing else.

No exposition format lives here; ``observe`` turns a snapshot into text. Safe to call from any thread.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from dataclasses import dataclass, field

from headrace.base.catalogue import METRICS, Metric

Labels = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HistogramValue:
    """One histogram series: ``counts[i]`` observations ≤ ``buckets[i]`` and over the bound before; the last is +inf."""

    counts: tuple[int, ...]
    sum: float

    @property
    def count(self) -> int:
        """Number of observations."""
        return sum(self.counts)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Every series at one moment: metric name → label values in the catalogue's order → value."""

    counters: dict[str, dict[Labels, float]]
    gauges: dict[str, dict[Labels, float]]
    histograms: dict[str, dict[Labels, HistogramValue]]


@dataclass(slots=True)
class _Histogram:
    counts: list[int]
    sum: float = 0.0


@dataclass(slots=True)
class _Series:
    numbers: dict[str, dict[Labels, float]] = field(default_factory=dict)
    histograms: dict[str, dict[Labels, _Histogram]] = field(default_factory=dict)


class Recorder:
    """Holds the values of the catalogue's metrics.

    An unknown name, a wrong kind or a wrong set of labels is our own bug and asserts.
    Cost: one lock and one dictionary look-up per call, about a microsecond.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._series = _Series()

    def count(self, name: str, value: float = 1, **labels: str) -> None:
        """Adds ``value`` ≥ 0 to a counter."""
        assert value >= 0, f"{name}: a counter only grows"
        key = _key(name, "counter", labels)
        with self._lock:
            series = self._series.numbers.setdefault(name, {})
            series[key] = series.get(key, 0.0) + value

    def gauge(self, name: str, value: float, **labels: str) -> None:
        """Sets a gauge."""
        key = _key(name, "gauge", labels)
        with self._lock:
            self._series.numbers.setdefault(name, {})[key] = float(value)

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Adds one observation to a histogram."""
        key = _key(name, "histogram", labels)
        buckets = METRICS[name].buckets
        with self._lock:
            series = self._series.histograms.setdefault(name, {})
            histogram = series.get(key)
            if histogram is None:
                histogram = series[key] = _Histogram([0] * (len(buckets) + 1))
            histogram.counts[bisect_left(buckets, value)] += 1
            histogram.sum += value

    def snapshot(self) -> Snapshot:
        """Gives a copy of all series that have been touched."""
        with self._lock:
            numbers = {name: dict(series) for name, series in self._series.numbers.items()}
            histograms = {
                name: {key: HistogramValue(tuple(value.counts), value.sum) for key, value in series.items()}
                for name, series in self._series.histograms.items()
            }
        return Snapshot(
            counters={name: series for name, series in numbers.items() if METRICS[name].kind == "counter"},
            gauges={name: series for name, series in numbers.items() if METRICS[name].kind == "gauge"},
            histograms=histograms,
        )


def _key(name: str, kind: str, labels: dict[str, str]) -> Labels:
    metric: Metric | None = METRICS.get(name)
    assert metric is not None, f"{name} is not in the catalogue"
    assert metric.kind == kind, f"{name} is a {metric.kind}, not a {kind}"
    assert len(labels) == len(metric.labels), f"{name} has the labels {metric.labels}, not {tuple(labels)}"
    return tuple(labels[label] for label in metric.labels)
