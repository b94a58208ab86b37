"""``headrace bench``: measurements. The engine's own stands in ``engine.bench``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.bench_compare import compare
from headrace.cli.bench_data import data
from headrace.cli.bench_history import app as history
from headrace.cli.bench_report import report
from headrace.cli.bench_serve import serve
from headrace.cli.bench_sweep import sweep
from headrace.cli.output import JsonOption, print_json, print_table
from headrace.cli.serve import Quantization
from headrace.cli.settings import ConfigOption, load_settings

if TYPE_CHECKING:
    from headrace.protocol.launch import WorkerLaunch

app = typer.Typer(help="Measure speed and quality.", no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Measure speed and quality."""


app.command()(serve)


@app.command()
def engine(
    model: Annotated[
        str | None, typer.Argument(help="Folder, file or source; default: the model of the settings.")
    ] = None,
    *,
    quantization: Annotated[Quantization | None, typer.Option(help="Quantise the weights when loading.")] = None,
    threads: Annotated[int | None, typer.Option(help="Native threads; default: all cores.", metavar="N")] = None,
    isa: Annotated[str | None, typer.Option(help="Instruction set of the kernels.", metavar="ISA")] = None,
    decode: Annotated[
        list[int] | None, typer.Option(help="Sequences that decode together; repeatable; default: 1, 8, 32.", min=1)
    ] = None,
    prefill: Annotated[
        list[int] | None, typer.Option(help="Tokens of a prompt; repeatable; default: 512, 2048.", min=1)
    ] = None,
    ablate: Annotated[
        bool, typer.Option("--ablate", help="Measure what each fusion of the program brings; default: 1, 8; 512.")
    ] = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure the engine alone, without HTTP: decode at several batch sizes, prefill at several lengths.

    Memory bandwidth is probed before and after, because a speed means little without it. Run it on a quiet machine.
    With --decode or --prefill only what they name is measured. A model that makes vectors is measured with 1 and 32
    texts of 32 and 256 tokens.

    With --ablate the model runs op by op, one barrier per operation, then with one fusion more at a time up to the
    program that serves, interleaved: what each fusion gains, at equal kernels, weights and tokens.

    Examples: [bold]headrace bench engine demo[/], [bold]headrace bench engine demo --decode 1 --prefill 512[/],
    [bold]headrace bench engine demo --ablate[/]
    """
    import msgspec

    from headrace.base.clock import SystemClock
    from headrace.cli.deployment import resolve_model
    from headrace.cli.serve import require_native_library
    from headrace.engine.bench import DECODE_BATCHES, PREFILL_LENGTHS, report_head, report_table, run_bench
    from headrace.fleet.launch import worker_launch

    settings = load_settings(
        config,
        {
            "inference_engine.model_path": model,
            "inference_engine.quantization": quantization and quantization.value,
            "inference_engine.threads": threads,
            "inference_engine.isa": isa,
        },
    )
    require_native_library(settings.inference_engine.isa)
    found = resolve_model(settings)
    launch = worker_launch(settings, found.resolved, model_path=found.path, name=found.names[0], socket_fd=-1)
    launch = msgspec.structs.replace(launch, packed_cache_path=None)  # saving would disturb the measurement
    if ablate:
        _ablate(launch, decode, prefill, as_json)
        return
    batches, lengths = (decode or [], prefill or []) if decode or prefill else (DECODE_BATCHES, PREFILL_LENGTHS)
    report = run_bench(launch, SystemClock(), decode_batches=batches, prefill_lengths=lengths, progress=_say)
    if as_json:
        print_json(report)
        return
    typer.echo(report_head(report))
    columns, rows = report_table(report)
    print_table(columns, rows)


def _ablate(launch: WorkerLaunch, decode: list[int] | None, prefill: list[int] | None, as_json: bool) -> None:
    from headrace.base.clock import SystemClock
    from headrace.engine.ablate import (
        ABLATE_BATCHES,
        ABLATE_PREFILLS,
        ablation_head,
        ablation_table,
        run_ablation,
    )

    batches, lengths = (decode or [], prefill or []) if decode or prefill else (ABLATE_BATCHES, ABLATE_PREFILLS)
    report = run_ablation(launch, SystemClock(), decode_batches=batches, prefill_lengths=lengths, progress=_say)
    if as_json:
        print_json(report)
        return
    typer.echo(ablation_head(report))
    print_table(*ablation_table(report))


@app.command()
def quality(
    model: Annotated[
        str | None, typer.Argument(help="Folder, file or source; default: the model of the settings.")
    ] = None,
    *,
    quantization: Annotated[
        str, typer.Option(help="Which to measure: none, int8, int4, joined by commas.", metavar="LIST")
    ] = "none,int8,int4",
    text: Annotated[
        Path | None, typer.Option(help="A UTF-8 text of your own; default: 31 kB of English prose.", metavar="FILE")
    ] = None,
    positions: Annotated[int, typer.Option(help="Next tokens to predict, at most.", min=16, max=1_000_000)] = 2048,
    max_kl: Annotated[float, typer.Option(help="Limit of the mean KL in nats; above it, exit code 1.", min=0)] = 0.02,
    threads: Annotated[int | None, typer.Option(help="Native threads; default: all cores.", metavar="N")] = None,
    isa: Annotated[str | None, typer.Option(help="Instruction set of the kernels.", metavar="ISA")] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure what quantising a model costs: perplexity, KL divergence and top-1 against its exact path.

    The model reads a text and predicts every next token, once on the exact path (fp32) and once per quantisation.
    Perplexity is of the text itself; lower is better, and it should hardly rise. Mean KL is how far the predictions
    moved, in nats: 0.001 is hardly measurable in answers, 0.02 is what int4 keeps on the demo model, 0.1 is felt. Top-1
    is how often the most likely token stayed the same, which is what greedy answers follow.

    A file that is quantised already is compared with its own dequantised weights, so its loss against the model it was
    made of is not in the figures. The exact path takes four bytes of memory per weight.

    Examples: [bold]headrace bench quality demo[/], [bold]headrace bench quality ./model --quantization int4 --text
    my-domain.txt[/]
    """
    from headrace.base.errors import ConfigError
    from headrace.cli.deployment import resolve_model
    from headrace.cli.serve import require_native_library
    from headrace.engine.quality_bench import quality_table, run_quality
    from headrace.fleet.launch import worker_launch
    from headrace.text.prose import SHIPPED_NAME, read_text, shipped_text

    names = [name.strip() for name in quantization.split(",") if name.strip()]
    unknown = [name for name in names if name not in set(Quantization)]
    if unknown or not names:
        known = ", ".join(Quantization)
        raise ConfigError(f"--quantization is {quantization!r}; give {known}, or several of them joined by commas")
    content = shipped_text() if text is None else read_text(text)
    settings = load_settings(
        config,
        {
            "inference_engine.model_path": model,
            "inference_engine.threads": threads,
            "inference_engine.isa": isa,
        },
    )
    require_native_library(settings.inference_engine.isa)
    found = resolve_model(settings)
    launch = worker_launch(settings, found.resolved, model_path=found.path, name=found.names[0], socket_fd=-1)
    lines = _Lines()
    report = run_quality(
        found.path,
        content,
        text_name=SHIPPED_NAME if text is None else text.name,
        quantizations=names,
        positions=positions,
        max_kl=max_kl,
        threads=launch.threads,
        isa=launch.isa,
        progress=lines,
    )
    lines.end()
    if as_json:
        print_json(report)
    else:
        typer.echo(f"{found.names[0]} on {report.text}, {report.positions} positions, {report.isa}")
        print_table(*quality_table(report))
    raise typer.Exit(0 if report.is_within else 1)


class _Lines:
    """Progress on stderr: one line that is rewritten on a terminal, else one line per thing that starts."""

    def __init__(self) -> None:
        self._what = ""

    def __call__(self, what: str, done: int, total: int) -> None:
        if sys.stderr.isatty():
            _say(f"{what}: {done} of {total} positions" if done else f"{what}: loading")
        elif what != self._what:
            self._what = what
            sys.stderr.write(f"measuring {what}: {total} positions\n")

    def end(self) -> None:
        """Clears the line."""
        _say("")


def _say(what: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{what}\r")
        sys.stderr.flush()


app.command("data")(data)
app.command("report")(report)
app.command("compare")(compare)
app.command("sweep")(sweep)
app.add_typer(history, name="history")
