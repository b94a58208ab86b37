"""The ``headrace`` command: its tree, and the edge where faults become one line and an exit code.

The composition root: the only place where sibling packages meet. Commands import what they need inside, so that
``--help`` and quick commands stay quick.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from headrace.base.errors import HeadraceError
from headrace.base.exits import exit_code_of
from headrace.cli.bench import app as bench
from headrace.cli.config import app as config
from headrace.cli.doctor import doctor
from headrace.cli.mock import mock
from headrace.cli.models import app as models
from headrace.cli.models import pull
from headrace.cli.serve import serve
from headrace.cli.status import status

EPILOG = "Exit codes: 0 good, 1 not, 2 usage or setting wrong, 3 undecided; more in docs/reference/exit-codes.md."

app = typer.Typer(
    name="headrace",
    help="Serve language models in production, from one CPU box to a fleet of GPU nodes.",
    epilog=EPILOG,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
app.command("serve", epilog=EPILOG)(serve)
app.command("pull", epilog=EPILOG)(pull)
app.add_typer(models, name="models")
app.command("status", epilog=EPILOG)(status)
app.add_typer(bench, name="bench")
app.command("mock", epilog=EPILOG)(mock)
app.add_typer(config, name="config")
app.command("doctor", epilog=EPILOG)(doctor)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        import headrace

        typer.echo(headrace.__version__)
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Serve language models in production, from one CPU box to a fleet of GPU nodes."""


def run() -> None:
    """Runs the command line; a fault of the outside world becomes one line on stderr and an exit code."""
    try:
        app()
    except HeadraceError as error:
        sys.stderr.write(f"headrace: {error.message}\n")
        if error.hint:
            sys.stderr.write(f"  hint: {error.hint}\n")
        sys.exit(exit_code_of(error))
    except KeyboardInterrupt:
        sys.exit(130)  # 128 + SIGINT, as shells say it
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has gone; there is nobody to tell
        sys.exit(0)
