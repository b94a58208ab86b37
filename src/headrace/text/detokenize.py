"""Token ids to text as they arrive: nothing is shown before its last byte is there, and nothing is shown twice.

The joined output of a Detokenizer equals ``Tokenizer.decode`` of all ids, however they were split over calls. Tokens
are turned into bytes and the bytes run through one UTF-8 state machine, so a token costs the same at any length.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from headrace.text.tokenizer import Tokenizer

_new_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of one generation, piece by piece.

    Args:
        tokenizer: whose ids arrive.
        skip_special: leave special tokens out of the text.
        is_text_start: the ids begin a text of their own, as a chat answer does: the space that a SentencePiece-like
            vocabulary writes before a first word is dropped. A completion goes on from its prompt and keeps it.
        kept_ids: special tokens that stay in the text all the same.

    Cost: about 1 µs a token.
    """

    __slots__ = ("_decoder", "_has_prefix_ahead", "_skipped", "_tokenizer")

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special: bool = True,
        is_text_start: bool = True,
        kept_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special else frozenset[int]()
        if kept_ids & self._skipped:
            self._skipped -= kept_ids
        self._has_prefix_ahead = is_text_start and tokenizer.has_space_prefix
        self._decoder = _new_utf8_decoder("replace")

    def push(self, ids: Iterable[int]) -> str:
        """Takes further ids and gives the text that is now certain; bytes of an unfinished character wait."""
        token_bytes, skipped = self._tokenizer.token_bytes, self._skipped
        data = b"".join([token_bytes(index) for index in ids if index not in skipped])
        if self._has_prefix_ahead and data:
            self._has_prefix_ahead = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def flush(self) -> str:
        """Ends the text: gives U+FFFD for an unfinished character, else nothing."""
        return self._decoder.decode(b"", final=True)
