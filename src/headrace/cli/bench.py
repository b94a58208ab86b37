"""``headrace bench``: measurements. The engine's own stands in ``engine.bench``."""

from __future__ import annotations

import typer

app = typer.Typer(help="Measure speed.", no_args_is_help=True)
