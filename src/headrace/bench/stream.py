"""What servers send: events out of bytes that may be cut anywhere, and what of an event or a whole answer we need."""

from __future__ import annotations

from typing import Final

import msgspec

MAX_EVENT_BYTES: Final = 16 * 2**20
DONE: Final = b"[DONE]"
_ABSENT: Final = msgspec.Raw(b"")
_NOTHING: Final = frozenset({b"", b"null", b"[]"})


class EventReader:
    """Cuts server-sent events out of a stream of bytes; comments, names and ids of events are dropped."""

    __slots__ = ("_is_after_return", "_rest")

    def __init__(self) -> None:
        self._rest = b""
        self._is_after_return = False

    def feed(self, data: bytes) -> list[bytes]:
        """Gives the payloads of the events that ``data`` completes.

        Raises:
            ValueError: an event is over ``MAX_EVENT_BYTES``.
        """
        if b"\r" in data or self._is_after_return:
            # A return ends its line at once; a line feed that comes with the next bytes belongs to it.
            if self._is_after_return and data.startswith(b"\n"):
                data = data[1:]
                self._is_after_return = False
            if data:
                self._is_after_return = data.endswith(b"\r")
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        rest = self._rest + data if self._rest else data
        *whole, self._rest = rest.split(b"\n\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise ValueError(f"an event has over {MAX_EVENT_BYTES} bytes")
        payloads = []
        for event in whole:
            if event.startswith(b"data: ") and b"\n" not in event:  # nearly all are like this
                payloads.append(event[6:])
                continue
            lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
            if lines:
                payloads.append(b"\n".join(lines))
        return payloads

    @property
    def rest(self) -> bytes:
        """What has come of an event that is not complete."""
        return self._rest


class _Details(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class Usage(msgspec.Struct, gc=False):
    """Token counts as the server says them."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None

    @property
    def cached_tokens(self) -> int | None:
        """Of the prompt, those that came from a cache."""
        return self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details else None


class _Message(msgspec.Struct, gc=False):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: msgspec.Raw = _ABSENT  # Raw in a union would refuse all but null


class _Choice(msgspec.Struct, gc=False):
    delta: _Message | None = None
    message: _Message | None = None
    text: str | None = None
    finish_reason: str | None = None

    def outputs(self) -> tuple[str, bool]:
        """Gives its text, reasoning first, and whether it carries any output."""
        said = self.delta or self.message
        if said is None:
            return self.text or "", bool(self.text)
        text = (said.reasoning_content or said.reasoning or "") + (said.content or "") + (said.refusal or "")
        return text, bool(text) or bytes(said.tool_calls) not in _NOTHING


class Chunk(msgspec.Struct, gc=False):
    """One event of a stream, or a whole answer; all but what we need is skipped."""

    choices: list[_Choice] = []
    usage: Usage | None = None
    error: msgspec.Raw = _ABSENT
    object: str = ""
    message: str | None = None

    @property
    def error_text(self) -> str | None:
        """What it says went wrong; None where nothing did."""
        if self.object == "error":  # vLLM's form before 0.10
            return self.message or "error"
        error = bytes(self.error)
        return None if error in _NOTHING else error.decode("utf-8", "replace")


class _Answer(msgspec.Struct, gc=False):
    """An answer without choices: only its usage is looked at, not the vectors."""

    usage: Usage | None = None


read_chunk: Final = msgspec.json.Decoder(Chunk).decode
read_answer: Final = msgspec.json.Decoder(_Answer).decode
