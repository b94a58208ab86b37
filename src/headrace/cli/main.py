"""The ``headrace`` command: its tree, and the edge where faults become one line and an exit code.

The composition root: the only place where sibling packages meet. A command's module is imported when the command is
called, and imports what it needs inside, so that ``--help`` and quick commands stay quick and a server starts soon.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Annotated, Final

import typer

from headrace.base.errors import HeadraceError
from headrace.base.exits import exit_code_of

COMMANDS: Final = {
    "serve": "headrace.cli.serve:serve",
    "pull": "headrace.cli.models:pull",
    "models": "headrace.cli.models:app",
    "status": "headrace.cli.status:status",
    "bench": "headrace.cli.bench:app",
    "mock": "headrace.cli.mock:mock",
    "config": "headrace.cli.config:app",
    "doctor": "headrace.cli.doctor:doctor",
}
"""Where each command is, in the order of ``--help``: a function, or a group of commands."""
EPILOG = "Exit codes: 0 good, 1 not, 2 usage or setting wrong, 3 undecided; more in docs/reference/exit-codes.md."


def make_app(only: str | None = None) -> typer.Typer:
    """Gives the command line.

    Args:
        only: the one command that will be called; the others are then left out, and their modules unread.
    """
    app = typer.Typer(
        name="headrace",
        help="Serve language models in production, from one CPU box to a fleet of GPU nodes.",
        epilog=EPILOG,
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
    )
    app.callback()(root)
    for name in COMMANDS if only is None else (only,):
        module, _, attribute = COMMANDS[name].partition(":")
        command = getattr(import_module(module), attribute)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name, epilog=EPILOG)(command)
    return app


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        import headrace

        typer.echo(headrace.__version__)
        raise typer.Exit


def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Serve language models in production, from one CPU box to a fleet of GPU nodes."""


def run() -> None:
    """Runs the command line; a fault of the outside world becomes one line on stderr and an exit code."""
    try:
        named = sys.argv[1] if len(sys.argv) > 1 else ""
        make_app(named if named in COMMANDS else None)()
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
