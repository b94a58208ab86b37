"""``headrace mock``: a stand-in server whose every delay is known."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.output import JsonOption, print_json

if TYPE_CHECKING:
    from headrace.bench.mock.script import Script

_NUMBER = "NUMBER"


def mock(
    *,
    script: Annotated[
        Path | None, typer.Option(help="A script in YAML or JSON; flags win over it.", metavar="FILE")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 picks a free one.", min=0, max=65535)] = 8009,
    ttft_ms: Annotated[str | None, typer.Option(help="Time to the first token; 20 without.", metavar=_NUMBER)] = None,
    itl_ms: Annotated[str | None, typer.Option(help="Time between tokens; 5 without.", metavar=_NUMBER)] = None,
    tokens: Annotated[
        str | None, typer.Option(help="Tokens of an answer; without it, the request's max_tokens.", metavar=_NUMBER)
    ] = None,
    text: Annotated[str | None, typer.Option(help="What it says: its words, over and over.")] = None,
    tokens_per_chunk: Annotated[int | None, typer.Option(help="Tokens in one event.", min=1)] = None,
    chunks_per_write: Annotated[int | None, typer.Option(help="Events that go out together.", min=1)] = None,
    slots: Annotated[int | None, typer.Option(help="Requests worked on at once; others wait.", min=1)] = None,
    error: Annotated[
        list[str] | None,
        typer.Option(help="Answer a share with an error; repeatable.", metavar="STATUS:RATIO"),
    ] = None,
    fault: Annotated[
        list[str] | None,
        typer.Option(
            help="Fail at a token: crash, hang, reset, close, malformed, no_done, stream_error; repeatable.",
            metavar="KIND:TOKEN:RATIO",
        ),
    ] = None,
    stall: Annotated[
        str | None, typer.Option(help="Stand still: 5:500 is for 500 ms every 5 s.", metavar="EVERY_S:FOR_MS")
    ] = None,
    leak_kib: Annotated[float | None, typer.Option(help="Memory that each request leaves behind.", min=0)] = None,
    seed: Annotated[int | None, typer.Option(help="Of all draws.", min=0)] = None,
    truth: Annotated[
        Path | None, typer.Option(help="Write when each byte really went out, a JSON line per request.", metavar="FILE")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Stand in for a model server: chat, completions, embeddings, rerank, models and health, with known delays.

    For checking load generators, gateways and clients: no model, no waiting, and every fault on demand. A NUMBER is 50,
    uniform:LOW:HIGH, exponential:MEAN or lognormal:MEDIAN:SIGMA; the same seed draws the same.

    Ends with Ctrl-C.

    Examples: [bold]headrace mock --ttft-ms lognormal:80:0.3 --itl-ms 10[/], [bold]headrace mock --error 429:0.05
    --fault reset:8:0.01[/]
    """
    from headrace.bench.mock.script import read_script

    flags: dict[str, object] = {
        "ttft_ms": ttft_ms,
        "itl_ms": itl_ms,
        "tokens": tokens,
        "text": text,
        "tokens_per_chunk": tokens_per_chunk,
        "chunks_per_write": chunks_per_write,
        "slots": slots,
        "errors": [_error(value) for value in error] if error else None,
        "faults": [_fault(value) for value in fault] if fault else None,
        "stall": _stall(stall) if stall else None,
        "leak_kib": leak_kib,
        "seed": seed,
    }
    checked = read_script(script, flags)
    import asyncio

    # Not on uvloop: it keeps writes back until all callbacks of a turn have run, and the truth is when they go out.
    asyncio.run(_serve(checked, host, port, truth, as_json))


async def _serve(script: Script, host: str, port: int, truth: Path | None, as_json: bool) -> None:
    import asyncio
    import gc

    from headrace.bench.mock.server import MockServer
    from headrace.bench.mock.truth import TruthLog

    server = MockServer(script, truth=TruthLog(truth) if truth is not None else None)
    bound = await server.start(host, port)
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    url = f"http://{f'[{host}]' if ':' in host else host}:{bound}"
    if as_json:
        print_json({"url": url, "models": script.models})
    else:
        typer.echo(f"mock server at {url} (model {script.models[0]}); Ctrl-C ends it")
    sys.stdout.flush()
    gc.freeze()  # what has been imported never needs to be looked at again
    await ended.wait()
    await server.stop()


def _error(text: str) -> dict[str, object]:
    status, ratio = _numbers("--error", text, "STATUS:RATIO, for example 429:0.01", 2, [None, 1.0])
    return {"status": int(status), "ratio": ratio}


def _fault(text: str) -> dict[str, object]:
    kind, _, rest = text.partition(":")
    form = "KIND:TOKEN:RATIO, for example reset:8:0.01"
    at_token, ratio = _numbers("--fault", rest, form, 2, [0.0, 1.0])
    return {"kind": kind, "at_token": int(at_token), "ratio": ratio}


def _stall(text: str) -> dict[str, object]:
    every_s, for_ms = _numbers("--stall", text, "EVERY_S:FOR_MS, for example 5:500", 2, [None, None])
    return {"every_s": every_s, "for_ms": for_ms}


def _numbers(option: str, text: str, form: str, count: int, defaults: list[float | None]) -> list[float]:
    from headrace.base.errors import ConfigError

    parts = text.split(":") if text else []
    values: list[float] = []
    for index in range(count):
        default = defaults[index]
        try:
            values.append(float(parts[index]) if index < len(parts) else float(default if default is not None else ""))
        except ValueError as error:
            raise ConfigError(f"{option} is {text!r}; write {form}") from error
    if len(parts) > count:
        raise ConfigError(f"{option} is {text!r}; write {form}")
    return values
