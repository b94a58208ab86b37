"""Text to token ids and back, for one model's vocabulary, from a model folder's files or from GGUF metadata.

What lives here: encoding, the exact bytes of every token, special tokens, and how long a text may be before encoding
it is a waste. What does not: chat templates (``template``), streaming (``detokenize``). A Tokenizer may be used from
several threads at once; encoding a long text lets other threads run, and belongs off the event loop.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import tokenizers

from headrace.base.errors import ContextLengthError, ModelFormatError, ModelUnsupportedError, RequestError
from headrace.text.gguf_vocab import build_gguf_vocab
from headrace.text.sentencepiece import build_sentencepiece
from headrace.text.tekken import build_tekken
from headrace.text.vocabulary import BYTE_OF_CHAR, SPACE_MARK, Vocabulary, byte_of_token, is_unicode

# The largest known (a 200,000-token vocabulary) is 28 MB.
MAX_TOKENIZER_JSON_BYTES: Final = 128 * 2**20
MAX_CONFIG_JSON_BYTES: Final = 4 * 2**20

# NFC may shorten a text before it is cut into tokens: a base letter and its marks become one code point. The longest
# canonical decomposition has 4 code points (U+1F82 and its like).
_NFC_SHRINKAGE: Final = 4

# Encoding costs about 1 µs a character where tokens are long; this many are a second.
_MAX_CHARS: Final = 1_000_000
# Characters a token of ordinary text has at most (English 4.5, code with deep indentation 6).
_WORDY_CHARS: Final = 8
_CUT_SLACK: Final = 1.1
# At most 4 ms with other threads waiting; a batch costs 0.05 ms more.
_SHORT_CHARS: Final = 1024

_SPECIAL_NAMES: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """One model's vocabulary.

    Args:
        inner: the built tokenizer; its padding and truncation settings are switched off.
        special_tokens: ``bos_token``, ``eos_token`` … to their text, as chat templates see them.
        has_bos, has_eos: put around a text by ``encode(add_special=True)``, beside what ``inner`` itself adds.
        pieces: token id to its written form, where the caller has them: asking ``inner`` takes 0.4 s for 262,144.
    """

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str],
        has_bos: bool = False,
        has_eos: bool = False,
        pieces: Sequence[str] | None = None,
    ) -> None:
        inner.no_padding()
        inner.no_truncation()
        self._inner = inner
        self._style = _DecodeStyle(inner)
        added = inner.get_added_tokens_decoder()
        self._added = {index: (token.content, token.special) for index, token in added.items()}
        self._vocab: dict[str, int] = (
            inner.get_vocab(with_added_tokens=True)
            if pieces is None
            else {piece: index for index, piece in enumerate(pieces)}
        )
        self.vocab_size: Final[int] = max(self._vocab.values(), default=-1) + 1
        self.special_tokens: Final[dict[str, str]] = dict(special_tokens)
        self.special_ids: Final[frozenset[int]] = frozenset(
            index for index, (_, is_special) in self._added.items() if is_special
        )
        self.bos_token_id: Final[int | None] = self._id_of_special("bos_token")
        self.eos_token_id: Final[int | None] = self._id_of_special("eos_token")
        self._prefix = [self.bos_token_id] if has_bos and self.bos_token_id is not None else []
        self._suffix = [self.eos_token_id] if has_eos and self.eos_token_id is not None else []
        self._tokens = [""] * self.vocab_size
        for token, index in self._vocab.items():
            self._tokens[index] = token
        self._pieces: list[bytes | None] = [None] * self.vocab_size
        self.longest_piece_chars: Final[int] = max(map(len, self._tokens), default=1)
        has_greedy_token = any(token.lstrip or token.rstrip for token in added.values())  # one takes any run of spaces
        self._shrinkage = None if has_greedy_token else _shrinkage(inner, self._style)

    @classmethod
    def from_files(cls, files: Mapping[str, Path]) -> Tokenizer:
        """Reads ``tokenizer.json``, else ``tokenizer.model`` (SentencePiece), else ``tekken.json``.

        Names of special tokens come from ``special_tokens_map.json`` and ``tokenizer_config.json`` where present.

        Raises:
            ModelFormatError: a file is missing, too large or malformed.
            ModelUnsupportedError: the tokenizer writes text in a way that this build does not read.
        """
        configs: dict[str, object] = {}
        special: dict[str, str] = {}
        for name in ("special_tokens_map.json", "tokenizer_config.json"):
            if name in files:
                config = read_json_object(files[name])
                special |= _read_special_tokens(config)
                configs |= config
        if (path := files.get("tokenizer.json")) is not None:
            text = _read_text(path, MAX_TOKENIZER_JSON_BYTES)
            try:
                inner = tokenizers.Tokenizer.from_str(text)
            except Exception as fault:  # the library's only error class
                raise ModelFormatError(f"{path}: not a tokenizer that this build reads: {fault}") from fault
            return cls(inner, special_tokens=special)
        if (path := files.get("tokenizer.model")) is not None:
            vocabulary = build_sentencepiece(_read_bytes(path, MAX_TOKENIZER_JSON_BYTES), str(path))
        elif (path := files.get("tekken.json")) is not None:
            vocabulary = build_tekken(_read_bytes(path, MAX_TOKENIZER_JSON_BYTES), str(path))
        else:
            raise ModelFormatError(
                "the model has no tokenizer.json, tokenizer.model or tekken.json",
                hint="put the tokenizer's files beside the weights",
            )
        return cls._from_vocabulary(
            replace(
                vocabulary,
                special_tokens=vocabulary.special_tokens | special,
                has_bos=_flag(configs, "add_bos_token", default=vocabulary.has_bos),
                has_eos=_flag(configs, "add_eos_token", default=vocabulary.has_eos),
            )
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object]) -> Tokenizer:
        """Builds the tokenizer from a GGUF file's key-value pairs.

        Raises:
            ModelFormatError, ModelUnsupportedError: see ``gguf_vocab.build_gguf_vocab``.
        """
        return cls._from_vocabulary(build_gguf_vocab(metadata))

    @classmethod
    def _from_vocabulary(cls, vocabulary: Vocabulary) -> Tokenizer:
        return cls(
            vocabulary.tokenizer,
            special_tokens=vocabulary.special_tokens,
            has_bos=vocabulary.has_bos,
            has_eos=vocabulary.has_eos,
            pieces=vocabulary.pieces,
        )

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        """Gives the token ids of ``text``; special tokens written in it are recognised, as transformers does.

        Args:
            add_special: put the model's own BOS (and EOS) around it, as for a raw prompt. A rendered chat template
                has its own and is encoded without.

        Raises:
            RequestError: ``text`` holds lone surrogates.
        """
        if not is_unicode(text):
            raise RequestError("the text is not valid Unicode: it holds half a surrogate pair", code="invalid_utf8")
        if len(text) <= _SHORT_CHARS:
            encoding = self._inner.encode(text, add_special_tokens=add_special)
        else:  # the library's plain `encode` keeps every other thread waiting for its whole length; a batch does not
            (encoding,) = self._inner.encode_batch_fast([text], add_special_tokens=add_special)
        ids: list[int] = encoding.ids
        return [*self._prefix, *ids, *self._suffix] if add_special else ids

    def encode_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Gives the ids of ``text`` with the model's own special ones, and where each token stands: [start, stop).

        Raises:
            RequestError: ``text`` holds lone surrogates.
        """
        if not is_unicode(text):
            raise RequestError("the text is not valid Unicode: it holds half a surrogate pair", code="invalid_utf8")
        encoding = self._inner.encode(text, add_special_tokens=True)
        around = [(0, 0)]
        spans = [*around * len(self._prefix), *encoding.offsets, *around * len(self._suffix)]
        return [*self._prefix, *encoding.ids, *self._suffix], spans

    def mask_token_id(self) -> int | None:
        """Gives the id of the token that hides another one, None where the model has none."""
        return self._id_of_special("mask_token")

    def encode_start(self, text: str, limit_tokens: int) -> list[int]:
        """Gives at most ``limit_tokens`` ids of the text's beginning, the model's own BOS and EOS among them.

        Raises:
            RequestError: ``text`` holds lone surrogates.
        """
        start = text[: _WORDY_CHARS * max(limit_tokens, 256)]
        if not is_unicode(start):
            raise RequestError("the text is not valid Unicode: it holds half a surrogate pair", code="invalid_utf8")
        encoding = self._inner.encode(start, add_special_tokens=False)
        num_special = self._inner.num_special_tokens_to_add(False) + len(self._prefix) + len(self._suffix)
        encoding.truncate(max(0, limit_tokens - num_special))
        ids: list[int] = self._inner.post_process(encoding, add_special_tokens=True).ids
        return [*self._prefix, *ids, *self._suffix]

    def encode_pair(self, first: str, second: str, limit_tokens: int, *, is_cut: bool) -> tuple[list[int], int]:
        """Gives the ids of two texts as the model takes them together, and where token type 1 begins (the second text).

        Args:
            limit_tokens: the most tokens that are of use.
            is_cut: the second text, and only then the first, loses its end until they fit. Without, what lies far
                beyond the limit is left out, and more than ``limit_tokens`` ids tell that they do not fit.

        Raises:
            RequestError: a text holds lone surrogates.
        """
        start = _WORDY_CHARS * max(limit_tokens, 256)
        if not (is_unicode(first[:start]) and is_unicode(second[:start])):
            raise RequestError("the text is not valid Unicode: it holds half a surrogate pair", code="invalid_utf8")
        head = self._inner.encode(first[:start], add_special_tokens=False)
        tail = self._inner.encode(second[:start], add_special_tokens=False)
        if is_cut:
            room = max(0, limit_tokens - self._inner.num_special_tokens_to_add(True))
            head.truncate(room)
            tail.truncate(room - len(head.ids))
        encoding = self._inner.post_process(head, tail, add_special_tokens=True)
        ids: list[int] = encoding.ids
        types: list[int] = encoding.type_ids
        return ids, types.index(1) if 1 in types else len(ids)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True, is_text_start: bool = True) -> str:
        """Gives the text of ``ids``; bytes that are no UTF-8 become U+FFFD, unknown ids nothing.

        Args:
            is_text_start: drop the space that a SentencePiece-like vocabulary puts before a text's first word.
        """
        pieces = [self.token_bytes(index) for index in ids if not (skip_special and index in self.special_ids)]
        text = b"".join(pieces).decode("utf-8", "replace")
        return text[1:] if is_text_start and self.has_space_prefix and text.startswith(" ") else text

    def token_bytes(self, index: int) -> bytes:
        """Gives the exact bytes of one token, special ones written out; nothing for an id outside the vocabulary."""
        if not 0 <= index < self.vocab_size:
            return b""
        piece = self._pieces[index]
        if piece is None:  # worked out on first use: a start need not wait for the whole table
            added = self._added.get(index)
            piece = self._style.to_bytes(self._tokens[index]) if added is None else self._style.of_added(added[0])
            self._pieces[index] = piece
        return piece

    def token_text(self, index: int) -> str:
        """Gives a token as the vocabulary writes it (`Ġthe`); nothing for an id outside of it."""
        if not 0 <= index < self.vocab_size:
            return ""
        added = self._added.get(index)
        return self._tokens[index] if added is None else added[0]

    def token_id(self, token: str) -> int | None:
        """Gives the id of a token by its written form, or None."""
        return self._vocab.get(token)

    @property
    def has_space_prefix(self) -> bool:
        """Whether encoding puts a space before a text's first word, which decoding a whole text takes away again."""
        return self._style.has_space_prefix

    def least_tokens(self, text: str) -> int:
        """Gives a number of tokens that ``text`` certainly has at least, without encoding it. Cost: O(1)."""
        if self._shrinkage is None:
            return 0
        # A token never stands for more characters than it is written with.
        return -(-len(text) // (self.longest_piece_chars * self._shrinkage))

    def encode_within(self, text: str, *, add_special: bool, limit_tokens: int, param: str) -> list[int]:
        """Encodes ``text`` as ``encode`` does, but spends little on one that cannot fit.

        Args:
            limit_tokens: the most tokens that are of use: the model's context.
            param: the request's field, for the error.

        Raises:
            ContextLengthError: it has more than ``limit_tokens`` tokens, or over ``_MAX_CHARS`` characters and more
                than ``_WORDY_CHARS`` for each of these tokens.
            RequestError: see ``encode``.

        Cost: at worst 4 µs a character (emoji) for 8 characters a token, then 1 µs (one endless word or blank).
        """
        if self.least_tokens(text) > limit_tokens:
            raise _too_long(text, self.least_tokens(text), limit_tokens, param)
        if len(text) > max(_MAX_CHARS, _WORDY_CHARS * limit_tokens):
            raise RequestError(
                f"{param} has {len(text)} characters, which takes too long to turn into tokens: "
                f"the limit is {max(_MAX_CHARS, _WORDY_CHARS * limit_tokens)}",
                param=param,
                code="prompt_too_expensive",
            )
        # A text with many tokens shows it early. Its beginning may be cut in the middle of a word and then have a few
        # tokens more than it has in the whole text, which the slack allows for.
        num_chars = _WORDY_CHARS * max(limit_tokens, 256)
        while num_chars < len(text) // 2:
            num_tokens = len(self.encode(text[:num_chars], add_special=False))
            if num_tokens > limit_tokens * _CUT_SLACK + 64:
                raise _too_long(text, num_tokens, limit_tokens, param)
            num_chars *= 4
        ids = self.encode(text, add_special=add_special)
        if len(ids) > limit_tokens:
            raise _too_long(text, len(ids), limit_tokens, param)
        return ids

    def _id_of_special(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self._vocab.get(token)


def _too_long(text: str, num_tokens: int, limit_tokens: int, param: str) -> ContextLengthError:
    return ContextLengthError(
        f"This model's maximum context length is {limit_tokens} tokens. However, your {param} is too "
        f"large, at least {num_tokens} tokens in {len(text)} characters. Please reduce the length of the input prompt.",
        param=param,
    )


class _DecodeStyle:
    """How a vocabulary writes text, read from its tokenizer's decoder."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        state = {} if inner.decoder is None else json.loads(inner.decoder.__getstate__())
        steps = state.get("decoders", [state]) if state else []
        kinds = {step.get("type") for step in steps}
        self.is_byte_level = "ByteLevel" in kinds
        self.is_space_marked = not self.is_byte_level and (
            "Metaspace" in kinds
            or any(step.get("type") == "Replace" and SPACE_MARK in str(step.get("pattern")) for step in steps)
        )
        self.is_word_piece = "WordPiece" in kinds
        has_marked_prefix = any(
            (step.get("type") == "Strip" and step.get("start", 0) > 0)
            or (step.get("type") == "Metaspace" and step.get("prepend_scheme") != "never")
            for step in steps
        )
        self.has_space_prefix = self.is_word_piece or not steps or (self.is_space_marked and has_marked_prefix)
        if not (self.is_byte_level or self.is_space_marked or self.is_word_piece or not steps):
            raise ModelUnsupportedError(
                f"the tokenizer's decoder is {', '.join(sorted(str(kind) for kind in kinds))}; this build reads "
                "ByteLevel, Metaspace, ByteFallback with Replace, and WordPiece"
            )

    def of_added(self, content: str) -> bytes:
        """Gives the bytes of a token that is recognised in text: itself, but for marked spaces."""
        return (content.replace(SPACE_MARK, " ") if self.is_space_marked else content).encode("utf-8")

    def to_bytes(self, piece: str) -> bytes:
        if self.is_byte_level:
            try:
                return bytes([BYTE_OF_CHAR[char] for char in piece])
            except KeyError:  # a piece outside the byte alphabet stands for itself
                return piece.encode("utf-8")
        if self.is_space_marked:
            byte = byte_of_token(piece)
            return piece.replace(SPACE_MARK, " ").encode("utf-8") if byte is None else bytes([byte])
        if self.is_word_piece and piece.startswith("##"):
            return piece[2:].encode("utf-8")
        return b" " + piece.encode("utf-8")


def _shrinkage(inner: tokenizers.Tokenizer, style: _DecodeStyle) -> int | None:
    """How many characters of a text one character of a token may stand for at most; None where there is no bound."""
    if not (style.is_byte_level or getattr(inner.model, "byte_fallback", False)):
        return None  # an unknown word of any length may become one <unk>
    state = {} if inner.normalizer is None else json.loads(inner.normalizer.__getstate__())
    steps = state.get("normalizers", [state]) if state else []
    shrinkage = 1
    for step in steps:
        match step.get("type"):
            case "NFC":
                shrinkage = _NFC_SHRINKAGE
            case "Prepend":
                pass
            case "Replace" if step.get("content") == SPACE_MARK:
                pass
            case _:  # may delete text
                return None
    return shrinkage


def read_json_object(path: Path) -> dict[str, object]:
    """Reads a small JSON file that must hold an object.

    Raises:
        ModelFormatError: missing, too large, not JSON, or not an object.
    """
    try:
        value = json.loads(_read_text(path, MAX_CONFIG_JSON_BYTES))
    except (ValueError, RecursionError) as fault:
        raise ModelFormatError(f"{path}: not JSON: {fault}") from fault
    if not isinstance(value, dict):
        raise ModelFormatError(f"{path}: holds {type(value).__name__}, it must be an object")
    return value


def _read_text(path: Path, limit_bytes: int) -> str:
    try:
        return _read_bytes(path, limit_bytes).decode("utf-8")
    except UnicodeDecodeError as fault:
        raise ModelFormatError(f"{path}: cannot be read: {fault}") from fault


def _read_bytes(path: Path, limit_bytes: int) -> bytes:
    try:
        size = path.stat().st_size
        if size > limit_bytes:
            raise ModelFormatError(f"{path}: has {size} bytes, the limit is {limit_bytes}")
        return path.read_bytes()
    except OSError as fault:
        raise ModelFormatError(f"{path}: cannot be read: {fault}") from fault


def _flag(config: Mapping[str, object], name: str, *, default: bool) -> bool:
    value = config.get(name)
    return value if isinstance(value, bool) else default


def _read_special_tokens(config: Mapping[str, object]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in _SPECIAL_NAMES:
        value = config.get(name)
        if isinstance(value, dict):  # transformers' AddedToken, written out
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found
