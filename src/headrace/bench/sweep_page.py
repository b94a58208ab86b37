"""A sweep as words, Markdown and a page with its curves."""

from __future__ import annotations

from headrace.bench import wording
from headrace.bench.markdown import table
from headrace.bench.page import Page
from headrace.bench.plots import Axis, Mark, Series, line_chart
from headrace.bench.sweep import KEPT_RATIO, Point, Sweep

_LATENCIES = (("TTFT", "ttft"), ("TPOT", "tpot"), ("E2E", "e2e"))


def load_name(sweep: Sweep) -> str:
    """Gives what a load is."""
    return "requests/s sent" if sweep.is_rate else "requests at once"


def columns(sweep: Sweep) -> tuple[str, ...]:
    """Gives the table's columns."""
    kept = ("kept",) if sweep.objectives else ()
    return (load_name(sweep), sweep.unit, "requests/s", "TTFT p50", "TPOT p50", "E2E p50", "E2E p95", "failed", *kept)


def rows(sweep: Sweep) -> list[tuple[str, ...]]:
    """Gives a row for each load; the knee's has an arrow."""
    found: list[tuple[str, ...]] = []
    for point in sweep.points:
        is_knee = point.load == sweep.knee
        kept = () if point.good_ratio is None else (f"{point.good_ratio:.1%}",)
        found.append(
            (
                f"{point.load:.4g}{' ← knee' if is_knee else ''}",
                f"{wording.amount(point.throughput_per_s)} "
                f"({wording.amount(point.throughput_low)}–{wording.amount(point.throughput_high)})",
                wording.amount(point.requests_per_s),
                _latency(point.ttft_p50_s),
                _latency(point.tpot_p50_s),
                _latency(point.e2e_p50_s),
                _latency(point.e2e_p95_s),
                f"{point.failed_ratio:.1%}",
                *kept,
            )
        )
    return found


def sweep_words(sweep: Sweep) -> str:
    """Gives the result in sentences."""
    unit = load_name(sweep)
    words = f"Most: {wording.amount(sweep.most_per_s)} {sweep.unit}."
    if sweep.knee is not None:
        point = next(point for point in sweep.points if point.load == sweep.knee)
        words += (
            f" The knee lies at {sweep.knee:.4g} {unit}: {wording.amount(point.throughput_per_s)} {sweep.unit}, E2E "
            f"p50 {wording.duration(point.e2e_p50_s)}; beyond it more load mostly makes requests wait."
        )
    if sweep.objectives:
        limits = ", ".join(map(str, sweep.objectives))
        words += (
            f" No load kept {limits}."
            if sweep.kept is None
            else f" {limits} is kept by {KEPT_RATIO:.0%} of requests up to {sweep.kept:.4g} {unit}."
        )
    return words


def render_sweep(sweep: Sweep) -> str:
    """Gives the Markdown, closed with a line break."""
    parts = [f"# Sweep of {sweep.model}", sweep_words(sweep)]
    if sweep.notes:
        parts.append("\n".join(f"> {note}  " for note in sweep.notes))
    parts += [table(columns(sweep), rows(sweep)), f"Server: {sweep.url}, {wording.moment(sweep.started_at_s)}."]
    return "\n\n".join(parts) + "\n"


def sweep_page(sweep: Sweep) -> str:
    """Gives the HTML."""
    page = Page(
        f"Sweep of {sweep.model}",
        f"{wording.moment(sweep.started_at_s)} · {sweep.url} · {len(sweep.points)} loads, {load_name(sweep)}",
    )
    page.paragraph(sweep_words(sweep))
    page.notes(sweep.notes)
    page.heading("Throughput against load")
    page.charts([_throughput(sweep), _trade(sweep)])
    page.heading("Latency against load")
    page.charts(_latencies(sweep))
    page.heading("Figures")
    page.table("In brackets the 95 % interval", columns(sweep), rows(sweep))
    return page.html()


def _load_axis(sweep: Sweep) -> Axis:
    return Axis(load_name(sweep), is_log=len(sweep.points) > 1)


def _marks(sweep: Sweep) -> list[Mark]:
    marks = [] if sweep.knee is None else [Mark(sweep.knee, f"knee, {sweep.knee:.4g}")]
    if sweep.kept is not None and sweep.kept != sweep.knee:
        marks.append(Mark(sweep.kept, f"objectives kept, {sweep.kept:.4g}"))
    return marks


def _throughput(sweep: Sweep) -> tuple[str, str]:
    caption = f"{sweep.unit[:1].upper()}{sweep.unit[1:]} against load"
    lines = [
        Series("measured", [(point.load, point.throughput_per_s) for point in sweep.points]),
        Series("95 % interval, low", [(point.load, point.throughput_low) for point in sweep.points]),
        Series("high", [(point.load, point.throughput_high) for point in sweep.points]),
    ]
    return caption, line_chart(
        caption, "Where the curve flattens the server is full.", lines, _load_axis(sweep), Axis(sweep.unit),
        marks=_marks(sweep),
    )  # fmt: skip


def _trade(sweep: Sweep) -> tuple[str, str]:
    caption = "What latency buys"
    scale, unit = _unit([point.e2e_p95_s for point in sweep.points])
    lines = [
        Series("E2E p50", [(point.throughput_per_s, point.e2e_p50_s * scale) for point in sweep.points]),
        Series("E2E p95", [(point.throughput_per_s, point.e2e_p95_s * scale) for point in sweep.points]),
    ]
    return caption, line_chart(
        caption,
        "Each point is a load; up and to the right is more load.",
        lines,
        Axis(sweep.unit),
        Axis(f"E2E, {unit}"),
    )


def _latencies(sweep: Sweep) -> list[tuple[str, str]]:
    charts = []
    for name, field in _LATENCIES:
        p50, p95 = ([_value(point, f"{field}_{quantile}_s") for point in sweep.points] for quantile in ("p50", "p95"))
        if all(value is None for value in p50):
            continue
        scale, unit = _unit(p95)
        lines = [
            Series(label, [
                (point.load, None if value is None else value * scale)
                for point, value in zip(sweep.points, values, strict=True)
            ])
            for label, values in (("p50", p50), ("p95", p95))
        ]  # fmt: skip
        caption = f"{name} against load"
        charts.append(
            (
                caption,
                line_chart(
                    caption, f"{name} at each load.", lines, _load_axis(sweep), Axis(f"{name}, {unit}"),
                    marks=_marks(sweep),
                ),
            )
        )  # fmt: skip
    return charts


def _value(point: Point, field: str) -> float | None:
    value = getattr(point, field)
    return None if value is None else float(value)


def _unit(values_s: list[float | None] | list[float]) -> tuple[float, str]:
    largest = max((value for value in values_s if value is not None), default=0.0)
    return (1.0, "s") if largest >= 10 else (1e3, "ms")


def _latency(value_s: float | None) -> str:
    return "–" if value_s is None else wording.duration(value_s)
