"""Reads one JSON object that is a tool call, as it arrives: its name, then its arguments piece by piece.

``{"name": "f", "arguments": {…}}`` and its relatives: the keys in any order, ``parameters`` for ``arguments``, the
arguments as an object or as JSON inside a string, everything inside a ``function`` object. What comes out depends on
the characters alone and not on how they were cut.
"""

from __future__ import annotations

import json
from enum import Enum, auto
from typing import Final

_BLANK: Final = " \t\r\n"
_OPENERS: Final = {"{": "}", "[": "]"}
_CALL_KEYS: Final = ("name", "function", "arguments", "parameters", "type", "id")
_ESCAPES: Final = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}


class _At(Enum):
    """What the next character belongs to."""

    START = auto()
    KEY_OR_END = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    TEXT = auto()
    NESTED = auto()
    LITERAL = auto()
    AFTER_VALUE = auto()


class RawValue:
    """Follows one JSON object or list to its closing bracket, looking at nothing but brackets and strings."""

    def __init__(self) -> None:
        self._closers: list[str] = []
        self._is_in_text = False
        self._is_escaped = False
        self.is_broken = False

    def push(self, char: str) -> bool:
        """Takes a character; gives whether the value is complete with it. Sets ``is_broken`` on a wrong bracket."""
        if self._is_in_text:
            if self._is_escaped:
                self._is_escaped = False
            elif char == "\\":
                self._is_escaped = True
            elif char == '"':
                self._is_in_text = False
        elif char == '"':
            self._is_in_text = True
        elif char in _OPENERS:
            self._closers.append(_OPENERS[char])
        elif char in "}]":
            if not self._closers or self._closers.pop() != char:
                self.is_broken = True
            return not self._closers
        return False


class _TextValue:
    """A JSON string, decoded as it arrives."""

    def __init__(self) -> None:
        self._escape = ""
        self._high = ""

    def push(self, char: str) -> str | None:
        """Takes a character behind the opening quote; gives the decoded text, None at the closing quote."""
        if not self._escape:
            if char == '"':
                return None
            if char == "\\":
                self._escape = char
                return ""
            return char
        self._escape += char
        if self._escape[1] != "u":
            self._escape = ""
            return _ESCAPES.get(char, char)
        if len(self._escape) < 6:
            return ""
        digits, self._escape = self._escape[2:], ""
        try:
            code = int(digits, 16)
        except ValueError:
            return "�"
        if 0xD800 <= code < 0xDC00:
            self._high = chr(code)
            return ""
        if 0xDC00 <= code < 0xE000:
            pair, self._high = self._high + chr(code), ""
            return pair.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return chr(code)


class CallScanner:
    """One call. Push characters until ``is_done`` or ``is_broken``; ``take`` gives the arguments' new text.

    Args:
        names: functions that may be called by bare JSON, which must have arguments too; None takes any name.
    """

    def __init__(self, names: frozenset[str] | None = None) -> None:
        self.name: str | None = None
        self.is_done = False
        self.is_broken = False
        self._names = names
        self._at = _At.START
        self._key = ""
        self._depth = 0
        self._arguments: list[str] = []
        self._has_arguments = False
        self._is_argument = False
        self._text = _TextValue()
        self._letters: list[str] = []
        self._nested = RawValue()

    @property
    def is_certain(self) -> bool:
        """Whether this is a call and can be announced: its name is known and its arguments have begun."""
        return self.name is not None and (self._has_arguments or self.is_done) and not self.is_broken

    def take(self) -> str:
        """Gives the text of the arguments since the last call."""
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def push(self, char: str) -> None:
        """Takes the next character."""
        match self._at:
            case _At.START:
                self._expect(char, {"{": _At.KEY_OR_END})
            case _At.KEY_OR_END:
                if char == '"':
                    self._begin_text(_At.KEY)
                else:
                    self._close_or(char, _At.KEY_OR_END, {",": _At.KEY_OR_END})
            case _At.KEY:
                part = self._text.push(char)
                if part is None:
                    self._key = "".join(self._letters)
                    self._at = _At.COLON
                    # Bare JSON that begins otherwise is an answer, and need not be held back to its end.
                    self.is_broken = self._names is not None and self.name is None and self._key not in _CALL_KEYS
                else:
                    self._letters.append(part)
            case _At.COLON:
                self._expect(char, {":": _At.VALUE})
            case _At.VALUE:
                if char not in _BLANK:
                    self._begin_value(char)
            case _At.TEXT:
                part = self._text.push(char)
                if part is None:
                    self._end_text()
                elif self._is_argument:
                    self._arguments.append(part)
                else:
                    self._letters.append(part)
            case _At.NESTED:
                if self._is_argument:
                    self._arguments.append(char)
                if self._nested.push(char):
                    self.is_broken |= self._nested.is_broken
                    self._at = _At.AFTER_VALUE
            case _At.LITERAL:
                if char in ",}" or char in _BLANK:
                    self._end_literal()
                    self.push(char)
                else:
                    self._letters.append(char)
            case _At.AFTER_VALUE:
                self._close_or(char, _At.AFTER_VALUE, {",": _At.KEY_OR_END})

    def _expect(self, char: str, nexts: dict[str, _At]) -> None:
        if char in nexts:
            self._at = nexts[char]
        elif char not in _BLANK:
            self.is_broken = True

    def _close_or(self, char: str, here: _At, nexts: dict[str, _At]) -> None:
        if char != "}":
            self._expect(char, nexts)
        elif self._depth:
            self._depth -= 1
            self._at = _At.AFTER_VALUE
        else:
            self._end()

    def _begin_text(self, at: _At) -> None:
        self._at = at
        self._text = _TextValue()
        self._letters = []

    def _begin_value(self, char: str) -> None:
        self._is_argument = self._key in ("arguments", "parameters") and not self._has_arguments
        if self._key == "function" and char == "{":
            self._depth += 1
            self._at = _At.KEY_OR_END
        elif char == '"':
            self._begin_text(_At.TEXT)
            self._has_arguments |= self._is_argument
        elif char in _OPENERS:
            self._has_arguments |= self._is_argument
            if self._is_argument:
                self._arguments.append(char)
            self._nested = RawValue()
            self._nested.push(char)
            self._at = _At.NESTED
        else:
            self._letters = [char]
            self._at = _At.LITERAL

    def _end_text(self) -> None:
        self._at = _At.AFTER_VALUE
        if self._key == "name" or (self._key == "function" and self.name is None):
            name = "".join(self._letters)
            if not name or (self._names is not None and name not in self._names):
                self.is_broken = True
            else:
                self.name = name

    def _end_literal(self) -> None:
        self._at = _At.AFTER_VALUE
        text = "".join(self._letters)
        try:
            json.loads(text)
        except ValueError:
            self.is_broken = True
        if self._is_argument and text != "null":
            self._has_arguments = True
            self._arguments.append(text)

    def _end(self) -> None:
        self.is_done = True
        if self.name is None or (self._names is not None and not self._has_arguments):
            self.is_broken = True
        elif not self._has_arguments:
            self._arguments.append("{}")
