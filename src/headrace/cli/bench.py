"""``headrace bench``: measurements. The engine's own stands in ``engine.bench``."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from headrace.cli.output import JsonOption, print_json, print_table
from headrace.cli.serve import Quantization
from headrace.cli.settings import ConfigOption, load_settings

app = typer.Typer(help="Measure speed.", no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Measure speed."""


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
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure the engine alone, without HTTP: decode at several batch sizes, prefill at several lengths.

    Memory bandwidth is probed before and after, because a speed means little without it. Run it on a quiet machine.
    With --decode or --prefill only what they name is measured.

    Examples: [bold]headrace bench engine demo[/], [bold]headrace bench engine demo --decode 1 --prefill 512[/]
    """
    import msgspec

    from headrace.base.clock import SystemClock
    from headrace.cli.serve import require_native_library, resolve_model
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
    require_native_library()
    found = resolve_model(settings)
    launch = worker_launch(settings, found.resolved, model_path=found.path, name=found.names[0], socket_fd=-1)
    launch = msgspec.structs.replace(launch, packed_cache_path=None)  # saving would disturb the measurement
    batches, lengths = (decode or [], prefill or []) if decode or prefill else (DECODE_BATCHES, PREFILL_LENGTHS)
    report = run_bench(launch, SystemClock(), decode_batches=batches, prefill_lengths=lengths, progress=_say)
    if as_json:
        print_json(report)
        return
    typer.echo(report_head(report))
    columns, rows = report_table(report)
    print_table(columns, rows)


def _say(what: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{what}\r")
        sys.stderr.flush()
