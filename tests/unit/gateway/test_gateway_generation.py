"""Tokens become text: stop strings, held text, log-probabilities, whatever way the tokens arrive."""

from __future__ import annotations

import codecs
import math
import random
from collections.abc import Sequence

import pytest

from headrace.base.errors import EngineError
from headrace.gateway.generation import Echo, Generation
from headrace.protocol.answers import LOWEST_LOGPROB, Piece
from headrace.protocol.frames import EchoLogprobs, Finished, FinishReason, TokenLogprobs, Tokens
from headrace.text.stop import StopMatcher


class Bytes:
    """Bytes as tokens."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        return self._decoder.decode(bytes(ids))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)

    def token_bytes(self, index: int) -> bytes:
        return bytes([index])


def tokens(ids: Sequence[int], *, has_logprobs: bool = False) -> Tokens:
    scores = [TokenLogprobs(-1.0, [token], [-1.0]) for token in ids] if has_logprobs else []
    return Tokens("r", list(ids), scores)


def finished(count: int, reason: FinishReason = FinishReason.STOP) -> Finished:
    return Finished("r", reason, 1, 0, count, 0.0, 0.0, 0.0)


def run(generation: Generation, groups: list[Sequence[int]], *, has_logprobs: bool = False) -> list[Piece]:
    pieces: list[Piece] = []
    for group in groups:
        pieces += generation.on_tokens(tokens(group, has_logprobs=has_logprobs))
        if generation.is_done:
            return pieces
    return pieces + generation.on_finished(finished(sum(map(len, groups))))


def split(chance: random.Random, ids: bytes) -> list[Sequence[int]]:
    groups: list[Sequence[int]] = []
    while ids:
        size = chance.randint(1, 4)
        groups.append(ids[:size])
        ids = ids[size:]
    return groups


@pytest.mark.parametrize("seed", range(200))
def test_text_and_counts_do_not_depend_on_how_tokens_arrive(seed: int) -> None:
    chance = random.Random(seed)
    text = "".join(chance.choice("abé東👩") for _ in range(40))
    stops = [
        "".join(chance.choice("abé東👩") for _ in range(chance.randint(1, 3))) for _ in range(chance.randint(0, 3))
    ]
    ids = text.encode()
    outcomes = set()
    for groups in ([ids], [[token] for token in ids], split(chance, ids)):
        generation = Generation(0, Bytes(), StopMatcher(stops) if stops else None)
        pieces = run(generation, groups)
        said = "".join(piece.text for piece in pieces)
        outcomes.add((said, generation.output_tokens, pieces[-1].finish_reason))

    assert len(outcomes) == 1
    said = next(iter(outcomes))[0]
    assert text.startswith(said)
    assert not any(stop in said for stop in stops)


@pytest.mark.parametrize("seed", range(50))
def test_log_probabilities_always_join_to_the_text_that_was_said(seed: int) -> None:
    chance = random.Random(seed)
    text = "".join(chance.choice("abcé") for _ in range(30))
    stop = "".join(chance.choice("abc") for _ in range(3))
    generation = Generation(0, Bytes(), StopMatcher([stop]), Bytes())

    pieces = run(generation, split(chance, text.encode()), has_logprobs=True)

    said = b""
    scored = b""
    for piece in pieces:
        said += piece.text.encode()
        scored += b"".join(bytes(entry.bytes) for entry in piece.entries or [])
        assert scored == said
    offsets = [entry.offset for piece in pieces for entry in piece.entries or []]
    assert offsets == sorted(offsets)


def test_a_stop_at_the_last_token_is_a_stop_not_a_length() -> None:
    generation = Generation(0, Bytes(), StopMatcher(["lo"]))

    pieces = run(generation, [b"Hel", b"lo"])

    assert ("".join(piece.text for piece in pieces), pieces[-1].finish_reason) == ("Hel", "stop")
    assert generation.output_tokens == len(b"Hello")


def test_the_workers_length_is_told() -> None:
    generation = Generation(3, Bytes(), None)
    generation.on_tokens(tokens(b"ab"))

    pieces = generation.on_finished(finished(2, FinishReason.LENGTH))

    assert pieces == [Piece(3, "", None, "length")]


def test_an_abort_that_nobody_asked_for_is_an_error() -> None:
    with pytest.raises(EngineError):
        Generation(0, Bytes(), None).on_finished(finished(0, FinishReason.ABORTED))


def test_infinite_log_probabilities_are_clamped() -> None:
    generation = Generation(0, Bytes(), None, Bytes())
    scores = TokenLogprobs(-math.inf, [97, 98], [-math.inf, math.nan])

    pieces = generation.on_tokens(Tokens("r", [97], [scores]))

    entry = (pieces[0].entries or [])[0]
    assert entry.logprob == LOWEST_LOGPROB
    assert [top.logprob for top in entry.top] == [LOWEST_LOGPROB, LOWEST_LOGPROB]


def test_an_echo_comes_first_and_shifts_the_offsets() -> None:
    echo = Echo("ab", [97, 98], [0, 1], has_logprobs=True, is_alone=False)
    generation = Generation(0, Bytes(), None, Bytes(), echo)
    generation.on_echo(EchoLogprobs("r", 1, [TokenLogprobs(-2.0, [98], [-2.0])]))

    pieces = generation.on_tokens(tokens(b"c", has_logprobs=True))

    assert [piece.text for piece in pieces] == ["ab", "c"]
    entries = [entry for piece in pieces for entry in piece.entries or []]
    assert [(entry.token, entry.logprob, entry.offset) for entry in entries] == [
        ("a", None, 0),
        ("b", -2.0, 1),
        ("c", -1.0, 2),
    ]


def test_tokens_that_are_no_whole_character_are_written_as_bytes() -> None:
    generation = Generation(0, Bytes(), None, Bytes())

    pieces = run(generation, ["é".encode()], has_logprobs=True)

    entries = [entry for piece in pieces for entry in piece.entries or []]
    assert [entry.token for entry in entries] == ["bytes:\\xc3", "bytes:\\xa9"]
