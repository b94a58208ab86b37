"""The page of one run: the figures that matter first, then charts, then every table behind them."""

from __future__ import annotations

from typing import Final

from headrace.bench import wording
from headrace.bench.page import Cell, Page
from headrace.bench.plots import Axis, Series, line_chart
from headrace.bench.summary import Latency, Slice, Summary

_STREAM_NAMES: Final = ("itl", "tpot", "gap")


def run_page(summary: Summary) -> str:
    """Gives the HTML of a run's report."""
    page = Page(
        f"Load test of {summary.settings.model}",
        f"{wording.moment(summary.started_at_s)} · {summary.settings.url} · {wording.load_words(summary.settings)} · "
        f"{summary.num_measured:,} requests in {summary.measured_s:,.1f} s",
    )
    page.tiles(_tiles(summary))
    page.notes(summary.notes)
    page.heading("Over time")
    page.charts(over_time(summary))
    page.heading("How latencies are spread")
    page.charts(spread(summary))
    page.heading("Latencies")
    add_latency_table(page, summary)
    page.heading("Throughput and tokens")
    page.table("Of good requests; in brackets the 95 % interval", ("", "per second"), wording.throughput_rows(summary))
    page.table(
        "Token counts of good requests", ("", "by the server's usage", "by our tokenizer"), wording.token_rows(summary)
    )
    page.paragraph(wording.token_words(summary))
    page.heading("Errors")
    if summary.errors:
        page.table(
            f"Of {summary.num_measured:,} requests",
            ("kind", "requests", "share", "the first one said"),
            wording.error_rows(summary),
            is_words=True,
        )
    elif not summary.num_measured:
        page.paragraph("No request was measured.")
    else:
        page.paragraph(f"None: all {summary.num_measured:,} requests were answered.")
    page.heading("What was measured, and how")
    page.table("Settings and machine", ("", ""), wording.setting_rows(summary), is_words=True)
    page.table(
        "What the names mean",
        ("name", "definition"),
        [(wording.NAMES[name], text) for name, text in summary.definitions.items()],
        is_words=True,
    )
    return page.html()


def add_latency_table(page: Page, summary: Summary) -> None:
    """Adds the table of all latencies with their intervals."""
    rows = []
    for name, found in wording.latency_rows(summary):
        cells = [
            Cell(wording.percentile(piece), wording.span(piece.low_s, piece.high_s)) for piece in found.percentiles
        ]
        mean = Cell(wording.duration(found.mean_s), wording.span(found.mean_low_s, found.mean_high_s))
        rows.append([Cell(name, f"{found.num:,} values"), mean, *cells, Cell(wording.duration(found.max_s))])
    page.table("Beneath each figure its 95 % interval; ~ marks what is indicative", wording.LATENCY_COLUMNS, rows)


def _tiles(summary: Summary) -> list[tuple[str, str, str]]:
    tiles = []
    for name in ("ttft", "itl", "e2e"):
        if (found := summary.latency.get(name)) is not None:
            tail = found.at(0.99)
            tiles.append(
                (
                    f"{wording.NAMES[name]}, p50",
                    wording.duration(found.at(0.5).value_s),
                    f"p99 {wording.percentile(tail)}",
                )
            )
    throughput = summary.throughput
    if throughput.output_tokens_per_s is not None:
        found_rate = throughput.output_tokens_per_s
        tiles.append(
            (
                "Output tokens/s",
                wording.amount(found_rate.value),
                f"{wording.amount(found_rate.low)}–{wording.amount(found_rate.high)}",
            )
        )
    good = throughput.requests_per_s
    tiles.append(
        ("Good requests/s", wording.amount(good.value), f"{wording.amount(good.low)}–{wording.amount(good.high)}")
    )
    if throughput.good_ratio is not None:
        tiles.append(("Kept the objectives", f"{throughput.good_ratio:.1%}", ", ".join(map(str, summary.objectives))))
    failed_ratio = summary.num_failed / summary.num_measured if summary.num_measured else 0.0
    tiles.append(("Failed", f"{summary.num_failed:,}", f"{failed_ratio:.2%} of {summary.num_measured:,}"))
    return tiles


