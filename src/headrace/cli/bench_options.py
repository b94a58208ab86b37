"""Options that commands share which put load on a server, and how what they say is read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.bench_workload import OperationName

TestFileOption = Annotated[
    Path | None, typer.Option(help="Requests to send; without it they are made up.", metavar="FILE")
]
OperationOption = Annotated[OperationName, typer.Option(help="What made-up requests ask for.")]
PromptTokensOption = Annotated[
    str, typer.Option(help="Of made-up prompts: 512, uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA.", metavar="NUMBER")
]
OutputTokensOption = Annotated[str, typer.Option(help="Asked for by made-up requests.", metavar="NUMBER")]
IgnoreEosOption = Annotated[
    bool, typer.Option("--ignore-eos", help="Have made-up requests answered at full length (our server, vLLM).")
]
TokenizerOption = Annotated[
    Path | None,
    typer.Option(help="Model folder to count tokens with, of prompts and beside the server's.", metavar="FOLDER"),
]
BodyOption = Annotated[
    list[str] | None,
    typer.Option(help="A field for every request: temperature=0; repeatable.", metavar="NAME=JSON"),
]
HeaderOption = Annotated[
    list[str] | None, typer.Option(help="A header for every request; repeatable.", metavar="NAME: VALUE")
]
KeyEnvOption = Annotated[
    str, typer.Option(help="Environment variable that holds the key, if it is set.", metavar="NAME")
]
SeedOption = Annotated[int, typer.Option(help="Of made-up prompts and arrivals.", min=0)]


def read_headers(texts: list[str], key_env: str) -> dict[str, str]:
    """Gives the headers that the command line and the environment ask for; a key there is sent as bearer token.

    Raises:
        ConfigError: a text is no header.
    """
    from headrace.base.errors import ConfigError

    headers: dict[str, str] = {}
    if key := os.environ.get(key_env):
        headers["authorization"] = f"Bearer {key}"
    for text in texts:
        name, colon, value = text.partition(":")
        if not colon or not name.strip():
            raise ConfigError(f"--header is {text!r}; write NAME: VALUE")
        headers[name.strip().lower()] = value.strip()
    return headers


def read_fields(texts: list[str]) -> dict[str, object]:
    """Gives body fields from NAME=JSON; a value that is no JSON is text.

    Raises:
        ConfigError: a text has no name.
    """
    import msgspec

    from headrace.base.errors import ConfigError

    fields: dict[str, object] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise ConfigError(f"--body is {text!r}; write NAME=JSON, for example temperature=0")
        try:
            fields[name.strip()] = msgspec.json.decode(value)
        except msgspec.MsgspecError:
            fields[name.strip()] = value
    return fields
