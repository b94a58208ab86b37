"""What a front and a worker that see no grammar never load."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["headrace.server.front", "headrace.engine.worker"])
def test_a_process_starts_without_the_grammar_compiler(module: str) -> None:
    program = f"import sys, {module}; print('llguidance' in sys.modules)"

    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert said.stdout == "False\n"
