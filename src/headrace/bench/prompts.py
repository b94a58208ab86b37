"""Makes prompts of a wanted length out of running text, so that no two requests are alike unless they shall be.

With a tokenizer a prompt has exactly the wanted number of tokens; without one, about that many: English has 1.3 tokens
a word.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.base.errors import ConfigError
from headrace.text.prose import shipped_text

_TOKENS_PER_WORD = 1.3
"""Of the demo model's tokenizer on the shipped text; GPT-like vocabularies of English lie between 1.2 and 1.4."""
_LEAST_WORDS = 64
_ROUNDS = 8
_OPENING_WORDS = 2
_LONGEST_WORD_TOKENS = 4
_KEPT_BLOCKS = 4096


class Counter(Protocol):
    """What is needed of a tokenizer."""

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        """Gives the ids of a text."""
        ...


class PromptMaker:
    """Cuts prompts out of a text.

    Args:
        text: what they are made of; default: the text that ships. Of at least 64 words.
        tokenizer: makes lengths exact; None takes 1.3 tokens a word.

    Raises:
        ConfigError: the text is too short.
    """

    def __init__(self, text: str | None = None, tokenizer: Counter | None = None) -> None:
        self._words = (shipped_text() if text is None else text).split()
        if len(self._words) < _LEAST_WORDS:
            raise ConfigError(f"the text has {len(self._words)} words, at least {_LEAST_WORDS} are needed")
        self._tokenizer = tokenizer
        self._reached = self._running_tokens()
        self._counts: dict[str, int] = {}  # of prefixes, which come again and again
        self._blocks: OrderedDict[tuple[int, int], str] = OrderedDict()

    def prompt(self, num_tokens: int, random: np.random.Generator) -> str:
        """Gives running text from a random place; ``num_tokens`` ≥ 1 counts without special tokens.

        Cost: with a tokenizer two or three encodings.
        """
        return self.extend("", num_tokens, random)

    def extend(self, prefix: str, num_tokens: int, random: np.random.Generator) -> str:
        """Gives ``prefix`` and running text behind it, together of ``num_tokens``.

        Where the prefix alone has as many or more, only one word is added, so that requests still differ.
        """
        start, *opening = (int(place) for place in random.integers(len(self._words), size=1 + _OPENING_WORDS))
        missing = num_tokens - self._count_prefix(prefix)
        if missing >= 2 * _OPENING_WORDS * _LONGEST_WORD_TOKENS:
            # A short text has few places to begin at; words from elsewhere in front keep prompts from being alike.
            words = " ".join(self._words[place] for place in opening)
            prefix = _join(prefix, words)
            missing -= self.count(words)
        if self._tokenizer is None:
            return _join(prefix, self._cut(start, max(1, round(missing / _TOKENS_PER_WORD))))
        return self._extend_exactly(prefix, num_tokens, start, missing)

    def block(self, identity: int, num_tokens: int) -> str:
        """Gives the text that stands for block ``identity`` of a trace: the same text each time it is asked for."""
        key = identity, num_tokens
        if (kept := self._blocks.get(key)) is not None:
            self._blocks.move_to_end(key)
            return kept
        made = self.prompt(num_tokens, np.random.default_rng([identity & 0xFFFF_FFFF, identity >> 32, num_tokens]))
        self._blocks[key] = made
        if len(self._blocks) > _KEPT_BLOCKS:
            self._blocks.popitem(last=False)
        return made

    def count(self, text: str) -> int:
        """Gives the tokens of a text, exact or by words."""
        if self._tokenizer is None:
            return round(len(text.split()) * _TOKENS_PER_WORD)
        return len(self._tokenizer.encode(text, add_special=False))

    def _extend_exactly(self, prefix: str, num_tokens: int, start: int, missing: int) -> str:
        # Words first, as near as whole words come from below; then fillers of one token until the count is met.
        num_words = max(1, self._words_within(start, missing))
        low, high = 0, 0  # words known to fit, and known to be too many (0: not known)
        for _ in range(_ROUNDS):
            found = self.count(_join(prefix, self._cut(start, num_words)))
            if found == num_tokens:
                return _join(prefix, self._cut(start, num_words))
            if found < num_tokens:
                low = max(low, num_words)
            else:
                high = min(high or num_words, num_words)
            if high and high - low <= 1:
                break
            step = round((num_tokens - found) / _TOKENS_PER_WORD) or (1 if found < num_tokens else -1)
            num_words = max(low + 1, min(num_words + step, high - 1) if high else num_words + step)
        text = _join(prefix, self._cut(start, low)) if low else prefix
        if not text:
            return self._cut(start, 1)
        # A letter behind a blank is a token of its own in every vocabulary in use, or joins the one before.
        for filler in (" a", " I", " ,", "."):
            longer = text
            while (lacking := num_tokens - self.count(longer)) > 0 and len(longer) < len(text) + 64:
                longer += filler * lacking
            if self.count(longer) == num_tokens:
                return longer if longer != prefix else _join(prefix, self._cut(start, 1))
        return text if text != prefix else _join(prefix, self._cut(start, 1))

    def _running_tokens(self) -> NDArray[np.float64]:
        """Gives the tokens of the first 0, 1, 2, … words of the text written twice, each word counted by itself."""
        if self._tokenizer is None:
            return np.arange(2 * len(self._words) + 1, dtype=np.float64) * np.float64(_TOKENS_PER_WORD)
        counts = {word: self.count(f"a {word}") for word in set(self._words)}
        base = self.count("a")
        each = np.array([counts[word] - base for word in self._words], np.float64)
        return np.concatenate([[0.0], np.cumsum(np.concatenate([each, each]))])

    def _words_within(self, start: int, num_tokens: float) -> int:
        """Gives how many words from ``start`` on have at most ``num_tokens``, nearly."""
        num_words = len(self._words)
        around, rest = divmod(max(num_tokens, 0), float(self._reached[num_words]))
        stop = int(np.searchsorted(self._reached, self._reached[start] + rest, side="right")) - 1
        return int(around) * num_words + stop - start

    def _count_prefix(self, prefix: str) -> int:
        if not prefix:
            return 0
        if prefix not in self._counts:
            if len(self._counts) >= _KEPT_BLOCKS:
                self._counts.clear()
            self._counts[prefix] = self.count(prefix)
        return self._counts[prefix]

    def _cut(self, start: int, num_words: int) -> str:
        words = self._words
        stop = start + num_words
        if stop <= len(words):
            return " ".join(words[start:stop])
        around, rest = divmod(stop - len(words), len(words))
        return " ".join(words[start:] + words * around + words[:rest])


def _join(prefix: str, text: str) -> str:
    return f"{prefix} {text}" if prefix and text else prefix or text
