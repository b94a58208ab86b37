"""How both scripts of aider run it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from common import BASE, KEY

FLAGS = (
    "--no-git", "--yes-always", "--no-check-update", "--no-show-model-warnings", "--no-analytics", "--no-gitignore",
    "--no-pretty", "--no-auto-lint", "--map-tokens", "0", "--edit-format", "whole",
)  # fmt: skip


def aider(model: str, folder: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """Runs it in a folder against a model."""
    env = {**os.environ, "OPENAI_API_BASE": BASE, "OPENAI_API_KEY": KEY, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    command = [str(Path(sys.executable).with_name("aider")), "--model", f"openai/{model}", *FLAGS, *flags]
    return subprocess.run(command, cwd=folder, env={**env, "HOME": folder}, capture_output=True, text=True, timeout=600)
