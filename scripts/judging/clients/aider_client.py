from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from common import BASE, KEY, MODEL, check

FLAGS = (
    "--no-git", "--yes-always", "--no-check-update", "--no-show-model-warnings", "--no-analytics", "--no-gitignore",
    "--no-pretty", "--no-auto-lint", "--map-tokens", "0", "--edit-format", "whole",
)  # fmt: skip


def aider(folder: str, *flags: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OPENAI_API_BASE": BASE, "OPENAI_API_KEY": KEY, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    command = [str(Path(sys.executable).with_name("aider")), "--model", f"openai/{MODEL}", *FLAGS, *flags]
    return subprocess.run(command, cwd=folder, env={**env, "HOME": folder}, capture_output=True, text=True, timeout=600)


def said(*flags: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "hello.py").write_text("print('hello')\n")
        done = aider(folder, *flags, "--message", "/ask What does hello.py print?", "hello.py")
        assert done.returncode == 0, done.stderr[-300:]
        assert "Tokens:" in done.stdout, done.stdout[-300:]
        assert "litellm." not in done.stdout, done.stdout[-300:]  # how it tells what the server refused


@check
def asks_streamed() -> None:
    said("--stream")


@check
def asks_whole() -> None:
    said("--no-stream")
