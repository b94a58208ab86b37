"""How a token is written in log-probability answers: its text, and its exact bytes beside it."""

from __future__ import annotations

from typing import NamedTuple

from headrace.text.tokenizer import Tokenizer


class TokenText(NamedTuple):
    """One token as OpenAI's ``token`` and ``bytes`` fields show it."""

    text: str
    bytes: list[int]


def token_text(tokenizer: Tokenizer, index: int) -> TokenText:
    r"""Gives a token's own text and bytes; special tokens are written out.

    A token that holds only a part of a character has no text: it is written as ``bytes:\xf0\x9f``, as OpenAI does, so
    that two such tokens stay different keys in a map of top log-probabilities.
    """
    data = tokenizer.token_bytes(index)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
    return TokenText(text, list(data))
