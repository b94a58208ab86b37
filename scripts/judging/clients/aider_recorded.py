"""aider with a model that writes a whole file: the file is changed."""

from __future__ import annotations

import tempfile
from pathlib import Path

from aider_command import aider
from common import check


def edited(*flags: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "hello.py"
        file.write_text("print('hello')\n")
        done = aider("generic-aider", folder, *flags, "--message", "Say goodbye", "hello.py")
        assert done.returncode == 0, done.stderr[-300:]
        assert file.read_text() == "print('goodbye')\n", done.stdout[-300:]


@check
def edits_streamed() -> None:
    edited("--stream")


@check
def edits_whole() -> None:
    edited("--no-stream")
