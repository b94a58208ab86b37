"""A run's report in Markdown, for issues and merge requests."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.bench import wording
from headrace.bench.summary import Summary


def render(summary: Summary) -> str:
    """Gives the whole report, closed with a line break."""
    parts = [
        f"# Load test of {summary.settings.model}",
        f"{summary.num_measured:,} requests in {summary.measured_s:,.1f} s, {wording.load_words(summary.settings)}; "
        f"{summary.num_failed:,} failed.",
    ]
    if summary.notes:
        parts.append("\n".join(f"> {note}  " for note in summary.notes))
    if summary.latency:
        rows = [
            (
                name,
                wording.duration(found.mean_s),
                *(
                    f"{wording.percentile(piece)} ({wording.span(piece.low_s, piece.high_s)})"
                    for piece in found.percentiles
                ),
                wording.duration(found.max_s),
            )
            for name, found in wording.latency_rows(summary)
        ]
        parts += [
            "## Latencies",
            "In brackets the 95 % interval; ~ is indicative.",
            table(wording.LATENCY_COLUMNS, rows),
        ]
    parts += ["## Throughput", table(("", "per second"), wording.throughput_rows(summary))]
    parts += [
        "## Tokens",
        table(("", "by usage", "by tokenizer"), wording.token_rows(summary)),
        wording.token_words(summary),
    ]
    if summary.errors:
        parts += ["## Errors", table(("kind", "requests", "share", "the first one said"), wording.error_rows(summary))]
    parts += ["## Settings and machine", table(("", ""), wording.setting_rows(summary))]
    meanings = [(wording.NAMES[name], text) for name, text in summary.definitions.items()]
    if meanings:
        parts += ["## Definitions", table(("name", "means"), meanings)]
    return "\n\n".join(parts) + "\n"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Gives a table of the GitHub kind."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
