"""An assistant's message out of what a model writes: thoughts, text and tool calls, in the order they come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.protocol.answers import CallDelta, Thought
from headrace.protocol.tool_use import ToolUse, name_of
from headrace.text.reasoning import Marks, ReasoningSplitter, choose_marks
from headrace.text.tool_calls import CallReader
from headrace.text.tool_format import ToolFormat, choose_format

Item = Thought | str | CallDelta


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a model writes messages. ``marks`` is None where it does not think aloud."""

    form: ToolFormat
    marks: Marks | None

    @classmethod
    def of(cls, templates: Sequence[str]) -> Dialect:
        """Reads it from the model's chat templates."""
        return cls(choose_format(templates), choose_marks(templates))

    def is_thinking(self, prompt: str) -> bool:
        """Whether a prompt ends inside the model's thinking."""
        return self.marks is not None and prompt.rstrip().endswith(self.marks.opening)


class MessageReader:
    """Reads one message.

    Args:
        use: the tools that may be called, or None.
        is_forced: a grammar made the answer, from its first token: it holds no thoughts.
        is_thinking: the prompt ends inside the thinking.
        has_thoughts: thoughts are given; else they are dropped.
    """

    def __init__(
        self,
        dialect: Dialect,
        use: ToolUse | None,
        *,
        is_forced: bool,
        is_thinking: bool,
        has_thoughts: bool = True,
    ) -> None:
        self._has_thoughts = has_thoughts
        self._splitter: ReasoningSplitter | None = None
        if dialect.marks is not None and not is_forced:
            self._splitter = ReasoningSplitter(dialect.marks, is_open=is_thinking)
        self._calls: CallReader | None = None
        if use is not None:
            names = frozenset(map(name_of, use.tools))
            max_calls = None if use.is_parallel else 1
            self._calls = CallReader(
                dialect.form, names, is_forced=is_forced, has_text=not use.is_forced, max_calls=max_calls
            )

    @property
    def has_calls(self) -> bool:
        """Whether a call has begun."""
        return self._calls is not None and self._calls.num_calls > 0

    @property
    def is_thinking(self) -> bool:
        """Whether what was pushed last belongs to the thinking, its marks included."""
        return self._splitter is not None and self._splitter.is_thinking

    @property
    def may_think(self) -> bool:
        """Whether thinking goes on or may still begin."""
        return self._splitter is not None and self._splitter.may_think

    def push(self, text: str) -> list[Item]:
        """Takes text; gives what is now certain."""
        if self._splitter is None:
            return self._answer(text)
        thought, answer = self._splitter.push(text)
        return [*self._thought(thought), *self._answer(answer)]

    def flush(self) -> list[Item]:
        """Ends the message."""
        items: list[Item] = []
        if self._splitter is not None:
            thought, answer = self._splitter.flush()
            items += [*self._thought(thought), *self._answer(answer)]
        if self._calls is not None:
            items += self._calls.flush()
        return items

    def _thought(self, text: str) -> list[Item]:
        return [Thought(text)] if text and self._has_thoughts else []

    def _answer(self, text: str) -> list[Item]:
        if not text:
            return []
        return list(self._calls.push(text)) if self._calls is not None else [text]
