"""``headrace bench report``: the figures of a run that was recorded, and how any run's figures look on a terminal."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.output import JsonOption, print_json, print_table

if TYPE_CHECKING:
    from headrace.bench.summary import Summary

SloOption = Annotated[
    str | None,
    typer.Option(
        "--slo", metavar="LIMITS", help="What a good request keeps, for goodput: ttft=500ms,itl=50ms,gap=…,tpot=…,e2e=…"
    ),
]
OutputOption = Annotated[
    Path | None, typer.Option("--output", metavar="FOLDER", help="Write the report there as JSON, Markdown and HTML.")
]


def report(
    run: Annotated[Path, typer.Argument(help="A run that `bench serve` recorded, or a folder that holds run.jsonl.")],
    *,
    slo: SloOption = None,
    output: OutputOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compute a recorded run's figures again: with other objectives, or as a page.

    Example: [bold]headrace bench report run.jsonl --slo ttft=500ms,itl=50ms --output report[/]
    """
    from headrace.bench.records import read_run
    from headrace.bench.slo import parse_slo
    from headrace.bench.summarize import summarize

    summary = summarize(read_run(run_file(run)), parse_slo(slo) if slo else ())
    finish(summary, output, as_json=as_json)


def run_file(path: Path) -> Path:
    """Gives the file of a run that a path names: itself, or run.jsonl in the folder."""
    return path / "run.jsonl" if path.is_dir() else path


def finish(summary: Summary, output: Path | None, *, as_json: bool) -> None:
    """Writes the report where a folder is given, and prints it."""
    paths = []
    if output is not None:
        from headrace.bench.report import write_reports

        paths = write_reports(summary, output)
    if as_json:
        print_json(summary)
        return
    print_summary(summary)
    for path in paths:
        typer.echo(f"written: {path}")


def print_summary(summary: Summary) -> None:
    """Prints a run's figures as tables."""
    from headrace.bench import wording

    typer.echo(
        f"{summary.num_measured:,} requests to {summary.settings.url} in {summary.measured_s:,.1f} s, "
        f"{wording.load_words(summary.settings)}; {summary.num_failed:,} failed"
    )
    if summary.latency:
        rows = [
            (
                name,
                wording.duration(found.mean_s),
                *(wording.percentile(piece) for piece in found.percentiles),
                wording.duration(found.max_s),
            )
            for name, found in wording.latency_rows(summary)
        ]
        print_table(wording.LATENCY_COLUMNS, rows)
    print_table(("", "per second (95 % interval)"), wording.throughput_rows(summary))
    if summary.errors:
        print_table(("error", "requests", "share", "the first one said"), wording.error_rows(summary))
    if summary.num_good:
        typer.echo(wording.token_words(summary))
    typer.echo(f"generator: {wording.overhead_words(summary)}")
    for note in summary.notes:
        typer.echo(f"! {note}")
