"""``headrace bench sweep``: how throughput and latency go with the load, and where the knee is."""

from __future__ import annotations

import math
import sys
import tempfile
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
from headrace.cli.bench_report import SloOption
from headrace.cli.bench_workload import OperationName, made_samples
from headrace.cli.output import JsonOption, print_json, print_table

if TYPE_CHECKING:
    from headrace.bench.summary import Summary
    from headrace.bench.sweep import Sweep


class Over(StrEnum):
    """What is raised."""

    CONCURRENCY = "concurrency"
    RATE = "rate"


def sweep(
    *,
    server_url: Annotated[
        str, typer.Option(help="The server, with or without /v1: http://127.0.0.1:8000.", metavar="URL")
    ],
    over: Annotated[Over, typer.Option(help="Requests at once, or requests sent per second.")] = Over.CONCURRENCY,
    loads: Annotated[
        str | None,
        typer.Option(help="The loads, with commas; default: doubling from --first to --last.", metavar="LIST"),
    ] = None,
    first: Annotated[float, typer.Option(help="The lowest load.", metavar="N")] = 1.0,
    last: Annotated[float, typer.Option(help="The highest load; it ends earlier when the server is full.")] = 256.0,
    point_requests: Annotated[
        int, typer.Option(help="Requests of a load, at least; four times what runs at once otherwise.", min=1)
    ] = 200,
    test_file: TestFileOption = None,
    model: Annotated[str | None, typer.Option(help="Its name in requests; default: the server's first.")] = None,
    operation: OperationOption = OperationName.CHAT,
    prompt_tokens: PromptTokensOption = "256",
    output_tokens: OutputTokensOption = "64",
    ignore_eos: IgnoreEosOption = False,
    tokenizer: TokenizerOption = None,
    body: BodyOption = None,
    header: HeaderOption = None,
    key_env: KeyEnvOption = "HEADRACE_API_KEY",
    slo: SloOption = None,
    seed: SeedOption = 0,
    output: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write the sweep there as JSON, Markdown and HTML.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Raise the load step by step until the server is full, and find the knee.

    The knee is where throughput ÷ latency is largest: below it the server idles, beyond it more load mostly makes
    requests wait. With --slo the highest load that keeps the objectives is given as well.

    Exit code: 0 it has a curve, 1 no request was answered.

    Examples: [bold]headrace bench sweep --server-url http://127.0.0.1:8000 --output sweep[/], [bold]headrace bench
    sweep --server-url http://127.0.0.1:8000 --over rate --first 1 --last 64 --slo ttft=500ms[/]
    """
    from headrace.bench.load import run_load
    from headrace.bench.probe import find_model
    from headrace.bench.records import Settings
    from headrace.bench.slo import parse_slo
    from headrace.bench.summarize import summarize
    from headrace.bench.sweep import run_sweep

    is_rate = over is Over.RATE
    wanted = read_loads(loads, first, last, is_rate=is_rate)
    objectives = parse_slo(slo) if slo else ()
    headers = read_headers(header or [], key_env)
    base = Settings(
        url=server_url,
        model=model or find_model(server_url, headers),
        body=read_fields(body or []),
        header_names=tuple(sorted(headers)),
        seed=seed,
        tokenizer=str(tokenizer) if tokenizer is not None else None,
    )
    samples = made_samples(
        test_file,
        operation,
        prompt_tokens,
        output_tokens,
        must_fill=ignore_eos,
        tokenizer=tokenizer,
        seed=seed,
    )

    with tempfile.TemporaryDirectory() as scratch:

        def measure(load: float) -> Summary:
            import msgspec

            sys.stderr.write(f"{over}: {load:.4g}\n")
            at_once = 4 * load if not is_rate else 10 * load  # an open loop's load is what comes in ten seconds
            settings = msgspec.structs.replace(
                base,
                concurrency=None if is_rate else int(load),
                rate_per_s=load if is_rate else None,
                num_requests=max(point_requests, math.ceil(at_once)),
                warmup_requests=0 if is_rate else int(load),
            )
            return summarize(
                run_load(settings, samples, path=Path(scratch) / "point.jsonl", headers=headers), objectives
            )

        found = run_sweep(wanted, measure, is_rate=is_rate)
    if found is None:
        sys.stderr.write("headrace: no request was answered: try `headrace bench serve` to see why\n")
        raise typer.Exit(1)
    _finish(found, output, as_json=as_json)


def read_loads(text: str | None, first: float, last: float, *, is_rate: bool) -> list[float]:
    """Gives the loads that the options ask for, ascending.

    Raises:
        ConfigError: one is no load.
    """
    from headrace.base.errors import ConfigError
    from headrace.bench.sweep import doubling

    if text is None:
        if not 0 < first <= last < 1e6:
            raise ConfigError(f"--first is {first:g} and --last {last:g}: 0 < first ≤ last < 1,000,000 is needed")
        found = doubling(first, last)
    else:
        try:
            found = sorted({float(part) for part in text.split(",")})
        except ValueError as error:
            raise ConfigError(f"--loads is {text!r}: write numbers with commas, for example 1,4,16") from error
    if not all(0 < load < 1e6 for load in found):
        raise ConfigError(f"a load of {found[0]:g} to {found[-1]:g} is asked for: over 0 and below 1,000,000 is needed")
    if not is_rate and any(load != int(load) for load in found):
        raise ConfigError("requests at once are whole numbers: give whole loads, or --over rate")
    return found


def _finish(found: Sweep, output: Path | None, *, as_json: bool) -> None:
    import msgspec

    from headrace.bench.sweep_page import columns, render_sweep, rows, sweep_page, sweep_words

    paths = []
    if output is not None:
        from headrace.bench.report import write_files

        contents = {
            "sweep.json": msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n",
            "sweep.md": render_sweep(found).encode(),
            "sweep.html": sweep_page(found).encode(),
        }
        paths = write_files(output, contents)
    if as_json:
        print_json(found)
        return
    print_table(columns(found), rows(found))
    typer.echo(sweep_words(found))
    for note in found.notes:
        typer.echo(f"! {note}")
    for path in paths:
        typer.echo(f"written: {path}")
