"""Options that commands share which put load on a server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

TestFileOption = Annotated[
    Path | None, typer.Option(help="Requests to send; without it they are made up.", metavar="FILE")
]
PromptTokensOption = Annotated[
    str, typer.Option(help="Of made-up prompts: 512, uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA.", metavar="NUMBER")
]
OutputTokensOption = Annotated[str, typer.Option(help="Asked for by made-up requests.", metavar="NUMBER")]
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
