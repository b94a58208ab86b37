"""The text that ships with Headrace: what measurements read and sample requests are made of.

It is chapters I to III of *Alice's Adventures in Wonderland* by Lewis Carroll (1865), in the public domain; the source
is the Millennium Fulcrum edition 2.9, its lines joined to paragraphs.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from headrace.base.errors import ConfigError

MAX_TEXT_BYTES = 2**20
SHIPPED_NAME = "wonderland (chapters I to III)"


def shipped_text() -> str:
    """Returns the text that ships with Headrace, 31 kB of English prose."""
    return (resources.files("headrace.text") / "data" / "wonderland.txt").read_text("utf-8")


def read_text(path: Path, *, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """Returns a text of one's own.

    Raises:
        ConfigError: the file is missing, larger than ``max_bytes``, or not UTF-8.
    """
    try:
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    if len(content) > max_bytes:
        raise ConfigError(f"{path}: the text has more than {max_bytes} bytes, the limit: give a part of it")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text ({error.reason} at byte {error.start})") from error
