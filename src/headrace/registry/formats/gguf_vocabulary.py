"""Checks the tokenizer that a GGUF file carries, before any native tokenizer sees it.

Vocabulary strings have been used as attacks (a byte token ``<0x-1>`` indexed in front of a heap block). What passes
here is consistent in itself: lengths agree, byte tokens are bytes, merges join tokens that exist, special ids exist.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NoReturn

from headrace.base.errors import ModelFormatError
from headrace.registry.files import shown

MAX_TOKEN_CHARACTERS = 4096
_BYTE_TYPE = 6
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
_PREFIX = "tokenizer.ggml."


def check_vocabulary(metadata: dict[str, Any], path: Path) -> None:
    """Checks ``tokenizer.*``; a file without a vocabulary passes.

    Raises:
        ModelFormatError: the message names the file, the key, the index and what is wrong there.
    """

    def refuse(key: str, why: str) -> NoReturn:
        raise ModelFormatError(f"{path}: {_PREFIX}{key}: {why}")

    def strings(key: str) -> list[str]:
        value = metadata.get(_PREFIX + key, [])
        if not isinstance(value, list) or (value and not isinstance(value[0], str)):
            refuse(key, "should be an array of strings")
        return value

    tokens = strings("tokens")
    if not tokens:
        return
    known = set(tokens)
    if len(known) != len(tokens):
        seen: set[str] = set()
        for index, token in enumerate(tokens):
            if token in seen:
                refuse("tokens", f"{shown(token)} at {index} is there twice")
            seen.add(token)
    if "" in known:
        refuse("tokens", f"the token at {tokens.index('')} is empty")
    longest = max(tokens, key=len)
    if len(longest) > MAX_TOKEN_CHARACTERS:
        refuse("tokens", f"the longest has {len(longest)} characters, the limit is {MAX_TOKEN_CHARACTERS}")
    for key in ("token_type", "scores"):
        values = metadata.get(_PREFIX + key)
        if values is None:
            continue
        if not isinstance(values, list) or len(values) != len(tokens) or isinstance(values[0], str):
            refuse(key, f"should be an array of {len(tokens)} numbers, one per token")
    types = metadata.get(_PREFIX + "token_type", [])
    if _BYTE_TYPE in types:
        for token, kind in zip(tokens, types, strict=True):
            if kind == _BYTE_TYPE and not _BYTE_TOKEN.fullmatch(token):
                refuse("tokens", f"the byte token {shown(token)} should look like <0x0A>")
    for index, merge in enumerate(strings("merges")):
        # A token may begin with a space, so the separator is the first one after it (as llama.cpp reads it).
        cut = merge.find(" ", 1)
        left, right = merge[:cut], merge[cut + 1 :]
        if left in known and right in known and left + right in known and cut > 0:
            continue
        refuse("merges", f"{shown(merge)} at {index} does not join two tokens of the vocabulary to a third")
    for full_key, value in metadata.items():
        if full_key.startswith(_PREFIX) and full_key.endswith("_token_id"):
            if type(value) is not int:
                refuse(full_key.removeprefix(_PREFIX), f"should be a token id, found {shown(str(value))}")
            # 2^32 − 1 is how some converters write "none".
            if not 0 <= value < len(tokens) and value != 2**32 - 1:
                refuse(full_key.removeprefix(_PREFIX), f"is {value}, the vocabulary has {len(tokens)} tokens")
