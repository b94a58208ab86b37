"""``headrace bench compare``: is there a difference between two servers or two recorded runs, and how large is it."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.bench_options import (
    BodyOption,
    HeaderOption,
    IgnoreEosOption,
    KeyEnvOption,
    OperationOption,
    OutputTokensOption,
    PromptTokensOption,
    SeedOption,
    TestFileOption,
    TokenizerOption,
    read_fields,
    read_headers,
)
from headrace.cli.bench_report import run_file
from headrace.cli.bench_workload import OperationName, made_samples
from headrace.cli.output import JsonOption, print_json, print_table

if TYPE_CHECKING:
    from headrace.bench.compare import Comparison, Round
    from headrace.bench.records import Run, Settings
    from headrace.bench.sample import Sample


def compare(
    a: Annotated[str, typer.Argument(help="A server's URL, or a recorded run (a file, or a folder with run.jsonl).")],
    b: Annotated[str, typer.Argument(help="What to hold against it, of the same kind.")],
    *,
    test_file: TestFileOption = None,
    concurrency: Annotated[int, typer.Option(help="Keep so many requests under way.", min=1, metavar="N")] = 8,
    rate: Annotated[float | None, typer.Option(help="Send so many a second instead.", metavar="R")] = None,
    rounds: Annotated[int, typer.Option(help="Of each server.", min=10, max=60, metavar="N")] = 20,
    round_requests: Annotated[int, typer.Option(help="Requests of a round.", min=1, metavar="N")] = 200,
    find: Annotated[
        float, typer.Option(help="Percent of difference that must not be missed.", min=1, max=90, metavar="P")
    ] = 10.0,
    model: Annotated[str | None, typer.Option(help="Its name in requests; default: each server's first.")] = None,
    operation: OperationOption = OperationName.CHAT,
    prompt_tokens: PromptTokensOption = "256",
    output_tokens: OutputTokensOption = "64",
    ignore_eos: IgnoreEosOption = False,
    tokenizer: TokenizerOption = None,
    body: BodyOption = None,
    header: HeaderOption = None,
    key_env: KeyEnvOption = "HEADRACE_API_KEY",
    seed: SeedOption = 0,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Write the comparison there as JSON, Markdown and HTML."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say whether two servers differ, and by how much.

    Two URLs are measured in turns, round by round, with the same requests, so what the machine does meanwhile meets
    both. With the 20 rounds of 200 requests of the default a difference of 10 % is found and equal servers are called
    equal in more than 95 of 100 cases ([bold]scripts/compare-power[/] counts them). Two recorded runs are compared as
    they are.

    Exit code: 0 no difference or B is better, 1 B is worse, 3 undecided.

    Examples: [bold]headrace bench compare http://127.0.0.1:8000 http://127.0.0.1:8001[/], [bold]headrace bench compare
    before/ after/ --output difference[/]
    """
    from headrace.base.errors import ConfigError
    from headrace.bench.compare import Verdict, compare_rounds

    are_urls = [text.startswith(("http://", "https://")) for text in (a, b)]
    if len(set(are_urls)) != 1:
        raise ConfigError(f"{a} and {b} are a server and a recorded run: give two servers or two runs")
    notes: tuple[str, ...] = ()
    if are_urls[0]:
        from headrace.cli.bench_serve import ArrivalName

        headers = read_headers(header or [], key_env)
        shared = {
            "concurrency": None if rate is not None else concurrency,
            "rate_per_s": rate,
            "arrivals": ArrivalName.POISSON.value,
            "seed": seed,
            "body": read_fields(body or []),
            "header_names": tuple(sorted(headers)),
            "tokenizer": str(tokenizer) if tokenizer is not None else None,
        }
        first, second, was_cut = _live(
            (a, b),
            model,
            shared,
            headers,
            made_samples(
                test_file,
                operation,
                prompt_tokens,
                output_tokens,
                must_fill=ignore_eos,
                tokenizer=tokenizer,
                seed=seed,
            ),
            rounds,
            round_requests,
        )
        notes = ("It was stopped early.",) if was_cut else ()
    else:
        first, second = _recorded(Path(a)), _recorded(Path(b))
    found = compare_rounds(first, second, is_paired=are_urls[0], names=(a, b), find_ratio=find / 100, notes=notes)
    _finish(found, output, as_json=as_json)
    raise typer.Exit({Verdict.WORSE: 1, Verdict.UNDECIDED: 3}.get(found.verdict, 0))


def _recorded(path: Path) -> list[Round]:
    from headrace.bench.compare import recorded_rounds
    from headrace.bench.records import read_run

    return recorded_rounds(read_run(run_file(path)))


def _live(
    urls: tuple[str, str],
    model: str | None,
    shared: dict[str, Any],
    headers: dict[str, str],
    samples: Iterator[Sample],
    rounds: int,
    requests: int,
) -> tuple[list[Round], list[Round], bool]:
    from headrace.bench.load import run_load
    from headrace.bench.probe import find_model
    from headrace.bench.records import Settings
    from headrace.bench.rounds import run_rounds

    first, second = (Settings(url=url, model=model or find_model(url, headers), **shared) for url in urls)
    with tempfile.TemporaryDirectory() as scratch:

        def measure(settings: Settings, batch: list[Sample]) -> Run:
            return run_load(settings, iter(batch), path=Path(scratch) / "round.jsonl", headers=headers)

        def tell(done: int, name: str) -> None:
            line = f"{done} of {rounds} rounds, {name} runs"
            sys.stderr.write(f"\r\x1b[K{line}" if sys.stderr.isatty() else f"{line}\n")
            sys.stderr.flush()

        try:
            return run_rounds((first, second), samples, measure, rounds=rounds, requests=requests, tell=tell)
        finally:
            if sys.stderr.isatty():
                sys.stderr.write("\r\x1b[K")


def _finish(found: Comparison, output: Path | None, *, as_json: bool) -> None:
    import msgspec

    from headrace.bench.comparison_page import (
        COLUMNS,
        comparison_page,
        method_words,
        render_comparison,
        rows,
        verdict_words,
    )

    paths = []
    if output is not None:
        from headrace.bench.report import write_files

        contents = {
            "comparison.json": msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n",
            "comparison.md": render_comparison(found).encode(),
            "comparison.html": comparison_page(found).encode(),
        }
        paths = write_files(output, contents)
    if as_json:
        print_json(found)
        return
    typer.echo(verdict_words(found))
    print_table(COLUMNS, rows(found))
    typer.echo(f"A is {found.name_a}, B is {found.name_b}. {method_words(found)}")
    for note in found.notes:
        typer.echo(f"! {note}")
    for path in paths:
        typer.echo(f"written: {path}")
