"""A small soak of an encoder: mixed calls, wrong ones among them, a batch of 10,000 texts (scripts/encoder-soak)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "encoder-soak"
pytestmark = pytest.mark.timeout(180)


def test_mixed_calls_and_a_batch_of_10000_texts_leave_memory_and_processes_as_they_were() -> None:
    command = [sys.executable, str(SCRIPT), "--tiny", "--calls", "300", "--batches", "1"]

    done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("300 calls in ")
    assert "same processes: True" in done.stdout
