"""A comparison as words, Markdown and a page."""

from __future__ import annotations

from headrace.bench import wording
from headrace.bench.compare import CONFIDENCE, Comparison, FigureResult, Verdict
from headrace.bench.markdown import table
from headrace.bench.page import Page
from headrace.bench.plots import Axis, Series, line_chart

COLUMNS = ("", "A", "B", "B ÷ A", "99 % interval", "p", "B is")


def rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """Gives the table's rows, those first on which the verdict rests."""
    found = sorted(comparison.results, key=lambda result: not result.decides)
    return [
        (
            result.name,
            _figure(result, result.a),
            _figure(result, result.b),
            f"{result.ratio:.3f}",
            _interval(result),
            f"{result.p:.3g}" if result.p >= 0.0005 else "< 0.0005",
            result.verdict if result.decides else f"({result.verdict})",
        )
        for result in found
    ]


def verdict_words(comparison: Comparison) -> str:
    """Gives the verdict in a sentence."""
    a, b = comparison.name_a, comparison.name_b
    at_least = f"{comparison.find_ratio:.0%}"
    match comparison.verdict:
        case Verdict.SAME:
            return f"No difference between {a} and {b}; one of {at_least} would have been seen."
        case Verdict.UNDECIDED:
            return (
                f"Undecided: no difference was seen, but one of {at_least} cannot be ruled out. Give it more rounds or "
                "more requests a round."
            )
        case Verdict.BETTER | Verdict.WORSE:
            clear = [
                f"{result.name} {result.ratio - 1:+.1%}"
                for result in comparison.results
                if result.decides and result.verdict in (Verdict.BETTER, Verdict.WORSE)
            ]
            return f"{b} is {comparison.verdict} than {a}: {', '.join(clear) or 'it fails more often'}."


def method_words(comparison: Comparison) -> str:
    """Gives how it was found out, in sentences."""
    how = (
        "Rounds of A and B alternated and are compared pair by pair (Wilcoxon's signed-rank test)."
        if comparison.is_paired
        else "Two recorded runs, cut into rounds, are compared as groups (Mann and Whitney's test, widened where "
        "neighbouring rounds resemble each other). What changed between the runs is part of the difference."
    )
    steady = "" if comparison.is_paired else ", if the machine held still"
    return (
        f"{comparison.rounds} rounds, {comparison.requests:,} requests a side. {how} The figures that decide "
        f"are tested together (Holm): equal servers are called different in at most {1 - CONFIDENCE:.0%} of "
        f"cases{steady}."
    )


def render_comparison(comparison: Comparison) -> str:
    """Gives the Markdown, closed with a line break."""
    parts = [
        f"# {comparison.name_b} beside {comparison.name_a}",
        f"**{verdict_words(comparison)}**",
        *([] if not comparison.notes else ["\n".join(f"> {note}  " for note in comparison.notes)]),
        table(COLUMNS, rows(comparison)),
        f"A is {comparison.name_a}, B is {comparison.name_b}. {method_words(comparison)}",
    ]
    return "\n\n".join(parts) + "\n"


def comparison_page(comparison: Comparison) -> str:
    """Gives the HTML."""
    page = Page(f"{comparison.name_b} beside {comparison.name_a}", f"A: {comparison.name_a} · B: {comparison.name_b}")
    page.tiles(
        [
            ("B is", comparison.verdict, verdict_words(comparison)),
            ("Requests a side", f"{comparison.requests:,}", f"{comparison.rounds} rounds"),
            ("Failed", f"{comparison.failed_a:,} and {comparison.failed_b:,}", "A and B"),
        ]
    )
    page.notes(comparison.notes)
    page.heading("Figures")
    page.table("Middle of the rounds; in brackets: the verdict does not rest on it", COLUMNS, rows(comparison))
    page.paragraph(method_words(comparison))
    page.heading("Round by round")
    page.charts([(result.name, _chart(comparison, result)) for result in comparison.results if result.decides])
    return page.html()


def _chart(comparison: Comparison, result: FigureResult) -> str:
    is_rate = result.is_higher_better
    scale, unit = (1.0, "per second") if is_rate else (1e3, "ms")
    lines = [
        Series(
            f"{letter}: {name}"[:40], [(float(at + 1), value * scale) for at, value in enumerate(found[result.name])]
        )
        for letter, name, found in (
            ("A", comparison.name_a, comparison.figures_a),
            ("B", comparison.name_b, comparison.figures_b),
        )
    ]
    label = result.name if is_rate else f"{result.name}, {unit}"
    return line_chart(
        f"{result.name}, round by round", "Each side's figure in each round.", lines, Axis("round"), Axis(label)
    )


def _figure(result: FigureResult, value: float) -> str:
    return wording.amount(value) if result.is_higher_better else wording.duration(value)


def _interval(result: FigureResult) -> str:
    low = "?" if result.ratio_low is None else f"{result.ratio_low:.3f}"
    high = "?" if result.ratio_high is None else f"{result.ratio_high:.3f}"
    return f"{low}–{high}"
