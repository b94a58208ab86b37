"""Reads the vocabulary inside a GGUF file: checks its lists, which come from strangers, and says what to build of them.

What lives here: which vocabulary a file means. What does not: reading GGUF (``registry``), building (``vocabulary``),
how named pre-tokenizers cut (``styles``) and the tokenizer's behaviour after it is built (``tokenizer``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from tokenizers import Tokenizer

from headrace.base.errors import ModelFormatError, ModelUnsupportedError
from headrace.text.styles import Style, find_style, known_pre_tokenizers
from headrace.text.vocabulary import (
    SPACE_MARK,
    MarkedStyle,
    TokenKind,
    Vocabulary,
    add_recognised,
    build_byte_level,
    build_marked_bpe,
    build_unigram,
    build_word_piece,
    byte_of_token,
    is_unicode,
    merges_by_score,
    wrap_in,
)

# Limits on lists that a stranger wrote, well above the largest vocabulary known (262,144 tokens of ≤ 1,024 characters).
MAX_VOCAB_TOKENS: Final = 2**20
MAX_TOKEN_CHARS: Final = 4096
MAX_MERGES: Final = 2**22
MAX_CHARSMAP_BYTES: Final = 2**22  # the largest known has 237,539

_KINDS: Final = ("gpt2", "llama", "gemma4", "t5", "bert")


def build_gguf_vocab(metadata: Mapping[str, object]) -> Vocabulary:
    """Checks the vocabulary in GGUF ``metadata`` and builds its tokenizer.

    Raises:
        ModelFormatError: a list is missing, has the wrong length, a malformed entry or an id out of range.
        ModelUnsupportedError: the vocabulary's kind or pre-tokenizer is not one that this build reads.

    Cost: O(vocabulary) time; about 0.2 s for 49,152 tokens.
    """
    model = metadata.get("tokenizer.ggml.model")
    if model is None:
        raise ModelFormatError(
            "the GGUF file has no tokenizer.ggml.model: it holds no vocabulary",
            hint="use a file converted together with its tokenizer",
        )
    if model not in _KINDS:
        raise ModelUnsupportedError(
            f"tokenizer.ggml.model is {str(model)[:80]!r}; this build reads {', '.join(_KINDS)}",
            hint="use a model folder that has a tokenizer.json",
        )
    pieces = _read_pieces(metadata)
    kinds = _read_kinds(metadata, pieces)
    special_ids = _read_special_ids(metadata, len(pieces))
    has_bos = model != "t5"
    match model:
        case "gpt2":
            style = _find_style(metadata)
            has_bos = style.has_bos
            merges = _read_merges(metadata)
            whole = style.is_whole_word_first
            tokenizer = build_byte_level(pieces, merges, style.patterns, is_whole_word_first=whole)
        case "bert":
            pieces = [_word_piece(piece) for piece in pieces]
            tokenizer = _build_bert(pieces, special_ids)
            has_bos = False  # the tokenizer's own post-processor puts [CLS] and [SEP] around a text
        case _:
            # Converters write a run of spaces as such where it is a token of its own, and as marks where it is a part.
            runs = zip(pieces, kinds, strict=True)
            pieces = [piece.replace(" ", SPACE_MARK) if _is_run(piece, kind) else piece for piece, kind in runs]
            tokenizer = _build_marked(str(model), metadata, pieces, kinds, special_ids)
    add_recognised(tokenizer, pieces, kinds)
    if tokenizer.get_vocab_size(with_added_tokens=True) != len(pieces):
        raise ModelFormatError(
            f"the vocabulary has {len(pieces)} entries, but only "
            f"{tokenizer.get_vocab_size(with_added_tokens=True)} different tokens"
        )
    return Vocabulary(
        tokenizer=tokenizer,
        pieces=pieces,
        special_tokens={f"{name}_token": pieces[index] for name, index in special_ids.items()},
        has_bos=_read_flag(metadata, "add_bos_token", default=has_bos) and model != "bert",
        has_eos=_read_flag(metadata, "add_eos_token", default=model == "t5") and model != "bert",
    )


def _build_marked(
    model: str, metadata: Mapping[str, object], pieces: list[str], kinds: list[int], special_ids: dict[str, int]
) -> Tokenizer:
    """Builds what writes spaces as marks: SentencePiece's BPE with scores or merges, and Unigram."""
    has_bytes = TokenKind.BYTE in kinds
    style = MarkedStyle(
        has_space_prefix=_read_flag(metadata, "add_space_prefix", default=model != "gemma4"),
        is_trimmed=_read_flag(metadata, "remove_extra_whitespaces", default=False),
        charsmap=_read_charsmap(metadata),
    )
    unk = special_ids.get("unk")
    if model == "gemma4":
        merges = _read_merges(metadata)
        return build_marked_bpe(
            pieces,
            merges,
            unk=None if unk is None else pieces[unk],
            has_byte_fallback=has_bytes,
            style=style,
            is_pre_merged=True,
        )
    scores = _read_scores(metadata, len(pieces))
    if model == "t5":
        if unk is None:
            raise ModelFormatError("tokenizer.ggml.unknown_token_id is missing: a t5 vocabulary needs it")
        return build_unigram(pieces, scores, unk_id=unk, has_byte_fallback=has_bytes, style=style)
    written = (TokenKind.NORMAL, TokenKind.USER_DEFINED, TokenKind.UNUSED)
    parts = [piece if kind in written else "" for piece, kind in zip(pieces, kinds, strict=True)]
    # SentencePiece takes its user-defined symbols before all others; converters lose their score, which is 0.
    ranked = [0.0 if kind == TokenKind.USER_DEFINED else score for score, kind in zip(scores, kinds, strict=True)]
    return build_marked_bpe(
        pieces,
        merges_by_score(parts, ranked),
        unk=None if unk is None else pieces[unk],
        has_byte_fallback=has_bytes,
        style=style,
    )


