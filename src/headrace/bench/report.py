"""Writes a run's report: JSON for programs, Markdown for merge requests, one HTML page for people."""

from __future__ import annotations

from pathlib import Path

import msgspec

from headrace.base.errors import MachineError
from headrace.bench.markdown import render
from headrace.bench.run_page import run_page
from headrace.bench.summary import Summary


def write_reports(summary: Summary, folder: Path) -> list[Path]:
    """Writes ``report.json``, ``report.md`` and ``report.html`` into ``folder``, which is made where needed.

    Raises:
        MachineError: the folder cannot be written.
    """
    contents = {
        "report.json": msgspec.json.format(msgspec.json.encode(summary), indent=1) + b"\n",
        "report.md": render(summary).encode(),
        "report.html": run_page(summary).encode(),
    }
    return write_files(folder, contents)


def write_files(folder: Path, contents: dict[str, bytes]) -> list[Path]:
    """Writes files into a folder, which is made where needed, and gives their paths.

    Raises:
        MachineError: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            (folder / name).write_bytes(content)
    except OSError as error:
        raise MachineError(f"{folder}: the report cannot be written: {error.strerror}") from error
    return [folder / name for name in contents]
