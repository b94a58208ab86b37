"""Builds `tokenizers` tokenizers from plain lists of tokens: the shapes of vocabulary that model files hold.

Byte-level BPE with merges or with ranks, SentencePiece's BPE (scores, or merges) and Unigram, and WordPiece. What lives
here knows no file format; who calls has checked the lists. Building is a good part of a start, so what runs once for
every character of every token is plain loops over local names.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.pre_tokenizers import PreTokenizer
from tokenizers.processors import BertProcessing

from headrace.base.errors import ModelFormatError

SPACE_MARK: Final = "\u2581"  # ▁, how SentencePiece writes a space
# Every split of every piece is looked up once where merges follow from scores: bounds that at a few seconds.
MAX_SPLIT_CHARS: Final = 2**24
_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenKind(IntEnum):
    """What a token is: `tokenizer.ggml.token_type` of GGUF, which has it from SentencePiece."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A built tokenizer and what its file says beside it.

    Args:
        tokenizer: special tokens are recognised in text.
        pieces: token id to its written form.
        special_tokens: ``bos_token``, ``eos_token``, ``unk_token``, ``pad_token`` … to their text.
        has_bos, has_eos: whether ``add_special`` puts them around a text.
    """

    tokenizer: Tokenizer
    pieces: list[str]
    special_tokens: dict[str, str]
    has_bos: bool
    has_eos: bool


@dataclass(frozen=True, slots=True)
class MarkedStyle:
    """How a SentencePiece-like vocabulary treats white space and rare characters.

    Args:
        has_space_prefix: a space is put before a text.
        is_trimmed: spaces at both ends are dropped, and runs of them become one.
        charsmap: SentencePiece's precompiled normalisation; empty for none.
    """

    has_space_prefix: bool
    is_trimmed: bool = False
    charsmap: bytes = b""


def _byte_alphabet() -> dict[str, int]:
    """The printable character that byte-level BPE writes for each byte (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


BYTE_OF_CHAR: Final = _byte_alphabet()
"""How byte-level vocabularies write each byte."""


def byte_of_token(piece: str) -> int | None:
    """The byte that a byte-fallback token such as ``<0x0A>`` stands for, or None."""
    match = _BYTE_TOKEN.fullmatch(piece)
    return int(match[1], 16) if match else None


def is_unicode(text: str) -> bool:
    """Whether ``text`` can be written as UTF-8 (no lone surrogates)."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def build_byte_level(
    pieces: Sequence[str], merges: list[tuple[str, str]], patterns: Sequence[str], *, is_whole_word_first: bool
) -> Tokenizer:
    """Returns GPT-2's kind: ``pieces`` and ``merges`` are written in its byte alphabet.

    Args:
        patterns: cut a text, one after the other.
        is_whole_word_first: a cut that is itself a token is taken whole.

    Raises:
        ModelFormatError: a merge names what is no token.
    """
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(_bpe(vocab, merges, ignore_merges=is_whole_word_first))
    cuts: list[PreTokenizer] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    cuts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def build_marked_bpe(
    pieces: Sequence[str],
    merges: list[tuple[str, str]],
    *,
    unk: str | None,
    has_byte_fallback: bool,
    style: MarkedStyle,
    is_pre_merged: bool = False,
) -> Tokenizer:
    """Returns SentencePiece's BPE: spaces are marks, unknown characters become bytes or ``unk``.

    Args:
        is_pre_merged: the merges are the file's own (Gemma 4), for which a text is one word.

    Raises:
        ModelFormatError: a merge names what is no token.
    """
    vocab = {piece: index for index, piece in enumerate(pieces)}
    model = _bpe(vocab, merges, unk_token=unk, fuse_unk=True, byte_fallback=has_byte_fallback)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(_normalizers(style))
    if is_pre_merged:
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = _marked_decoder(style)
    return tokenizer


def build_unigram(
    pieces: Sequence[str], scores: Sequence[float], *, unk_id: int, has_byte_fallback: bool, style: MarkedStyle
) -> Tokenizer:
    """Returns SentencePiece's Unigram: the pieces whose scores add up best (T5, XLM-R, Marian).

    Raises:
        ModelFormatError: the library refuses the lists.
    """
    try:
        model = models.Unigram(list(zip(pieces, scores, strict=True)), unk_id, has_byte_fallback)
    except Exception as fault:  # the library's only error class
        raise ModelFormatError(f"the vocabulary cannot be used as a Unigram model: {fault}") from fault
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(_normalizers(style))
    tokenizer.decoder = _marked_decoder(style)
    return tokenizer


def build_word_piece(pieces: Sequence[str], *, unk: str, is_lower_case: bool) -> Tokenizer:
    """Returns BERT's kind: words of a cleaned text, cut greedily; pieces inside a word begin with ``##``."""
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token=unk, max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=is_lower_case)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def wrap_in(tokenizer: Tokenizer, cls: tuple[str, int], sep: tuple[str, int]) -> None:
    """Lets ``add_special`` put ``cls`` before and ``sep`` behind a text, as BERT wants it."""
    tokenizer.post_processor = BertProcessing(sep, cls)


