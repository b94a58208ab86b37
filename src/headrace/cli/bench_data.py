"""``headrace bench data``: makes sample files for ``headrace bench serve``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.bench_workload import OperationName
from headrace.cli.output import JsonOption, print_json

_MAX_TEXT_BYTES = 64 * 2**20


def data(
    path: Annotated[Path, typer.Argument(help="The file to write: JSON lines, replaced where it exists.")],
    *,
    num: Annotated[int, typer.Option(help="Lines.", min=1, metavar="N")] = 100_000,
    operation: Annotated[OperationName, typer.Option(help="What the requests ask for.")] = OperationName.CHAT,
    prompt_tokens: Annotated[
        str,
        typer.Option(
            help="Of a prompt: 512, uniform:LOW:HIGH, lognormal:MEDIAN:SIGMA or zipf:HIGHEST:EXPONENT.",
            metavar="NUMBER",
        ),
    ] = "lognormal:256:0.8",
    output_tokens: Annotated[
        str, typer.Option(help="Asked for as max_tokens, written alike.", metavar="NUMBER")
    ] = "lognormal:128:0.6",
    turns: Annotated[str, typer.Option(help="Turns of a chat, written alike: uniform:1:5.", metavar="NUMBER")] = "1",
    pause: Annotated[str, typer.Option(help="Seconds before a later turn, written alike.", metavar="NUMBER")] = "0",
    shared: Annotated[
        float, typer.Option(help="Percent of lines that begin with a common text.", min=0, max=100, metavar="P")
    ] = 0.0,
    prefix_tokens: Annotated[int, typer.Option(help="Of a common beginning.", min=1, metavar="N")] = 256,
    prefixes: Annotated[int, typer.Option(help="Different common beginnings.", min=1, max=10_000, metavar="N")] = 10,
    rate: Annotated[
        float | None,
        typer.Option(
            help="Write Poisson arrivals of so many a second, for `bench serve --arrivals trace`.", metavar="R"
        ),
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="UTF-8 text of your own to cut prompts from, at most 64 MiB.", metavar="FILE")
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Model folder whose tokens are counted; else 1.3 tokens a word.", metavar="FOLDER"),
    ] = None,
    processes: Annotated[
        int | None, typer.Option(help="That make lines; default: one per CPU.", min=1, max=256, metavar="N")
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed makes the same file.", min=0)] = 0,
    as_json: JsonOption = False,
) -> None:
    """Make a file of requests: lengths, conversations, shared beginnings and arrivals as you say.

    Prompts are cut from the prose that ships, or from your own text. With --tokenizer they have exactly the wanted
    number of tokens. The file depends on nothing but these options, however many processes make it.

    Examples: [bold]headrace bench data requests.jsonl[/], [bold]headrace bench data chats.jsonl --num 5000 --turns
    uniform:1:5 --shared 50 --tokenizer ./model[/]
    """
    from headrace.bench.make import Plan, make_file
    from headrace.bench.spread import parse_spread
    from headrace.text.prose import read_text

    plan = Plan(
        num_lines=num,
        operation=operation.value,
        prompt_tokens=parse_spread(prompt_tokens, "--prompt-tokens"),
        output_tokens=parse_spread(output_tokens, "--output-tokens"),
        turns=parse_spread(turns, "--turns"),
        pause_s=parse_spread(pause, "--pause"),
        shared_ratio=shared / 100,
        prefix_tokens=prefix_tokens,
        num_prefixes=prefixes,
        rate_per_s=rate,
        text=None if text is None else read_text(text, max_bytes=_MAX_TEXT_BYTES),
        tokenizer=tokenizer,
        seed=seed,
    )
    used = processes or len(os.sched_getaffinity(0))

    def tell(done: int) -> None:
        if sys.stderr.isatty():
            sys.stderr.write(f"\r\x1b[K{done:,} of {num:,} lines")
            sys.stderr.flush()
        elif done == num:
            sys.stderr.write(f"{done:,} lines\n")

    make_file(plan, path, processes=used, tell=tell)
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")
    size_bytes = path.stat().st_size
    if as_json:
        print_json({"path": path, "lines": num, "bytes": size_bytes})
    else:
        from headrace.base.units import format_bytes

        typer.echo(f"written: {path}, {num:,} lines, {format_bytes(size_bytes)}")
