"""A server of recorded outputs for the client scripts: what it plays, and where a script finds what it must read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from judging.environment import FOLDER, ROOT, source_of
from judging.servers import Server

_TEMPLATES = ("llama-cpp-python", "0.3.36", "vendor/llama.cpp/models/templates")
_END_S = 60


@contextmanager
def recorded() -> Iterator[Server]:
    """Serves the recordings while the block runs; ``recordings_file`` is where a script reads them.

    Raises:
        RuntimeError: the server did not start.
    """
    templates = source_of(*_TEMPLATES)
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("recorded_server.py")), folder, str(templates)],
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            if not line:
                raise RuntimeError("the server of recorded outputs did not start")
            said = json.loads(line)
            recordings_file().write_text(json.dumps(said["recordings"]))
            yield Server(said["url"], said["recordings"][0]["model"], Path(folder))
        finally:
            process.stdin.close()
            process.wait(_END_S)


def recordings_file() -> Path:
    """Gives the file in which scripts find the recordings that the server plays."""
    return FOLDER / "recordings.json"
