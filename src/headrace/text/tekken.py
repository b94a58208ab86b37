"""Reads ``tekken.json``, the vocabulary of newer Mistral models: byte-level BPE by rank, special tokens in front.

Source of the format: mistral-common. A token's id is its rank plus the number of special tokens; pairs of bytes merge
in the order of the rank of what they make, as tiktoken does it.
"""

from __future__ import annotations

import base64
import binascii
from typing import Final

import msgspec

from headrace.base.errors import ModelFormatError, ModelUnsupportedError
from headrace.text.vocabulary import (
    BYTE_OF_CHAR,
    TokenKind,
    Vocabulary,
    add_recognised,
    build_byte_level,
    merges_by_score,
)

MAX_TOKENS: Final = 2**20
MAX_TOKEN_BYTES: Final = 4096
# Ids of a file that does not list its special tokens (v3 and v7 of 2024): mistral-common's own table.
_OLD_SPECIALS: Final = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]",
    "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
)  # fmt: skip
_ALPHABET: Final = {byte: char for char, byte in BYTE_OF_CHAR.items()}


class _Config(msgspec.Struct, frozen=True):
    pattern: str
    default_vocab_size: int
    default_num_special_tokens: int


class _Token(msgspec.Struct, frozen=True):
    rank: int
    token_bytes: str


class _Special(msgspec.Struct, frozen=True):
    rank: int
    token_str: str


class _File(msgspec.Struct, frozen=True):
    config: _Config
    vocab: list[_Token]
    special_tokens: list[_Special] | None = None


def build_tekken(data: bytes, where: str) -> Vocabulary:
    """Returns the vocabulary of a tekken.json's bytes.

    Raises:
        ModelFormatError: the file is malformed or contradicts itself.
        ModelUnsupportedError: its pattern is none that this build can run.
    """
    try:
        file = msgspec.json.decode(data, type=_File)
    except (msgspec.MsgspecError, RecursionError) as fault:
        raise ModelFormatError(f"{where}: not a tekken vocabulary: {fault}") from fault
    config = file.config
    num_specials, size = config.default_num_special_tokens, config.default_vocab_size
    if not 0 < num_specials < size <= MAX_TOKENS or size - num_specials > len(file.vocab):
        raise ModelFormatError(
            f"{where}: default_vocab_size is {size} with {num_specials} special tokens, and {len(file.vocab)} tokens "
            f"are listed; the limit is {MAX_TOKENS}"
        )
    specials = _specials(file, num_specials, where)
    words = [_word(token, rank, where) for rank, token in enumerate(file.vocab[: size - num_specials])]
    pieces = [*specials, *words]
    if len(set(pieces)) < len(pieces):
        raise ModelFormatError(f"{where}: has a token more than once")
    merges = merges_by_score(words, [-float(rank) for rank in range(len(words))])
    try:
        tokenizer = build_byte_level(pieces, merges, (config.pattern,), is_whole_word_first=True)
    except ModelFormatError:
        raise
    except Exception as fault:  # the library's only error class: the pattern
        raise ModelUnsupportedError(f"{where}: its pattern cannot be run: {str(fault)[:200]}") from fault
    kinds = [TokenKind.CONTROL] * num_specials + [TokenKind.NORMAL] * len(words)
    add_recognised(tokenizer, pieces, kinds)
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    special = {name: token for name, token in names.items() if token in specials}
    return Vocabulary(tokenizer, pieces, special, has_bos="bos_token" in special, has_eos=False)


def _specials(file: _File, count: int, where: str) -> list[str]:
    """Returns the special tokens by id; places that the file leaves open are filled as mistral-common fills them."""
    listed = dict(enumerate(_OLD_SPECIALS))
    if file.special_tokens is not None:
        listed = {token.rank: token.token_str for token in file.special_tokens}
    if any(not 0 <= rank < count or not text for rank, text in listed.items()):
        raise ModelFormatError(f"{where}: a special token is empty or has a rank outside 0 to {count - 1}")
    return [listed.get(index, f"<SPECIAL_{index}>") for index in range(count)]


def _word(token: _Token, rank: int, where: str) -> str:
    """Returns a token in the byte-level alphabet."""
    try:
        raw = base64.b64decode(token.token_bytes, validate=True)
    except (binascii.Error, ValueError) as fault:
        raise ModelFormatError(f"{where}: token {rank} is not base64") from fault
    if token.rank != rank or not 0 < len(raw) <= MAX_TOKEN_BYTES:
        raise ModelFormatError(
            f"{where}: token {rank} has rank {token.rank} and {len(raw)} bytes; wanted are the ranks in order and 1 to "
            f"{MAX_TOKEN_BYTES} bytes"
        )
    return raw.decode("latin-1").translate(_ALPHABET)
