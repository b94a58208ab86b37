"""Gemma's calls, ``call:name{key:<escape>text<escape>,other:1}``, turned into JSON arguments as they arrive.

Keys are bare, texts stand between two marks, everything else is as in JSON (FunctionGemma's and Gemma 4's model cards).
"""

from __future__ import annotations

import json
from typing import Final

_PREFIX: Final = "call:"
_BLANK: Final = " \t\r\n"


class GemmaScanner:
    """One call; the same shape as ``call_json.CallScanner``.

    Args:
        quote: the mark around texts.
    """

    def __init__(self, quote: str) -> None:
        self.name: str | None = None
        self.is_done = False
        self.is_broken = False
        self._quote = quote
        self._head = ""
        self._closers: list[str] = []
        self._word = ""
        self._is_in_text = False
        self._is_behind_text = False
        self._text = ""
        self._out: list[str] = []

    @property
    def is_certain(self) -> bool:
        """Whether the name is known and the arguments have begun."""
        return self.name is not None and not self.is_broken

    def take(self) -> str:
        """Gives the JSON text of the arguments since the last call."""
        text = "".join(self._out)
        self._out.clear()
        return text

    def push(self, char: str) -> None:
        """Takes the next character."""
        if self.name is None:
            self._push_head(char)
        elif self._is_in_text:
            self._push_text(char)
        else:
            self._push_value(char)

    def _push_head(self, char: str) -> None:
        self._head += char
        if char != "{":
            self.is_broken = not (self._head.startswith(_PREFIX) or _PREFIX.startswith(self._head))
            return
        name = self._head[len(_PREFIX) : -1].strip()
        if not self._head.startswith(_PREFIX) or not name:
            self.is_broken = True
            return
        self.name = name
        self._closers = ["}"]
        self._out.append("{")

    def _push_text(self, char: str) -> None:
        self._text += char
        if self._text.endswith(self._quote):
            self._out.append(_escaped(self._text[: -len(self._quote)]) + '"')
            self._text = ""
            self._is_in_text = False
            self._is_behind_text = True
            return
        keep = next(n for n in range(min(len(self._quote), len(self._text)), -1, -1) if self._ends_with(n))
        self._out.append(_escaped(self._text[: len(self._text) - keep]))
        self._text = self._text[len(self._text) - keep :]

    def _ends_with(self, count: int) -> bool:
        return self._text.endswith(self._quote[:count])

    def _push_value(self, char: str) -> None:
        word = self._word + char
        if self._quote.startswith(word):
            self._word = word
            if word == self._quote:
                self._word = ""
                self._is_in_text = True
                self._out.append('"')
        elif char == ":" and self._closers[-1] == "}":
            is_quoted = self._is_behind_text and not self._word.strip()  # some write keys as texts
            self._out.append(":" if is_quoted else f"{json.dumps(self._word.strip(), ensure_ascii=False)}:")
            self._word = ""
            self._is_behind_text = False
        elif char in "{[":
            self._closers.append("}" if char == "{" else "]")
            self._out.append(char)
        elif char in ",}]":
            self._end_word()
            self._is_behind_text = False
            self._out.append(char)
            if char != ",":
                self.is_broken = self._closers.pop() != char
                self.is_done = not self._closers
        elif self._word or char not in _BLANK:
            self._word = word

    def _end_word(self) -> None:
        word, self._word = self._word.strip(), ""
        if not word:
            return
        try:
            json.loads(word)
        except ValueError:
            word = json.dumps(word, ensure_ascii=False)
        self._out.append(word)


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