def over_time(summary: Summary) -> list[tuple[str, str]]:
    """Gives the charts over the run's time: caption and SVG."""
    slices = summary.slices
    middle_s = [piece.start_s + summary.slice_s / 2 for piece in slices]

    def series(name: str, values: list[float | None]) -> Series:
        return Series(name, list(zip(middle_s, values, strict=True)))

    charts = []
    for name, fields in (("ttft", ("ttft_p50_s", "ttft_p95_s")), ("e2e", ("e2e_p50_s", "e2e_p95_s"))):
        if name not in summary.latency:
            continue
        scale, unit = _unit([getattr(piece, fields[1]) for piece in slices])
        lines = [
            series(label, [_scaled(getattr(piece, key), scale) for piece in slices])
            for label, key in zip(("p50", "p95"), fields, strict=True)
        ]
        charts.append(
            (
                f"{wording.NAMES[name]} over time",
                line_chart(
                    f"{wording.NAMES[name]} over time",
                    f"Median and 95th percentile of requests that ended in each {summary.slice_s:.2g} s.",
                    lines,
                    _elapsed(summary),
                    Axis(f"{wording.NAMES[name]}, {unit}"),
                ),
            )
        )
    rates = [
        ("Requests unanswered", "requests", [series("in flight", [piece.in_flight for piece in slices])]),
        ("Requests that ended, good and failed", "requests/s", _ended(slices, middle_s, summary)),
    ]
    if summary.throughput.output_tokens_per_s is not None:
        tokens = series("tokens", [piece.output_tokens_per_s for piece in slices])
        rates.insert(0, ("Output tokens per second", "tokens/s", [tokens]))
    charts += [_rate_chart(caption, unit, lines, _elapsed(summary)) for caption, unit, lines in rates]
    return charts


def _rate_chart(caption: str, unit: str, lines: list[Series], elapsed: Axis) -> tuple[str, str]:
    return caption, line_chart(caption, f"{caption} over the run's time.", lines, elapsed, Axis(unit))


def _elapsed(summary: Summary) -> Axis:
    first_s = summary.slices[0].start_s
    return Axis(
        "seconds since the start",
        from_zero=False,
        start=first_s,
        stop=first_s + summary.slice_s * len(summary.slices),
    )


def _ended(slices: tuple[Slice, ...], middle_s: list[float], summary: Summary) -> list[Series]:
    width_s = summary.slice_s
    lines = [Series("good", [(at, piece.num_good / width_s) for at, piece in zip(middle_s, slices, strict=True)])]
    if summary.num_failed:
        failed = [(at, piece.num_failed / width_s) for at, piece in zip(middle_s, slices, strict=True)]
        lines.append(Series("failed", failed))
    return lines


def spread(summary: Summary) -> list[tuple[str, str]]:
    """Gives the charts of how latencies are distributed: caption and SVG."""
    charts = []
    for caption, names in (
        ("Time to first token and whole answer", ("ttft", "e2e")),
        ("Gaps between tokens", _STREAM_NAMES),
    ):
        found = {name: summary.latency[name] for name in names if name in summary.latency}
        if found:
            charts.append((caption, _cdf(caption, found)))
    return charts


def _cdf(caption: str, found: dict[str, Latency]) -> str:
    scale, unit = _unit([latency.cdf_s[-1] for latency in found.values()])
    lines = []
    for name, latency in found.items():
        last = len(latency.cdf_s) - 1
        points = [(value * scale, 100 * index / last) for index, value in enumerate(latency.cdf_s)]
        lines.append(Series(wording.NAMES[name], points))
    return line_chart(
        caption,
        "Share of requests, or of gaps, that took at most so long; further left is faster.",
        lines,
        Axis(f"at most, {unit}", is_log=True),
        Axis("share, %", stop=100),
    )


def _unit(values_s: list[float | None]) -> tuple[float, str]:
    largest = max((value for value in values_s if value is not None), default=0.0)
    return (1.0, "s") if largest >= 10 else (1e3, "ms")


def _scaled(value: float | None, scale: float) -> float | None:
    return None if value is None else value * scale
