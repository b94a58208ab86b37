"""Parts a reasoning model's answer into what it thought and what it says.

Thinking stands between two marks at the answer's beginning; where the chat template has written the first mark into
the prompt, the answer begins inside. Blanks around either part are dropped. A mark anywhere else is text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

_BLANK: Final = " \t\r\n"


@dataclass(frozen=True, slots=True)
class Marks:
    """What opens and what closes thinking."""

    opening: str
    closing: str

    @property
    def tokens(self) -> tuple[str, ...]:
        """The special tokens that are part of the marks; Gemma's opening one names its channel behind it."""
        return (self.opening.removesuffix("thought"), self.closing)


THINK_MARKS: Final = Marks("<think>", "</think>")
MISTRAL_MARKS: Final = Marks("[THINK]", "[/THINK]")
GEMMA_MARKS: Final = Marks("<|channel>thought", "<channel|>")
_KNOWN: Final = (THINK_MARKS, MISTRAL_MARKS, GEMMA_MARKS)


def choose_marks(templates: Sequence[str]) -> Marks | None:
    """Gives the marks that a model's chat templates show, None where the model does not think aloud."""
    text = "\n".join(templates)
    return next((marks for marks in _KNOWN if marks.closing in text or marks.opening in text), None)


class _At(Enum):
    BEGIN = auto()
    THOUGHT = auto()
    GAP = auto()
    ANSWER = auto()


class ReasoningSplitter:
    """Splits one answer.

    Args:
        is_open: the prompt ends inside the thinking.
    """

    def __init__(self, marks: Marks, *, is_open: bool) -> None:
        self._marks = marks
        self._at = _At.THOUGHT if is_open else _At.BEGIN
        self._has_thought = False
        self._buffer = ""

    @property
    def is_thinking(self) -> bool:
        """Whether the thinking has begun and not ended."""
        return self._at is _At.THOUGHT

    @property
    def may_think(self) -> bool:
        """Whether the thinking goes on or may still begin."""
        return self._at in (_At.BEGIN, _At.THOUGHT)

    def push(self, text: str) -> tuple[str, str]:
        """Takes text; gives the thought and the answer that are now certain."""
        self._buffer += text
        thoughts: list[str] = []
        answers: list[str] = []
        while self._buffer and self._step(thoughts, answers):
            pass
        return "".join(thoughts), "".join(answers)

    def flush(self) -> tuple[str, str]:
        """Ends the answer."""
        rest, self._buffer = self._buffer, ""
        match self._at:
            case _At.THOUGHT:
                return rest.rstrip(_BLANK), ""
            case _At.GAP:
                return "", ""
            case _:
                return "", rest

    def _step(self, thoughts: list[str], answers: list[str]) -> bool:
        text = self._buffer
        opening, closing = self._marks.opening, self._marks.closing
        match self._at:
            case _At.BEGIN:
                bare = text.lstrip(_BLANK)
                if bare.startswith(opening):
                    self._buffer = bare[len(opening) :]
                    self._at = _At.THOUGHT
                    return True
                if opening.startswith(bare):  # blanks alone, too
                    return False
                self._at = _At.ANSWER
                return True
            case _At.THOUGHT:
                if not self._has_thought:
                    text = self._buffer = text.lstrip(_BLANK)
                at = text.find(closing)
                if at >= 0:
                    thoughts.append(text[:at].rstrip(_BLANK))
                    self._buffer = text[at + len(closing) :]
                    self._at = _At.GAP
                    return True
                hold = next((n for n in range(min(len(closing), len(text)), 0, -1) if text.endswith(closing[:n])), 0)
                certain = text[: len(text) - hold].rstrip(_BLANK)
                self._has_thought |= bool(certain)
                thoughts.append(certain)
                self._buffer = text[len(certain) :]
                return False
            case _At.GAP:
                self._buffer = text.lstrip(_BLANK)
                if self._buffer:
                    self._at = _At.ANSWER
                return bool(self._buffer)
            case _At.ANSWER:
                answers.append(text)
                self._buffer = ""
                return False
