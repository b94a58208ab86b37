"""One sequence on its way back: tokens become text, stop strings end it, log-probabilities follow their text.

Pure state, no I/O: worker events go in, ``Piece`` values come out. Text held back (half a character, a possible stop
string) and the log-probabilities of its tokens are held together, so what a client has joins to what it would have
got in one piece.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Sequence
from typing import Protocol

from headrace.base.errors import EngineError
from headrace.protocol.answers import CallDelta, Piece, Thought, TokenEntry, TopToken, finite
from headrace.protocol.frames import EchoLogprobs, Finished, FinishReason, TokenLogprobs, Tokens


class Pieces(Protocol):
    """What ids stand for: the tokenizer's view from here."""

    def token_bytes(self, token_id: int) -> bytes:
        """Gives the bytes of one token."""
        ...


class TextStream(Protocol):
    """An incremental detokeniser."""

    def push(self, ids: Sequence[int]) -> str:
        """Adds tokens; gives the text that is now certain."""
        ...

    def flush(self) -> str:
        """Gives what was held back."""
        ...


class Stops(Protocol):
    """A matcher of stop strings. ``matched`` is the one that was found."""

    matched: str | None

    def push(self, text: str) -> tuple[str, bool]:
        """Adds text; gives what may be said, and whether a stop string was found."""
        ...

    def flush(self) -> str:
        """Gives what was held back as a possible stop string."""
        ...


class Reader(Protocol):
    """What finds thoughts and tool calls in an answer (``text.message.MessageReader``)."""

    @property
    def has_calls(self) -> bool:
        """Whether a call has begun."""
        ...

    @property
    def is_thinking(self) -> bool:
        """Whether what was pushed last belongs to the thinking."""
        ...

    @property
    def may_think(self) -> bool:
        """Whether thinking goes on or may still begin."""
        ...

    def push(self, text: str) -> Sequence[Thought | str | CallDelta]:
        """Takes text; gives what is now certain."""
        ...

    def flush(self) -> Sequence[Thought | str | CallDelta]:
        """Ends the message."""
        ...


class Echo:
    """What an answer begins with: the prompt of an echoing completion.

    Args:
        text: what the client sent (or what its ids decode to).
        ids: its tokens.
        offsets: where each token's text starts in ``text``.
        is_alone: max_tokens was 0, so the prompt is all that is wanted.
    """

    def __init__(self, text: str, ids: list[int], offsets: list[int], *, has_logprobs: bool, is_alone: bool) -> None:
        self.text = text
        self.ids = ids
        self.offsets = offsets
        self.is_alone = is_alone
        self.has_logprobs = has_logprobs
        self.scores: dict[int, TokenLogprobs] = {}


