"""What a measurement sends: one ``Sample`` per request or conversation, whatever file it was read from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

TellBad = Callable[[int, str], None]
"""Called with a line's number, from 1, and what is wrong with it."""


class Operation(StrEnum):
    """The endpoint a request goes to."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    EMBEDDINGS = "embeddings"
    RERANK = "rerank"


class OnBad(StrEnum):
    """What a line that is no request does: it is told and left out, or it ends the reading."""

    SKIP = "skip"
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class FollowUp:
    """A later turn of a conversation: sent when the answer before it has come.

    Args:
        content: the user's words.
        delay_s: how long the user takes to write them.
    """

    content: str
    delay_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One request, or a conversation that begins with it.

    Args:
        index: counts the good samples of a file, from 0.
        line: where it stands in the file, from 1; 0 for one that no file holds.
        body: the JSON object to POST, but for ``model``, ``stream`` and ``stream_options``, which the sender sets.
        at_s: when it is to be sent, in seconds from the first one's arrival; None where the data says nothing.
        follow_ups: turns of the same conversation, each sent with the history before it.
    """

    index: int
    line: int
    operation: Operation
    body: Mapping[str, object]
    at_s: float | None = None
    follow_ups: tuple[FollowUp, ...] = ()