def _build_bert(pieces: list[str], special_ids: dict[str, int]) -> Tokenizer:
    # llama.cpp writes no flag for it; a vocabulary without one capital letter was made for lower-cased text.
    is_lower_case = not any("A" <= char <= "Z" for piece in pieces if not piece.startswith("[") for char in piece)
    tokenizer = build_word_piece(
        pieces, unk=pieces[special_ids["unk"]] if "unk" in special_ids else "[UNK]", is_lower_case=is_lower_case
    )
    begin, end = special_ids.get("cls", special_ids.get("bos")), special_ids.get("sep", special_ids.get("eos"))
    if begin is not None and end is not None:
        wrap_in(tokenizer, (pieces[begin], begin), (pieces[end], end))
    return tokenizer


def _word_piece(piece: str) -> str:
    """Returns a WordPiece as BERT's own vocab.txt has it; converters mark what begins a word, not what goes on."""
    if piece.startswith("[") and piece.endswith("]"):
        return piece
    return piece[1:] if piece.startswith(SPACE_MARK) else f"##{piece}"


def _is_run(piece: str, kind: int) -> bool:
    return kind == TokenKind.USER_DEFINED and not piece.strip(" ")


def _read_list(metadata: Mapping[str, object], key: str) -> Sequence[object] | None:
    value = metadata.get(key)
    if value is None:
        return None
    to_list = getattr(value, "tolist", None)  # a reader may hand numbers over as a numpy array
    if to_list is not None:
        value = to_list()
    if not isinstance(value, list | tuple):
        raise ModelFormatError(f"{key} is {type(value).__name__}, it must be an array")
    return value


def _read_flag(metadata: Mapping[str, object], name: str, *, default: bool) -> bool:
    value = metadata.get(f"tokenizer.ggml.{name}", default)
    if not isinstance(value, bool):
        raise ModelFormatError(f"tokenizer.ggml.{name} is {str(value)[:80]!r}, it must be true or false")
    return value


def _read_pieces(metadata: Mapping[str, object]) -> list[str]:
    key = "tokenizer.ggml.tokens"
    values = _read_list(metadata, key)
    if not values or len(values) > MAX_VOCAB_TOKENS:
        raise ModelFormatError(f"{key} has {len(values or ())} entries, allowed are 1 to {MAX_VOCAB_TOKENS}")
    pieces = [piece for piece in values if isinstance(piece, str) and 0 < len(piece) <= MAX_TOKEN_CHARS]
    if len(pieces) < len(values):
        index = next((index for index, piece in enumerate(pieces) if piece is not values[index]), len(pieces))
        raise ModelFormatError(f"{key}[{index}] must be a string of 1 to {MAX_TOKEN_CHARS} characters")
    if not is_unicode("".join(pieces)):
        raise ModelFormatError(f"{key} holds text that is not valid Unicode")
    if len(set(pieces)) < len(pieces):
        twice = next(piece for piece, count in Counter(pieces).items() if count > 1)
        raise ModelFormatError(f"{key} has {twice[:80]!r} more than once")
    return pieces


