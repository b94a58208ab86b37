"""Builds a `tokenizers` tokenizer from the vocabulary inside a GGUF file.

What lives here: the checks on the file's lists (they come from strangers), the table of pre-tokenizers by name, and
the two shapes of vocabulary: byte-level BPE (``gpt2``) and SentencePiece with scores and byte fallback (``llama``).
What does not: reading GGUF (``registry``) and the tokenizer's behaviour after it is built (``tokenizer``).

The patterns are the published ones of each model's own tokenizer; they were checked against the golden tokenisations
that llama.cpp ships with its vocabularies (``scripts/check_vocab_goldens``).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.pre_tokenizers import PreTokenizer

from headrace.base.errors import ModelFormatError, ModelUnsupportedError

# Limits on lists that a stranger wrote, well above the largest vocabulary known (262,144 tokens of ≤ 1,024 characters).
MAX_VOCAB_TOKENS: Final = 2**20
MAX_TOKEN_CHARS: Final = 4096
MAX_MERGES: Final = 2**22
# Every split of every piece is looked up once for a `llama` vocabulary: bounds that at a few seconds.
MAX_SCORED_CHARS: Final = 2**24

SPACE_MARK: Final = "\u2581"  # ▁, how SentencePiece writes a space
_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenKind(IntEnum):
    """`tokenizer.ggml.token_type` of GGUF."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class GgufVocab:
    """A checked vocabulary: the tokenizer and what GGUF says beside it.

    Args:
        tokenizer: without post-processor; special tokens are recognised in text.
        pieces: token id to its written form.
        special_ids: bos, eos, unk, pad … to their ids, for those that the file names.
        has_bos, has_eos: whether ``add_special`` puts them around a text.
    """

    tokenizer: Tokenizer
    pieces: list[str]
    special_ids: dict[str, int]
    has_bos: bool
    has_eos: bool


_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}"
_QWEN35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class _Style:
    """How a named pre-tokenizer cuts text before BPE, and what goes with the name."""

    patterns: tuple[str, ...]
    is_whole_word_first: bool = False  # a word that is itself a token is taken whole (Llama 3)
    has_bos: bool = False  # where the file does not say