def add_recognised(tokenizer: Tokenizer, pieces: Sequence[str], kinds: Sequence[int]) -> None:
    """Lets control and user-defined tokens be recognised in text."""
    tokenizer.add_tokens(
        [
            AddedToken(piece, special=kind == TokenKind.CONTROL, normalized=False)
            for piece, kind in zip(pieces, kinds, strict=True)
            if kind in (TokenKind.CONTROL, TokenKind.USER_DEFINED)
        ]
    )


def merges_by_score(pieces: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Returns every way to put a piece together from two others, in the order in which they are to be tried.

    The best score first, then the longest left part, then the longest right part: transformers' order when it converts
    a SentencePiece model. Pieces that must not take part are left out by giving ``""``.

    Raises:
        ModelFormatError: the pieces are too long together to be looked at.

    Cost: two look-ups for each character of the vocabulary; 1.5 s for Gemma's 262,144 tokens.
    """
    import numpy as np  # late: no other vocabulary needs it, and no front that serves them loads it

    if sum(map(len, pieces)) > MAX_SPLIT_CHARS:
        raise ModelFormatError(f"the vocabulary's tokens are over {MAX_SPLIT_CHARS} characters long together")
    known = set(pieces) - {""}
    merges: list[tuple[str, str]] = []
    owners: list[int] = []
    for index, piece in enumerate(pieces):
        for cut in range(1, len(piece)):
            left = piece[:cut]
            if left in known:
                right = piece[cut:]
                if right in known:
                    merges.append((left, right))
                    owners.append(index)
    left_lengths = np.fromiter((len(left) for left, _ in merges), np.int64, len(merges))
    right_lengths = np.fromiter((len(right) for _, right in merges), np.int64, len(merges))
    of_merge = np.asarray(scores, np.float64)[owners] if merges else np.empty(0)
    order = np.lexsort((-right_lengths, -left_lengths, -of_merge))
    return [merges[index] for index in order.tolist()]


def _bpe(vocab: dict[str, int], merges: list[tuple[str, str]], **options: object) -> models.BPE:
    try:
        return models.BPE(vocab=vocab, merges=merges, **options)
    except Exception as fault:  # the library's only error class; its text names the merge
        raise ModelFormatError(f"the merges do not fit the vocabulary: {fault}") from fault


def _normalizers(style: MarkedStyle) -> list[normalizers.Normalizer]:
    steps: list[normalizers.Normalizer] = []
    if style.charsmap:
        try:
            steps.append(normalizers.Precompiled(style.charsmap))
        except Exception as fault:  # the library's only error class
            raise ModelFormatError(f"the vocabulary's precompiled_charsmap cannot be used: {fault}") from fault
    if style.is_trimmed:
        # SentencePiece drops spaces only, at the end written-out marks too; not all white space, as Strip does.
        steps += [
            normalizers.Replace(Regex(" {2,}"), " "),
            normalizers.Replace(Regex(rf"\A +|[ {SPACE_MARK}]+\z"), ""),
        ]
    if style.has_space_prefix:
        steps.append(normalizers.Prepend(SPACE_MARK))
    steps.append(normalizers.Replace(" ", SPACE_MARK))
    return steps


def _marked_decoder(style: MarkedStyle) -> decoders.Decoder:
    steps: list[decoders.Decoder] = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if style.has_space_prefix:
        steps.append(decoders.Strip(content=" ", left=1, right=0))
    return decoders.Sequence(steps)