class Generation:
    """State of one sequence.

    Args:
        index: the choice's index in the answer.
        pieces: for log-probabilities, None where none were asked for.
        echo: None, or the prompt that comes first.
        reader: None where the answer is plain text.
        has_stop_in_output: the stop string that ends the answer is a part of it, or the text of the id that does.
        keeps_scores: log-probabilities of the prompt are kept for the whole answer.
        keeps_ids: pieces carry the ids of their tokens.
        shows_ids: log-probabilities name tokens by id.
        stop_ids: those of the client that may end it; the model's own are no reason to name.
    """

    def __init__(
        self,
        index: int,
        text: TextStream,
        stops: Stops | None,
        pieces: Pieces | None = None,
        echo: Echo | None = None,
        reader: Reader | None = None,
        *,
        has_stop_in_output: bool = False,
        keeps_scores: bool = False,
        keeps_ids: bool = False,
        shows_ids: bool = False,
        stop_ids: Container[int] = (),
    ) -> None:
        self.index = index
        self._stop_ids = stop_ids
        self._stop_id: int | None = None
        self.logprob_sum = 0.0
        self.prompt_scores: dict[int, TokenLogprobs] | None = {} if keeps_scores else None
        self._keeps_ids = keeps_ids
        self._shows_ids = shows_ids
        self._reader = reader
        self._has_stop_in_output = has_stop_in_output
        self.is_done = False
        self.finish_reason: str | None = None
        self.output_tokens = 0
        self.reasoning_tokens = 0
        self._num_mark_tokens = 0
        self._text = text
        self._stops = stops
        self._pieces = pieces
        self._echo = echo
        self._base = len(echo.text) if echo is not None else 0
        self._is_cut = False  # by a stop string
        self._num_decoded = 0  # characters that the detokeniser has given
        self._num_said = 0  # characters that pieces have carried
        self._held: list[TokenEntry] = []

    def on_tokens(self, event: Tokens) -> list[Piece]:
        """Takes new tokens; sets ``is_done`` when a stop string was found."""
        if len(event.ids) > 1 and self._reader is not None and self._reader.may_think:
            return [piece for one in _singly(event) for piece in self.on_tokens(one)]  # so that thoughts are counted
        was_thinking = self._reader is not None and self._reader.is_thinking
        before = self.output_tokens
        pieces = self._with_ids(event)
        self._count_thoughts(self.output_tokens - before, was_thinking=was_thinking)
        return pieces

    def _count_thoughts(self, num_tokens: int, *, was_thinking: bool) -> None:
        """Counts tokens of the thinking and its marks; those of an opening mark when it is whole."""
        if self._reader is None:
            return
        if was_thinking or self._reader.is_thinking:
            self.reasoning_tokens += self._num_mark_tokens + num_tokens
            self._num_mark_tokens = 0
        elif self._reader.may_think:
            self._num_mark_tokens += num_tokens

    def _with_ids(self, event: Tokens) -> list[Piece]:
        if not self._keeps_ids:
            return self._take_tokens(event)
        before = self.output_tokens
        pieces = self._take_tokens(event)
        return self._naming(pieces, event.ids[: self.output_tokens - before])

    def _naming(self, pieces: list[Piece], ids: list[int]) -> list[Piece]:
        """Gives the pieces with the ids of their tokens."""
        if not ids:
            return pieces
        # The first piece may be the echo of the prompt, whose tokens these are not.
        at = next((index for index, piece in enumerate(pieces) if not piece.is_echo), len(pieces))
        if at == len(pieces):
            return [*pieces, Piece(self.index, token_ids=ids)]
        return [*pieces[:at], dataclasses.replace(pieces[at], token_ids=ids), *pieces[at + 1 :]]

    def _take_tokens(self, event: Tokens) -> list[Piece]:
        pieces = self._say_echo()
        if self.is_done:
            return pieces
        if self._stops is None and self._pieces is None:
            self.output_tokens += len(event.ids)
            self.logprob_sum += sum(scores.logprob for scores in event.logprobs)
            text = self._text.push(event.ids)
            if text and self._reader is None:
                pieces.append(Piece(self.index, text))
            elif text:
                pieces += self._parts(text, None)
            return pieces
        said: list[str] = []
        for position, token in enumerate(event.ids):
            self.output_tokens += 1
            text = self._text.push((token,))
            if self._pieces is not None:
                scores = event.logprobs[position] if position < len(event.logprobs) else None
                self.logprob_sum += scores.logprob if scores is not None else 0.0
                self._hold(token, scores, text)
            self._num_decoded += len(text)
            if self._stops is None:
                said.append(text)
                continue
            text, is_stopped = self._stops.push(text)
            said.append(text)
            if is_stopped:
                self._is_cut = True
                if self._has_stop_in_output:
                    said.append(self._stops.matched or "")
                self._end("stop")
                break
        return [*pieces, *self._pieces_of("".join(said))]

    def on_echo(self, event: EchoLogprobs) -> None:
        """Takes log-probabilities of prompt positions."""
        if self.prompt_scores is not None:
            self.prompt_scores.update(enumerate(event.logprobs, event.start))
        if self._echo is not None:
            for offset, scores in enumerate(event.logprobs):
                self._echo.scores[event.start + offset] = scores

    def on_finished(self, event: Finished) -> list[Piece]:
        """Takes the worker's end of this sequence.

        Raises:
            EngineError: the worker ended it though nobody asked.
        """
        pieces = self._say_echo()
        if self.is_done:
            return pieces
        if event.reason is FinishReason.ABORTED:
            raise EngineError("the engine gave this request up", code="aborted")
        self.output_tokens = max(self.output_tokens, event.output_tokens)
        if event.stop_token_id is not None and event.stop_token_id in self._stop_ids:
            self._stop_id = event.stop_token_id
        text, ids = self._ending(event)
        self._num_decoded += len(text)
        reason = "stop" if event.reason is FinishReason.STOP else "length"
        if self._stops is not None:
            text, is_stopped = self._stops.push(text)
            if is_stopped:
                self._is_cut = True
                reason = "stop"
                text += self._stops.matched or "" if self._has_stop_in_output else ""
            else:
                text += self._stops.flush()
        self._end(reason)
        said = self._pieces_of(text)
        return [*pieces, *(self._naming(said, ids) if self._keeps_ids else said)]

    def _ending(self, event: Finished) -> tuple[str, list[int]]:
        """Gives what was held back, with the text of the id that ended it where that is a part of the answer.

        Then it is a token of the answer like the others; a special one that has no text in it is none.
        """
        token = event.stop_token_id
        if token is None or not self._has_stop_in_output:
            return self._text.flush(), []
        text = self._text.push((token,)) + self._text.flush()
        if not text:
            return text, []
        self.output_tokens += 1
        if self._pieces is not None:
            self._hold(token, event.stop_logprobs, text)
        return text, [token]

    def _end(self, reason: str) -> None:
        self.is_done = True
        self.finish_reason = reason

    def _pieces_of(self, text: str) -> list[Piece]:
        self._num_said += len(text)
        entries: list[TokenEntry] | None = None
        if self._pieces is not None:
            entries = self._release()
        if text or entries or self.is_done:
            return self._parts(text, entries or None)
        return []

    def _parts(self, text: str, entries: list[TokenEntry] | None) -> list[Piece]:
        """Gives text as pieces: one for each thought, text and part of a call in it; the last ends the choice."""
        reader = self._reader
        stop = self._stops.matched if self._stops is not None and self._is_cut else self._stop_id
        if reader is None:
            return [Piece(self.index, text, entries, self.finish_reason, stop=stop)]
        items = list(reader.push(text))
        if self.is_done:
            items += reader.flush()
            if reader.has_calls and self.finish_reason == "stop":
                self.finish_reason = "tool_calls"
        pieces: list[Piece] = []
        if entries:  # with the first text, or alone
            has_text = bool(items) and isinstance(items[0], str)
            pieces.append(Piece(self.index, str(items.pop(0)) if has_text else "", entries))
        for item in items:
            match item:
                case Thought():
                    pieces.append(Piece(self.index, thought=item.text))
                case CallDelta():
                    pieces.append(Piece(self.index, call=item))
                case _:
                    pieces.append(Piece(self.index, item))
        if self.is_done:
            pieces.append(Piece(self.index, finish_reason=self.finish_reason, stop=stop))
        return pieces

    def _hold(self, token: int, scores: TokenLogprobs | None, text: str) -> None:
        start = self._base + self._num_decoded
        self._held.append(self._entry(token, scores, start, start + len(text)))

    def _release(self) -> list[TokenEntry]:
        """Gives the held entries whose text has been said; at the end all but those past a stop string's start.

        A token without text of its own (half a character) goes out with the one that completes it.
        """
        said = self._base + self._num_said
        if self.is_done:
            ready = [entry for entry in self._held if entry.offset < said] if self._is_cut else list(self._held)
            self._held.clear()
            return ready
        count = 0
        for position, entry in enumerate(self._held):
            if entry.end > said:
                break
            if entry.end > entry.offset:
                count = position + 1
        ready = self._held[:count]
        del self._held[:count]
        return ready

    def _entry(self, token: int, scores: TokenLogprobs | None, start: int, end: int) -> TokenEntry:
        raw = self._bytes(token)
        top: list[TopToken] = []
        logprob: float | None = None
        if scores is not None:
            logprob = finite(scores.logprob)
            for other, score in zip(scores.top_ids, scores.top_logprobs, strict=False):
                other_raw = self._bytes(other)
                top.append(TopToken(self._name(other, other_raw), finite(score), list(other_raw)))
        return TokenEntry(self._name(token, raw), logprob, list(raw), top, start, end)

    def _name(self, token: int, raw: bytes) -> str:
        return f"token_id:{token}" if self._shows_ids else _shown(raw)

    def _bytes(self, token: int) -> bytes:
        assert self._pieces is not None
        try:
            return self._pieces.token_bytes(token)
        except (IndexError, KeyError, ValueError, OverflowError):
            return b""  # an id outside the vocabulary is the engine's fault, and no reason to lose the answer

    def _say_echo(self) -> list[Piece]:
        """Gives the prompt as the first piece, once."""
        echo = self._echo
        if echo is None:
            return []
        self._echo = None
        entries: list[TokenEntry] | None = None
        if echo.has_logprobs:
            ends = [*echo.offsets[1:], len(echo.text)]
            entries = [
                self._entry(token, echo.scores.get(position), start, end)
                for position, (token, start, end) in enumerate(zip(echo.ids, echo.offsets, ends, strict=True))
            ]
        if echo.is_alone:
            self._end("length")
        return [Piece(self.index, echo.text, entries, self.finish_reason, is_echo=True)]


def _singly(event: Tokens) -> list[Tokens]:
    """Gives a frame of several tokens as frames of one."""
    return [
        Tokens(event.request_id, [token], event.logprobs[position : position + 1])
        for position, token in enumerate(event.ids)
    ]


def _shown(raw: bytes) -> str:
    """Gives a token's bytes as text; where they are no whole characters, in OpenAI's ``bytes:\\x…`` form."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
