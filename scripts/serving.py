"""A server for a script, in a process of its own while a block runs: `headrace serve`, or `headrace mock`."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

END_S = 60


@dataclass(frozen=True)
class Served:
    """A server that says it is there; ``process`` tells its exit code once the block is left."""

    url: str
    admin_url: str
    process: subprocess.Popen[bytes]


@contextmanager
def served(
    *arguments: str, env: Mapping[str, str] | None = None, folder: Path | None = None, log: Path | None = None
) -> Iterator[Served]:
    """Starts a server on free ports of loopback; SIGTERM ends it.

    Args:
        arguments: of ``headrace serve``.
        folder: where it runs.
        log: gets its log, which is else dropped.

    Raises:
        SystemExit: it ended before it said where it is.
    """
    command = ["serve", *arguments, "--port", "0", "--admin-port", "0", "--json"]
    with _running(command, env=env, folder=folder, log=log) as (found, process):
        yield Served(found["url"], found["admin_url"], process)


@contextmanager
def mocked(*arguments: str) -> Iterator[str]:
    """Starts a mock server on a free port of loopback and gives its URL; SIGTERM ends it.

    Args:
        arguments: of ``headrace mock``.

    Raises:
        SystemExit: it ended before it said where it is.
    """
    with _running(["mock", *arguments, "--port", "0", "--json"]) as (found, _):
        yield found["url"]


@contextmanager
def _running(
    arguments: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    folder: Path | None = None,
    log: Path | None = None,
) -> Iterator[tuple[dict[str, str], subprocess.Popen[bytes]]]:
    # A script that is told to end leaves its blocks, and with them its server.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with (log or Path("/dev/null")).open("ab") as errors:
        command = [sys.executable, "-m", "headrace", *arguments]
        process = subprocess.Popen(command, env=env, cwd=folder, stdout=subprocess.PIPE, stderr=errors)
    assert process.stdout is not None
    try:
        said = b""
        while not said.rstrip().endswith(b"}"):
            line = process.stdout.readline()
            if not line:
                words = log.read_text(errors="replace")[-2000:] if log else ""
                raise SystemExit(f"headrace {' '.join(arguments)} did not start\n{words}".rstrip())
            said += line
        yield json.loads(said), process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(END_S)
