"""Tokens as a tokenizer counts them, beside what the server says.

Counted are the texts themselves. A chat's template adds tokens that only the server knows of, so its prompts count a
few less here than there; what a report shows is the difference.
"""

from __future__ import annotations

from pathlib import Path

from headrace.base.errors import ConfigError, HeadraceError
from headrace.registry.formats.gguf import open_gguf
from headrace.text.tokenizer import Tokenizer


class TokenCounter:
    """Counts with the tokenizer of a model: a folder with its files, or with a GGUF file.

    Raises:
        ConfigError: there is none.
    """

    def __init__(self, folder: Path) -> None:
        try:
            self.tokenizer = _open_tokenizer(folder)
        except OSError as error:
            raise ConfigError(f"--tokenizer {folder} cannot be read: {error.strerror}") from error
        except HeadraceError as error:
            raise ConfigError(f"--tokenizer {folder}: {error.message}") from error

    def count(self, text: str) -> int:
        """Gives the tokens of a text, without special ones."""
        return len(self.tokenizer.encode(text, add_special=False)) if text else 0

    def count_prompt(self, body: dict[str, object]) -> int:
        """Gives the tokens of all texts that a request's body asks about; token ids count as they are."""
        return self._count_value(
            [body.get(name) for name in ("messages", "prompt", "input", "query", "documents") if name in body]
        )

    def _count_value(self, value: object) -> int:
        if isinstance(value, str):
            return self.count(value)
        if isinstance(value, list):
            return sum(self._count_value(item) for item in value)
        if isinstance(value, dict):
            return self._count_value(value.get("content", value.get("text")))
        return 1 if isinstance(value, int) else 0


def _open_tokenizer(folder: Path) -> Tokenizer:
    files = {path.name: path for path in folder.iterdir() if path.is_file()}
    packed = [path for name, path in sorted(files.items()) if name.endswith(".gguf")]
    if packed and not files.keys() & {"tokenizer.json", "tokenizer.model", "tekken.json"}:
        return Tokenizer.from_gguf(open_gguf(packed[0]).metadata)
    return Tokenizer.from_files(files)
