"""Reads SentencePiece model files (``tokenizer.model``): BPE and Unigram, byte fallback, precompiled normalisation.

The file is one protobuf message: pieces with scores and kinds (1), trainer settings (2), normaliser settings (3); field
numbers as in sentencepiece_model.proto of the SentencePiece project. What is built encodes as SentencePiece does, but
that control tokens written in a text are recognised, as transformers does.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from headrace.base.errors import ModelFormatError, ModelUnsupportedError
from headrace.text.protobuf import fields
from headrace.text.vocabulary import (
    MarkedStyle,
    TokenKind,
    Vocabulary,
    add_recognised,
    build_marked_bpe,
    build_unigram,
    byte_of_token,
    is_unicode,
    merges_by_score,
)

MAX_PIECES: Final = 2**20
MAX_PIECE_CHARS: Final = 4096
_UNIGRAM, _BPE = 1, 2
_MODEL_TYPES: Final = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}


@dataclass(slots=True)
class _Model:
    """What the message says; defaults are the format's own."""

    pieces: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    model_type: int = _UNIGRAM
    is_suffix: bool = False
    ids: dict[str, int] = field(default_factory=lambda: {"unk": 0, "bos": 1, "eos": 2, "pad": -1})
    charsmap: bytes = b""
    has_space_prefix: bool = True
    is_trimmed: bool = True
    has_marks: bool = True


def build_sentencepiece(data: bytes, where: str) -> Vocabulary:
    """Returns the vocabulary of a model file's bytes.

    Args:
        where: names the file in messages.

    Raises:
        ModelFormatError: the file lies or is cut off.
        ModelUnsupportedError: a kind of model that no language model uses.
    """
    model = _read(memoryview(data), where)
    _check(model, where)
    style = MarkedStyle(model.has_space_prefix, model.is_trimmed, model.charsmap)
    unk = model.pieces[model.ids["unk"]]
    has_bytes = TokenKind.BYTE in model.kinds
    if model.model_type == _BPE:
        written = (TokenKind.NORMAL, TokenKind.USER_DEFINED, TokenKind.UNUSED)
        parts = [piece if kind in written else "" for piece, kind in zip(model.pieces, model.kinds, strict=True)]
        merges = merges_by_score(parts, model.scores)
        tokenizer = build_marked_bpe(model.pieces, merges, unk=unk, has_byte_fallback=has_bytes, style=style)
    else:
        tokenizer = build_unigram(
            model.pieces, model.scores, unk_id=model.ids["unk"], has_byte_fallback=has_bytes, style=style
        )
    add_recognised(tokenizer, model.pieces, model.kinds)
    special = {f"{name}_token": model.pieces[index] for name, index in model.ids.items() if index >= 0}
    # The file does not say what goes around a text: Llama and Mistral begin with BOS, T5 ends with EOS.
    is_bpe = model.model_type == _BPE
    return Vocabulary(tokenizer, model.pieces, special, has_bos=is_bpe, has_eos=not is_bpe)


def _read(message: memoryview, where: str) -> _Model:
    model = _Model()
    for number, value in fields(message, where):
        if number > 3:
            continue  # self-test data and extensions
        if not isinstance(value, memoryview):
            raise ModelFormatError(f"{where}: field {number} is no message: not a SentencePiece model")
        match number:
            case 1:
                _read_piece(model, value, where)
            case 2:
                _read_trainer(model, value, where)
            case 3:
                _read_normalizer(model, value, where)
    return model


def _read_piece(model: _Model, message: memoryview, where: str) -> None:
    index = len(model.pieces)
    if index >= MAX_PIECES:
        raise ModelFormatError(f"{where}: has more than {MAX_PIECES} pieces")
    piece, score, kind = "", 0.0, int(TokenKind.NORMAL)
    for number, value in fields(message, where):
        if number == 1 and isinstance(value, memoryview):
            piece = _text(value, f"{where}: piece {index}")
        elif number == 2 and isinstance(value, float):
            score = value
        elif number == 3 and isinstance(value, int):
            kind = value
    if not 0 < len(piece) <= MAX_PIECE_CHARS or score != score or kind not in set(TokenKind):
        raise ModelFormatError(
            f"{where}: piece {index} has {len(piece)} characters, score {score} and kind {kind}; "
            f"wanted are 1 to {MAX_PIECE_CHARS} characters, a number and a kind of 1 to 6"
        )
    model.pieces.append(piece)
    model.scores.append(score)
    model.kinds.append(kind)


def _read_trainer(model: _Model, message: memoryview, where: str) -> None:
    names = {40: "unk", 41: "bos", 42: "eos", 43: "pad"}
    for number, value in fields(message, where):
        if number == 3 and isinstance(value, int):
            model.model_type = value
        elif number == 24:
            model.is_suffix = bool(value)
        elif number in names and isinstance(value, int):
            # −1, "there is none", is written as a number of 64 bits.
            model.ids[names[number]] = value - 2**64 if value >= 2**63 else value


def _read_normalizer(model: _Model, message: memoryview, where: str) -> None:
    for number, value in fields(message, where):
        match number:
            case 2 if isinstance(value, memoryview):
                model.charsmap = bytes(value)
            case 3:
                model.has_space_prefix = bool(value)
            case 4:
                model.is_trimmed = bool(value)
            case 5:
                model.has_marks = bool(value)
            case _:
                pass


def _check(model: _Model, where: str) -> None:
    if not model.pieces:
        raise ModelFormatError(f"{where}: holds no pieces: not a SentencePiece model")
    if model.model_type not in (_UNIGRAM, _BPE) or model.is_suffix or not model.has_marks:
        what = _MODEL_TYPES.get(model.model_type, str(model.model_type))
        raise ModelUnsupportedError(
            f"{where}: is a SentencePiece model of type {what} "
            f"(white space as suffix: {model.is_suffix}, marked: {model.has_marks}); this build reads bpe and unigram "
            "with white space marked in front",
            hint="use a model folder that has a tokenizer.json",
        )
    if len(set(model.pieces)) < len(model.pieces):
        twice = next(piece for piece, count in Counter(model.pieces).items() if count > 1)
        raise ModelFormatError(f"{where}: has the piece {twice[:80]!r} more than once")
    for index, (piece, kind) in enumerate(zip(model.pieces, model.kinds, strict=True)):
        if kind == TokenKind.BYTE and byte_of_token(piece) is None:
            raise ModelFormatError(f"{where}: piece {index} is the byte token {piece[:80]!r}: want <0x00> to <0xFF>")
    for name, index in model.ids.items():
        if index >= len(model.pieces) or (name == "unk" and index < 0):
            raise ModelFormatError(f"{where}: {name}_id is {index}, the vocabulary has {len(model.pieces)} pieces")


def _text(value: memoryview, where: str) -> str:
    try:
        text = bytes(value).decode()
    except UnicodeDecodeError as fault:
        raise ModelFormatError(f"{where} is not UTF-8: {fault.reason}") from fault
    assert is_unicode(text)
    return text
