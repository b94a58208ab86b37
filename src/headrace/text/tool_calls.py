"""Parts what a model writes into text and tool calls, as it arrives.

Text that may become a call is held back until it is known; a call is announced as soon as its name is known and its
arguments have begun, and its arguments follow character by character. What is joined at the end does not depend on
how the text was cut. Blanks beside calls are dropped, but for those that part the texts around them; a text without
calls comes out as it came in.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final

from headrace.base.ids import new_id
from headrace.protocol.answers import CallDelta
from headrace.text.call_gemma import GemmaScanner
from headrace.text.call_json import CallScanner, RawValue
from headrace.text.tool_format import ToolFormat

_BLANK: Final = " \t\r\n"
_FENCE: Final = "```"
_NAME_CHARS: Final = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-")

Item = str | CallDelta


class _At(Enum):
    """Where in the text the reader is."""

    BEGIN = auto()  # nothing but blanks so far
    TEXT = auto()
    OPEN = auto()  # behind a mark that begins calls
    NAME = auto()  # in a bare name
    ITEM = auto()  # before the next call of a list
    CALL = auto()
    AFTER = auto()  # behind a call
    CLOSE = auto()  # before the mark that ends calls


class _NamedScanner:
    """The arguments of a call whose name stood before them."""

    def __init__(self, name: str) -> None:
        self.name: str | None = name
        self.is_done = False
        self.is_broken = False
        self.is_certain = False
        self._raw = RawValue()
        self._parts: list[str] = []

    def take(self) -> str:
        text = "".join(self._parts)
        self._parts.clear()
        return text

    def push(self, char: str) -> None:
        self.is_certain = True
        self._parts.append(char)
        self.is_done = self._raw.push(char)
        self.is_broken = self._raw.is_broken


class CallReader:
    """Reads one answer.

    Args:
        form: how the model writes calls.
        names: the tools' names: bare JSON is a call only where it names one of them.
        is_forced: a grammar made the answer: it begins with the calls themselves.
        has_text: false where that grammar lets nothing but calls through: what a limit left of a call that was not
            announced yet is no text.
        max_calls: further calls are dropped.
    """

    def __init__(
        self,
        form: ToolFormat,
        names: frozenset[str],
        *,
        is_forced: bool = False,
        has_text: bool = True,
        max_calls: int | None = None,
    ) -> None:
        self.num_calls = 0
        self._form = form
        self._names = names
        self._is_forced = is_forced
        self._has_bare = form.has_bare_calls or is_forced
        self._may_say = has_text
        self._max_calls = max_calls
        self._at = _At.BEGIN
        self._buffer = ""
        self._blank = ""  # blanks held behind the last text
        self._gap = ""  # blanks between text and a call, said where more text follows
        self._raw: list[str] = []  # what was read since the mark, to be said as text where it was no call
        self._has_text = False
        self._closer = ""
        self._is_list = False
        self._is_bare = False
        self._name = ""
        self._scanner: CallScanner | GemmaScanner | _NamedScanner = CallScanner()
        self._is_announced = False
        self._has_calls_here = False
        self._items: list[Item] = []

    def push(self, text: str) -> list[Item]:
        """Takes text; gives what is now certain, in order."""
        self._buffer += text
        while self._buffer and self._step():
            pass
        return self._take()

    def flush(self) -> list[Item]:
        """Ends the answer; a call that is not whole stays as far as it came."""
        if self._at in (_At.BEGIN, _At.TEXT):
            self._say(self._buffer)
            if not self.num_calls:
                self._items.append(self._blank)
        elif self._at is _At.NAME and self._name_in(self._buffer) in self._names:
            self._begin_call(_NamedScanner(self._name_in(self._buffer)))
            self._announce("{}")  # a name alone is a call without arguments
        elif not self._has_calls_here and not self._is_announced:
            self._say("".join(self._raw) + self._buffer)
            self._items.append("" if self.num_calls else self._blank)
        elif self._at is _At.CALL:
            self._take_arguments()
        self._buffer = ""
        return self._take()

    def _take(self) -> list[Item]:
        """Gives the items, neighbouring texts joined."""
        items: list[Item] = []
        for item in self._items:
            if isinstance(item, str) and items and isinstance(items[-1], str):
                items[-1] += item
            elif item and (self._may_say or not isinstance(item, str)):
                items.append(item)
        self._items = []
        return items

    def _say(self, text: str) -> None:
        """Says text, holding back the blanks at its end."""
        text = self._blank + text
        bare = text.rstrip(_BLANK)
        self._blank = text[len(bare) :]
        if bare:
            self._items.append(self._gap + bare)
            self._gap = ""
            self._has_text = True

    def _step(self) -> bool:
        """Takes as much of the buffer as is certain; gives whether it could."""
        match self._at:
            case _At.BEGIN:
                return self._begin()
            case _At.TEXT:
                return self._text()
            case _At.CLOSE:
                return self._close()
            case _At.OPEN if self._form.quote and not self._is_forced:
                self._begin_call(GemmaScanner(self._form.quote))
                return True
            case _At.CALL:
                return self._call()
            case _At.OPEN if not self._is_bare and self._skip_opener():
                return True
            case _At.OPEN if not self._is_bare and self._may_open_again():
                return False
            case _:
                return self._between()

    def _skip_opener(self) -> bool:
        """Takes a mark that stands right behind another one, as small models write it."""
        text = self._buffer.lstrip(_BLANK)
        opener = next((opener for opener in self._form.openers if text.startswith(opener)), None)
        if opener is None:
            return False
        self._raw.append(self._buffer[: len(self._buffer) - len(text) + len(opener)])
        self._buffer = text[len(opener) :]
        return True

    def _may_open_again(self) -> bool:
        text = self._buffer.lstrip(_BLANK)
        return bool(text) and any(opener.startswith(text) for opener in self._form.openers)

    def _begin(self) -> bool:
        text = self._buffer.lstrip(_BLANK)
        self._blank += self._buffer[: len(self._buffer) - len(text)]
        self._buffer = text
        if not text:
            return False
        if self._has_bare and text[0] in "{[":
            self._open_body("", is_bare=True)
            return True
        if self._has_bare and (text.startswith(_FENCE) or _FENCE.startswith(text)):
            line, found, _ = text.partition("\n")
            if not found and len(line) < len(_FENCE) + 16 and (_FENCE + "json").startswith(line[: len(_FENCE) + 4]):
                return False
            if found and len(line) < len(_FENCE) + 16 and line.strip() in (_FENCE, _FENCE + "json"):
                self._raw = [line + "\n"]
                self._buffer = text[len(line) + 1 :]
                self._open_body(_FENCE, is_bare=True, keep_raw=True)
                return True
        self._at = _At.TEXT
        return True

    def _open_body(self, closer: str, *, is_bare: bool, keep_raw: bool = False) -> None:
        if not keep_raw:
            self._raw = []
        self._at = _At.OPEN
        self._closer = closer
        self._is_list = False
        self._is_bare = is_bare
        self._has_calls_here = False
        self._is_announced = False

    def _text(self) -> bool:
        text = self._buffer
        found = [(at, opener) for opener in self._form.openers if (at := text.find(opener)) >= 0]
        bare = text.find("{") if self._form.has_inner_calls else -1
        if bare >= 0 and (not found or bare < min(found)[0]):
            self._say(text[:bare])
            self._buffer = text[bare:]
            self._open_body("", is_bare=True)
            return True
        if found:
            at, opener = min(found)
            self._say(text[:at])
            self._buffer = text[at + len(opener) :]
            self._open_body(self._form.openers[opener], is_bare=False)
            self._raw = [opener]
            return True
        hold = max(_overlap(text, opener) for opener in self._form.openers)
        self._say(text[: len(text) - hold])
        self._buffer = text[len(text) - hold :]
        return False

    def _between(self) -> bool:
        char = self._buffer[0]
        if self._at is _At.NAME:
            return self._bare_name()
        self._buffer = self._buffer[1:]
        self._raw.append(char)
        if char in _BLANK:
            return True
        match self._at:
            case _At.OPEN if char == "[" and not self._is_list:
                self._is_list = True
                self._at = _At.ITEM
            case _At.OPEN | _At.ITEM if char == "{":
                self._begin_call(CallScanner(self._names if self._is_bare else None))
                self._scanner.push(char)
            case _At.OPEN if self._form.has_names and char in _NAME_CHARS:
                self._at = _At.NAME
                self._name = char
            case _At.AFTER if char == "{":
                self._begin_call(CallScanner(self._names if self._is_bare else None))
                self._scanner.push(char)
            case _At.AFTER if self._is_list and char == "]":
                self._at = _At.CLOSE
            case _At.AFTER if char == "," or (char == ";" and not self._is_list):
                self._at = _At.ITEM
            case _At.AFTER:
                self._unread(char)
                self._at = _At.CLOSE
            case _:
                self._give_up(char)
        return True

    def _bare_name(self) -> bool:
        """Mistral's newer form: ``name{…}`` or ``name[CALL_ID]id[ARGS]{…}``."""
        text = self._buffer
        at = text.find("{")
        head = text if at < 0 else text[:at]
        if not all(char in _NAME_CHARS or char in "[] " for char in head) or len(head) > 256:
            self._raw.append(text)
            self._buffer = ""
            self._give_up("")
            return True
        if at < 0:
            return False
        self._raw.append(head)
        self._buffer = text[at:]
        self._begin_call(_NamedScanner(self._name_in(head)))
        return True

    def _name_in(self, head: str) -> str:
        return (self._name + head).partition("[")[0].strip()

    def _begin_call(self, scanner: CallScanner | GemmaScanner | _NamedScanner) -> None:
        self._scanner = scanner
        self._is_announced = False
        self._at = _At.CALL

    def _call(self) -> bool:
        scanner = self._scanner
        count = 0
        for char in self._buffer:
            scanner.push(char)
            count += 1
            if scanner.is_done or scanner.is_broken:
                break
        self._raw.append(self._buffer[:count])
        self._buffer = self._buffer[count:]
        if scanner.is_broken and not self._is_announced:
            self._give_up("")
            return True
        self._take_arguments()
        if scanner.is_done or scanner.is_broken:
            self._has_calls_here = True
            self._raw = []
            self._at = _At.AFTER
        return True

    def _take_arguments(self) -> None:
        scanner = self._scanner
        if not scanner.is_certain and not self._is_announced:
            return
        self._announce(scanner.take())

    def _announce(self, arguments: str) -> None:
        if not self._is_announced:
            self._is_announced = True
            self.num_calls += 1
            self._gap = self._gap or (self._blank if self._has_text else "")
            self._blank = ""
            if self._is_counted():
                self._items.append(CallDelta(self.num_calls - 1, new_id("call"), self._scanner.name, ""))
        if arguments and self._is_counted():
            self._items.append(CallDelta(self.num_calls - 1, None, None, arguments))

    def _is_counted(self) -> bool:
        return self._max_calls is None or self.num_calls <= self._max_calls

    def _close(self) -> bool:
        text = self._buffer.lstrip(_BLANK)
        if not text:
            self._buffer = ""
            return False
        if self._closer and text.startswith(self._closer):
            self._buffer = text[len(self._closer) :]
        elif self._closer and self._closer.startswith(text):
            return False
        self._at = _At.TEXT
        return True

    def _unread(self, char: str) -> None:
        self._raw.pop()
        self._buffer = char + self._buffer

    def _give_up(self, char: str) -> None:
        """What looked like a call is none: where none was announced since the mark, it is text."""
        if self._has_calls_here:
            self._buffer = char + self._buffer
        else:
            self._say("".join(self._raw))
        self._raw = []
        self._at = _At.TEXT


def _overlap(text: str, mark: str) -> int:
    """How many characters at the end of ``text`` may be the beginning of ``mark``."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)
