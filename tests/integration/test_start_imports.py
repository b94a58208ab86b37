"""What the processes of a server do without while they start: each module costs its time before the first token.

A library that is listed here may be needed later, by a request of some kind; then it is imported at that place.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from headrace.testing.tiny import write_tiny_gguf

SUPERVISOR = """
import asyncio
from headrace.cli.main import make_app
make_app("serve")
from headrace.cli.settings import load_settings
from headrace.cli.deployment import resolve_models
from headrace.cli.history import RunRecord
from headrace.fleet.server import run_server
resolve_models(load_settings(None, {"inference_engine.model_path": MODEL}))
"""
FRONT = """
from pathlib import Path
from headrace.gateway.kit import load_kit
import headrace.server.front
kit = load_kit(Path(MODEL))
kit.tokenizer.encode("a word", add_special=True)
kit.close()
"""
WORKER = """
import headrace.engine.worker
from headrace.engine.loader import inspect
from headrace.protocol.launch import WorkerLaunch
inspect(WorkerLaunch(model_path=MODEL, served_name="m", socket_fd=-1))
"""
LARGE = {"alembic", "llguidance", "psutil", "pydantic", "rich", "sqlalchemy", "yaml"}
# numpy takes 0.1 s of CPU and 10 MiB, HTTP clients with TLS 20 ms, the other processes' own modules as much again.
CASES = {
    "supervisor": (SUPERVISOR, LARGE | {"numpy", "http.client", "tokenizers", "headrace.engine", "headrace.server"}),
    "front": (FRONT, LARGE | {"numpy", "headrace.engine", "headrace.fleet", "headrace.kernels"}),
    "worker": (WORKER, LARGE | {"asyncio", "tokenizers", "http.client", "headrace.gateway", "headrace.fleet"}),
}


@pytest.mark.parametrize(("program", "unwanted"), CASES.values(), ids=CASES)
def test_a_process_starts_without_what_it_need_not_have(program: str, unwanted: set[str], tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf")
    code = program.replace("MODEL", repr(str(path))) + "import sys; print(*sys.modules)"

    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)

    assert set(said.stdout.split()) & unwanted == set()
