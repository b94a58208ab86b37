"""How commands print: tables for people, JSON for programs, a progress bar where somebody watches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import PurePath
from typing import Annotated

import typer

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Progress = Callable[[str, int, int | None], None]


def print_json(value: object) -> None:
    """Prints one JSON document to stdout."""
    import msgspec

    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value, enc_hook=_plain), indent=2).decode() + "\n")


def _plain(value: object) -> str:
    if isinstance(value, PurePath):
        return str(value)
    raise NotImplementedError(type(value))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints rows under columns to stdout, as wide as they are."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console = Console()
    # Where nobody watches, lines are never cut at a width that a terminal would have.
    Console(width=None if console.is_terminal else 240).print(table)


@contextmanager
def show_progress() -> Iterator[Progress]:
    """Gives a function ``(what, done, total)`` in bytes that draws a bar on a terminal, or a line now and then."""
    if not sys.stderr.isatty():
        yield _LineProgress()
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Bars(*columns, console=Console(stderr=True)) as bars:
        tasks: dict[str, TaskID] = {}

        def update(what: str, done: int, total: int | None) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield update


class _LineProgress:
    """Progress for logs: a line per tenth of each item."""

    def __init__(self) -> None:
        self._tenths: dict[str, int] = {}

    def __call__(self, what: str, done: int, total: int | None) -> None:
        from headrace.base.units import format_bytes

        tenth = 10 * done // total if total else 0
        if self._tenths.get(what) != tenth:
            self._tenths[what] = tenth
            size = f" of {format_bytes(total)}" if total else ""
            sys.stderr.write(f"{what}: {format_bytes(done)}{size}\n")