_STYLES: Final[dict[str, _Style]] = {
    "gpt-2": _Style((_GPT2,)),
    "smollm": _Style((r"\p{N}", _GPT2)),
    "llama-bpe": _Style((_LLAMA3,), is_whole_word_first=True, has_bos=True),
    "dbrx": _Style((_LLAMA3,)),
    "qwen2": _Style((_QWEN2,)),
    "qwen35": _Style((_QWEN35,)),
    "tekken": _Style((_TEKKEN,), is_whole_word_first=True, has_bos=True),
    "deepseek-coder": _Style(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}")
    ),
    "deepseek-v3": _Style((r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK3)),
    "falcon": _Style((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    "default": _Style((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
}
_ALIASES: Final[dict[str, str]] = {
    **dict.fromkeys(("mpt", "olmo", "phi-2", "jais", "trillion", "granite-docling", "exaone4"), "gpt-2"),
    **dict.fromkeys(("starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), "smollm"),
    **dict.fromkeys(("llama3", "llama-v3", "falcon3", "pixtral", "lfm2"), "llama-bpe"),
    "smaug-bpe": "dbrx",
    **dict.fromkeys(("deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan"), "qwen2"),
    "hunyuan-dense": "deepseek-v3",
}


def known_pre_tokenizers() -> list[str]:
    """Names of `tokenizer.ggml.pre` that this build reads, sorted."""
    return sorted({*_STYLES, *_ALIASES})


def build_gguf_vocab(metadata: Mapping[str, object]) -> GgufVocab:
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
    if model not in ("gpt2", "llama"):
        raise ModelUnsupportedError(
            f"tokenizer.ggml.model is {model!r}; this build reads 'gpt2' and 'llama'",
            hint="use a model folder that has a tokenizer.json",
        )
    pieces = _read_pieces(metadata)
    kinds = _read_kinds(metadata, pieces)
    special_ids = _read_special_ids(metadata, len(pieces))
    added = [
        AddedToken(piece, special=kind == TokenKind.CONTROL, normalized=False)
        for piece, kind in zip(pieces, kinds, strict=True)
        if kind in (TokenKind.CONTROL, TokenKind.USER_DEFINED)
    ]
    if model == "gpt2":
        style = _find_style(metadata)
        tokenizer = _build_byte_level(pieces, _read_merges(metadata), style)
        has_bos = style.has_bos
    else:
        tokenizer = _build_scored(metadata, pieces, kinds, special_ids)
        has_bos = True
    tokenizer.add_tokens(added)
    if tokenizer.get_vocab_size(with_added_tokens=True) != len(pieces):
        raise ModelFormatError(
            f"the vocabulary has {len(pieces)} entries, but only "
            f"{tokenizer.get_vocab_size(with_added_tokens=True)} different tokens"
        )
    return GgufVocab(
        tokenizer=tokenizer,
        pieces=pieces,
        special_ids=special_ids,
        has_bos=_read_flag(metadata, "tokenizer.ggml.add_bos_token", default=has_bos),
        has_eos=_read_flag(metadata, "tokenizer.ggml.add_eos_token", default=False),
    )


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


def _read_flag(metadata: Mapping[str, object], key: str, *, default: bool) -> bool:
    value = metadata.get(key, default)
    if not isinstance(value, bool):
        raise ModelFormatError(f"{key} is {value!r}, it must be true or false")
    return value


def _read_pieces(metadata: Mapping[str, object]) -> list[str]:
    key = "tokenizer.ggml.tokens"
    values = _read_list(metadata, key)
    if not values or len(values) > MAX_VOCAB_TOKENS:
        raise ModelFormatError(f"{key} has {len(values or ())} entries, allowed are 1 to {MAX_VOCAB_TOKENS}")
    for index, piece in enumerate(values):
        if not isinstance(piece, str) or not 0 < len(piece) <= MAX_TOKEN_CHARS:
            raise ModelFormatError(f"{key}[{index}] must be a string of 1 to {MAX_TOKEN_CHARS} characters")
    pieces = [str(piece) for piece in values]
    if not is_unicode("".join(pieces)):
        raise ModelFormatError(f"{key} holds text that is not valid Unicode")
    if len(set(pieces)) < len(pieces):
        twice = next(piece for piece, count in Counter(pieces).items() if count > 1)
        raise ModelFormatError(f"{key} has {twice[:80]!r} more than once")
    return pieces


def is_unicode(text: str) -> bool:
    """Whether ``text`` can be written as UTF-8 (no lone surrogates)."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _read_kinds(metadata: Mapping[str, object], pieces: list[str]) -> list[int]:
    key = "tokenizer.ggml.token_type"
    values = _read_list(metadata, key)
    if values is None:
        return [TokenKind.NORMAL] * len(pieces)
    if len(values) != len(pieces):
        raise ModelFormatError(f"{key} has {len(values)} entries for {len(pieces)} tokens")
    kinds = [value for value in values if isinstance(value, int)]
    if len(kinds) < len(values) or not set(kinds) <= set(TokenKind):
        raise ModelFormatError(f"{key} holds kinds other than {min(TokenKind)} to {max(TokenKind)}")
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
        raise ModelFormatError(f"{key} has {len(values or ())} entries, a gpt2 vocabulary has them, up to {MAX_MERGES}")
    merges: list[tuple[str, str]] = []
    for index, value in enumerate(values):
        # A token may itself begin with a space, so the cut is the first space after character 0.
        cut = value.find(" ", 1) if isinstance(value, str) else -1
        if not isinstance(value, str) or cut < 1 or cut == len(value) - 1:
            raise ModelFormatError(f"{key}[{index}] must be two tokens with a space between")
        merges.append((value[:cut], value[cut + 1 :]))
    return merges


def _find_style(metadata: Mapping[str, object]) -> _Style:
    name = metadata.get("tokenizer.ggml.pre", "default")
    style = _STYLES.get(_ALIASES.get(str(name), str(name)))
    if style is None:
        raise ModelUnsupportedError(
            f"tokenizer.ggml.pre is {name!r}; this build knows {', '.join(known_pre_tokenizers())}",
            hint="use a model folder that has a tokenizer.json",
        )
    return style


def _build_byte_level(pieces: list[str], merges: list[tuple[str, str]], style: _Style) -> Tokenizer:
    vocab = {piece: index for index, piece in enumerate(pieces)}
    try:
        model = models.BPE(vocab=vocab, merges=merges, ignore_merges=style.is_whole_word_first)
    except Exception as fault:  # the library's only error class; its text names the merge
        raise ModelFormatError(f"tokenizer.ggml.merges do not fit the vocabulary: {fault}") from fault
    tokenizer = Tokenizer(model)
    cuts: list[PreTokenizer] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in style.patterns]
    cuts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _build_scored(
    metadata: Mapping[str, object], pieces: list[str], kinds: list[int], special_ids: dict[str, int]
) -> Tokenizer:
    key = "tokenizer.ggml.scores"
    scores = _read_list(metadata, key)
    if scores is None or len(scores) != len(pieces):
        raise ModelFormatError(f"{key} has {len(scores or ())} entries for {len(pieces)} tokens")
    checked: list[float] = []
    for index, score in enumerate(scores):
        if not isinstance(score, int | float) or score != score:
            raise ModelFormatError(f"{key}[{index}] is {score!r}, it must be a number")
        checked.append(float(score))
    written = {TokenKind.NORMAL, TokenKind.USER_DEFINED, TokenKind.UNUSED}
    mergeable = [index for index, kind in enumerate(kinds) if kind in written]
    if sum(len(pieces[index]) for index in mergeable) > MAX_SCORED_CHARS:
        raise ModelFormatError(f"the vocabulary's tokens are over {MAX_SCORED_CHARS} characters long together")
    vocab = {piece: index for index, piece in enumerate(pieces)}
    unk = pieces[special_ids["unk"]] if "unk" in special_ids else None
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=list(_merges_by_score(pieces, checked, mergeable)),
            unk_token=unk,
            fuse_unk=True,
            byte_fallback=TokenKind.BYTE in kinds,
        )
    )
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", SPACE_MARK)]
    decode_steps: list[decoders.Decoder] = [
        decoders.Replace(SPACE_MARK, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if _read_flag(metadata, "tokenizer.ggml.add_space_prefix", default=True):
        steps.insert(0, normalizers.Prepend(SPACE_MARK))
        decode_steps.append(decoders.Strip(content=" ", left=1, right=0))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(decode_steps)
    return tokenizer


def _merges_by_score(pieces: list[str], scores: list[float], mergeable: list[int]) -> Iterable[tuple[str, str]]:
    """Every way to put a piece together from two others, best score first: SentencePiece's order of merging."""
    known = {pieces[index]: index for index in mergeable}
    for index in sorted(mergeable, key=lambda index: -scores[index]):
        piece = pieces[index]
        splits = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
        pairs = [(known[left], known[right]) for left, right in splits if left in known and right in known]
        for left_id, right_id in sorted(pairs):
            yield pieces[left_id], pieces[right_id]


def byte_of_token(piece: str) -> int | None:
    """The byte that a byte-fallback token such as ``<0x0A>`` stands for, or None."""
    match = _BYTE_TOKEN.fullmatch(piece)
    return int(match[1], 16) if match else None
