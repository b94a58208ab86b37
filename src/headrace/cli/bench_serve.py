"""``headrace bench serve``: load on any OpenAI-compatible server, and what came of it."""

from __future__ import annotations

import sys
import tempfile
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.bench_options import read_fields, read_headers
from headrace.cli.bench_report import OutputOption, SloOption, finish
from headrace.cli.bench_workload import OnBadName, OperationName, make_workload
from headrace.cli.output import JsonOption

if TYPE_CHECKING:
    from headrace.bench.records import Settings
    from headrace.bench.workload import FileWorkload, MadeUpWorkload

_LOAD = "How to load"
_DATA = "What to send"
_REQUEST = "Each request"
_RESULT = "The result"


class ArrivalName(StrEnum):
    """How an open loop spaces its requests."""

    POISSON = "poisson"
    CONSTANT = "constant"
    RAMP = "ramp"
    TRACE = "trace"


def serve(
    *,
    server_url: Annotated[
        str, typer.Option(help="The server, with or without /v1: http://127.0.0.1:8000.", metavar="URL")
    ],
    test_file: Annotated[
        Path | None,
        typer.Option(
            help="Requests to send: OpenAI lines, ShareGPT, traces; without it they are made up.",
            metavar="FILE",
            rich_help_panel=_DATA,
        ),
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(
            help="Closed loop: keep so many requests under way; default: 1.", min=1, metavar="N", rich_help_panel=_LOAD
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            help="Open loop: send so many a second, whatever the server does.", metavar="R", rich_help_panel=_LOAD
        ),
    ] = None,
    arrivals: Annotated[
        ArrivalName, typer.Option(help="How an open loop spaces its requests.", rich_help_panel=_LOAD)
    ] = ArrivalName.POISSON,
    ramp_to: Annotated[
        float | None,
        typer.Option(
            help="With --arrivals ramp: the rate at the end of --duration.", metavar="R", rich_help_panel=_LOAD
        ),
    ] = None,
    trace_speed: Annotated[float, typer.Option(help="Play a trace so many times faster.", rich_help_panel=_LOAD)] = 1.0,
    num_requests: Annotated[
        int | None,
        typer.Option(
            help="Requests to measure; default: the file once, else 100.", min=1, metavar="N", rich_help_panel=_LOAD
        ),
    ] = None,
    duration: Annotated[
        float | None,
        typer.Option(help="Seconds to send for; answers under way are waited for.", metavar="S", rich_help_panel=_LOAD),
    ] = None,
    warmup: Annotated[
        str, typer.Option(help="Left out of all figures: 50 requests, or 10s.", metavar="N|Ns", rich_help_panel=_LOAD)
    ] = "0",
    model: Annotated[
        str | None, typer.Option(help="Its name in requests; default: the server's first.", rich_help_panel=_REQUEST)
    ] = None,
    operation: Annotated[
        OperationName, typer.Option(help="What made-up requests ask for.", rich_help_panel=_DATA)
    ] = OperationName.CHAT,
    prompt_tokens: Annotated[
        str,
        typer.Option(
            help="Of made-up prompts: 512, uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA.",
            metavar="NUMBER",
            rich_help_panel=_DATA,
        ),
    ] = "256",
    output_tokens: Annotated[
        str,
        typer.Option(
            help="Asked for by made-up requests (max_tokens), written alike.", metavar="NUMBER", rich_help_panel=_DATA
        ),
    ] = "128",
    prefix_tokens: Annotated[
        int, typer.Option(help="That all made-up prompts begin with.", min=0, metavar="N", rich_help_panel=_DATA)
    ] = 0,
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos",
            help="Have made-up requests answered at full length (our server, vLLM).",
            rich_help_panel=_DATA,
        ),
    ] = False,
    no_stream: Annotated[
        bool, typer.Option("--no-stream", help="Ask for whole answers.", rich_help_panel=_REQUEST)
    ] = False,
    body: Annotated[
        list[str] | None,
        typer.Option(
            help="A field for every request: temperature=0; repeatable.", metavar="NAME=JSON", rich_help_panel=_REQUEST
        ),
    ] = None,
    header: Annotated[
        list[str] | None,
        typer.Option(help="A header for every request; repeatable.", metavar="NAME: VALUE", rich_help_panel=_REQUEST),
    ] = None,
    key_env: Annotated[
        str,
        typer.Option(
            help="Environment variable that holds the key, if it is set.", metavar="NAME", rich_help_panel=_REQUEST
        ),
    ] = "HEADRACE_API_KEY",
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            help="Model folder to count tokens with, beside the server's own counts.",
            metavar="FOLDER",
            rich_help_panel=_RESULT,
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds for a whole answer.", metavar="S", rich_help_panel=_REQUEST)
    ] = 600.0,
    connect_timeout: Annotated[
        float, typer.Option(help="Seconds for a connection.", metavar="S", rich_help_panel=_REQUEST)
    ] = 10.0,
    processes: Annotated[
        int | None,
        typer.Option(
            help="That send; default: as many as the load needs.", min=1, max=256, metavar="N", rich_help_panel=_REQUEST
        ),
    ] = None,
    on_bad: Annotated[
        OnBadName, typer.Option(help="What a line of the file does that is no request.", rich_help_panel=_DATA)
    ] = OnBadName.SKIP,
    max_error_ratio: Annotated[
        float,
        typer.Option(
            help="Share of requests that may fail before the exit code is 1.", min=0, max=1, rich_help_panel=_RESULT
        ),
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Of arrivals and made-up prompts.", min=0, rich_help_panel=_DATA)] = 0,
    slo: SloOption = None,
    output: OutputOption = None,
    as_json: JsonOption = False,
) -> None:
    """Put load on a server that speaks OpenAI's API, and measure what its users would see.

    [bold]Two ways to load.[/] A closed loop (--concurrency) sends the next request when one is answered: it finds the
    most that a server can do. An open loop (--rate) sends on a schedule, as real users do; when the server is late,
    requests pile up and their waiting counts, from the moment they should have been sent. Use it to learn what latency
    users would see.

    [bold]What the figures are.[/] TTFT: until the first chunk with text. ITL: between chunks. TPOT: per token after the
    first. E2E: until the last byte. Times are read as the bytes arrive, by processes that do nothing else; how late
    those were themselves is printed with the result. A percentile marked ~ rests on too few requests to be trusted.

    Ctrl-C (or SIGTERM) ends a run early and prints what there is. Exit code: 0 all answered, 1 more failed than
    --max-error-ratio, 3 cut short.

    Examples:

    [bold]headrace bench serve --server-url http://127.0.0.1:8000 --concurrency 32 --num-requests 500[/]

    [bold]headrace bench serve --server-url http://127.0.0.1:8000 --test-file chats.jsonl --rate 5 --duration 120
    --warmup 10s --slo ttft=500ms,itl=50ms --output report[/]
    """
    from headrace.base.errors import ConfigError
    from headrace.bench.load import run_load
    from headrace.bench.probe import find_model
    from headrace.bench.records import Settings
    from headrace.bench.slo import parse_slo
    from headrace.bench.summarize import summarize
    from headrace.cli.bench_live import show_run

    objectives = parse_slo(slo) if slo else ()
    headers = read_headers(header or [], key_env)
    warmup_requests, warmup_s = read_warmup(warmup)
    if arrivals is ArrivalName.TRACE and test_file is None:
        raise ConfigError("--arrivals trace takes its times from a --test-file")
    if rate is None and concurrency is None and arrivals is not ArrivalName.TRACE:
        concurrency = 1
    workload = make_workload(
        test_file,
        operation=operation,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        prefix_tokens=prefix_tokens,
        must_fill=ignore_eos,
        tokenizer=tokenizer,
        on_bad=on_bad,
        seed=seed,
        is_repeated=num_requests is not None or duration is not None,
    )
    if test_file is None and num_requests is None and duration is None:
        num_requests = 100
    settings = Settings(
        url=server_url,
        model=model or find_model(server_url, headers),
        concurrency=concurrency,
        rate_per_s=rate,
        arrivals=arrivals.value,
        ramp_to_per_s=ramp_to,
        trace_speed=trace_speed,
        num_requests=num_requests,
        duration_s=duration,
        warmup_requests=warmup_requests,
        warmup_s=warmup_s,
        is_streamed=not no_stream,
        timeout_s=timeout,
        connect_timeout_s=connect_timeout,
        processes=processes,
        seed=seed,
        data=workload.name,
        body=read_fields(body or []),
        header_names=tuple(sorted(headers)),
        tokenizer=str(tokenizer) if tokenizer is not None else None,
    )
    with tempfile.TemporaryDirectory() as scratch:
        folder = output or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        with show_run() as progress:
            run = run_load(settings, workload.open(), path=folder / "run.jsonl", headers=headers, progress=progress)
        _say_rounds(workload, settings)
        summary = summarize(run, objectives)
        finish(summary, output, as_json=as_json)
    if run.is_partial:
        raise typer.Exit(3)
    if summary.num_failed > max_error_ratio * max(1, summary.num_measured) or not summary.num_measured:
        raise typer.Exit(1)


def read_warmup(text: str) -> tuple[int, float]:
    """Gives requests and seconds to warm up for; one of them is 0.

    Raises:
        ConfigError: it is neither.
    """
    from headrace.base.errors import ConfigError

    try:
        number = (0, float(text[:-1])) if text.endswith("s") else (int(text), 0.0)
    except ValueError as error:
        raise ConfigError(f"--warmup is {text!r}; write 50 (requests) or 10s (seconds)") from error
    if not 0 <= sum(number) < float("inf"):
        raise ConfigError(f"--warmup is {text!r}; it must be at least 0")
    return number


def _say_rounds(workload: FileWorkload | MadeUpWorkload, settings: Settings) -> None:
    rounds = getattr(workload, "rounds", 1)
    if rounds > 1:
        sys.stderr.write(
            f"{settings.data} was sent {rounds} times over: from the second time on a prefix cache may know it\n"
        )
