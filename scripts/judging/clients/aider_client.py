from __future__ import annotations

import tempfile
from pathlib import Path

from aider_command import aider
from common import MODEL, check


def said(*flags: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "hello.py").write_text("print('hello')\n")
        done = aider(MODEL, folder, *flags, "--message", "/ask What does hello.py print?", "hello.py")
        assert done.returncode == 0, done.stderr[-300:]
        assert "Tokens:" in done.stdout, done.stdout[-300:]
        assert "litellm." not in done.stdout, done.stdout[-300:]  # how it tells what the server refused


@check
def asks_streamed() -> None:
    said("--stream")


@check
def asks_whole() -> None:
    said("--no-stream")