def _read_kinds(metadata: Mapping[str, object], pieces: list[str]) -> list[int]:
    key = "tokenizer.ggml.token_type"
    values = _read_list(metadata, key)
    if values is None:
        return [TokenKind.NORMAL] * len(pieces)
    if len(values) != len(pieces):
        raise ModelFormatError(f"{key} has {len(values)} entries for {len(pieces)} tokens")
    kinds = [value for value in values if isinstance(value, int)]
    found = set(kinds)
    if len(kinds) < len(values) or not found <= set(TokenKind):
        raise ModelFormatError(f"{key} holds kinds other than {min(TokenKind)} to {max(TokenKind)}")
    if TokenKind.BYTE in found:
        for index, (kind, piece) in enumerate(zip(kinds, pieces, strict=True)):
            if kind == TokenKind.BYTE and byte_of_token(piece) is None:
                raise ModelFormatError(f"token {index} is the byte token {piece[:80]!r}: want <0x00> to <0xFF>")
    return kinds


def _read_special_ids(metadata: Mapping[str, object], num_tokens: int) -> dict[str, int]:
    ids: dict[str, int] = {}
    for name, key in (
        ("bos", "bos_token_id"),
        ("eos", "eos_token_id"),
        ("unk", "unknown_token_id"),
        ("sep", "seperator_token_id"),  # sic, in the format
        ("pad", "padding_token_id"),
        ("cls", "cls_token_id"),
        ("mask", "mask_token_id"),
    ):
        value = metadata.get(f"tokenizer.ggml.{key}")
        if value is None or value == 2**32 - 1:  # how some converters write "none"
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < num_tokens:
            raise ModelFormatError(f"tokenizer.ggml.{key} is {value!r}, the vocabulary has {num_tokens} tokens")
        ids[name] = value
    return ids


def _read_merges(metadata: Mapping[str, object]) -> list[tuple[str, str]]:
    key = "tokenizer.ggml.merges"
    values = _read_list(metadata, key)
    if values is None or len(values) > MAX_MERGES:
        raise ModelFormatError(f"{key} has {len(values or ())} entries, such a vocabulary has them, up to {MAX_MERGES}")
    merges: list[tuple[str, str]] = []
    for index, value in enumerate(values):
        # A token may itself begin with a space, so the cut is the first space after character 0.
        cut = value.find(" ", 1) if isinstance(value, str) else -1
        if not isinstance(value, str) or cut < 1 or cut == len(value) - 1:
            raise ModelFormatError(f"{key}[{index}] must be two tokens with a space between")
        merges.append((value[:cut], value[cut + 1 :]))
    return merges


def _read_scores(metadata: Mapping[str, object], num_tokens: int) -> list[float]:
    key = "tokenizer.ggml.scores"
    scores = _read_list(metadata, key)
    if scores is None or len(scores) != num_tokens:
        raise ModelFormatError(f"{key} has {len(scores or ())} entries for {num_tokens} tokens")
    checked: list[float] = []
    for index, score in enumerate(scores):
        if not isinstance(score, int | float) or score != score:
            raise ModelFormatError(f"{key}[{index}] is {score!r}, it must be a number")
        checked.append(float(score))
    return checked


def _read_charsmap(metadata: Mapping[str, object]) -> bytes:
    key = "tokenizer.ggml.precompiled_charsmap"
    values = _read_list(metadata, key)
    if values is None:
        return b""
    is_good = len(values) <= MAX_CHARSMAP_BYTES and all(type(value) is int and -128 <= value < 256 for value in values)
    if not is_good:
        raise ModelFormatError(f"{key} must be at most {MAX_CHARSMAP_BYTES} bytes")
    return bytes(int(str(value)) & 255 for value in values)


def _find_style(metadata: Mapping[str, object]) -> Style:
    name = metadata.get("tokenizer.ggml.pre", "default")
    style = find_style(str(name))
    if style is None:
        raise ModelUnsupportedError(
            f"tokenizer.ggml.pre is {str(name)[:80]!r}; this build knows {', '.join(known_pre_tokenizers())}",
            hint="use a model folder that has a tokenizer.json",
        )
    return style
