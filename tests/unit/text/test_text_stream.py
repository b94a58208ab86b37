"""Streams of text: characters split over tokens, stop strings split over pieces, and how tokens are written."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.errors import RequestError
from headrace.testing.tiny_vocabulary import gguf_tokenizer
from headrace.text.detokenize import Detokenizer
from headrace.text.logprobs import token_text
from headrace.text.stop import StopMatcher, check_stops
from headrace.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_gguf(gguf_tokenizer(320))


@pytest.fixture(scope="module")
def scored() -> Tokenizer:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "\u2581a"]
    return Tokenizer.from_gguf(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": pieces,
            "tokenizer.ggml.scores": [0.0] * len(pieces),
            "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * 3,
            "tokenizer.ggml.unknown_token_id": 0,
        }
    )


def split(items: list[int], cuts: list[int]) -> list[list[int]]:
    bounds = sorted({0, len(items), *(cut % (len(items) + 1) for cut in cuts)})
    return [items[start:stop] for start, stop in pairwise(bounds)]


@given(st.lists(st.integers(-2, 330)), st.lists(st.integers(0, 1000), max_size=8), st.booleans())
def test_joined_stream_equals_the_whole_decode_for_any_ids_and_split(
    tokenizer: Tokenizer, ids: list[int], cuts: list[int], skip_special: bool
) -> None:
    stream = Detokenizer(tokenizer, skip_special=skip_special)

    text = "".join([stream.push(part) for part in split(ids, cuts)]) + stream.flush()

    assert text == tokenizer.decode(ids, skip_special=skip_special)


@given(st.lists(st.integers(-2, 264)), st.lists(st.integers(0, 1000), max_size=8), st.booleans())
def test_joined_stream_equals_the_whole_decode_with_byte_fallback(
    scored: Tokenizer, ids: list[int], cuts: list[int], is_text_start: bool
) -> None:
    stream = Detokenizer(scored, is_text_start=is_text_start)

    text = "".join([stream.push(part) for part in split(ids, cuts)]) + stream.flush()

    assert text == scored.decode(ids, is_text_start=is_text_start)


@given(st.text(alphabet="aé漢🦊\u200d\u0301", max_size=30))
def test_valid_text_never_shows_a_replacement_character(tokenizer: Tokenizer, text: str) -> None:
    stream = Detokenizer(tokenizer)

    parts = [stream.push([index]) for index in tokenizer.encode(text, add_special=False)]

    assert "\ufffd" not in "".join(parts)
    assert stream.flush() == ""
    assert "".join(parts) == text


def test_an_unfinished_character_is_held_and_flushed_once(tokenizer: Tokenizer) -> None:
    first, second, *_ = tokenizer.encode("🦊", add_special=False)
    stream = Detokenizer(tokenizer)

    assert stream.push([first]) == ""
    assert stream.push([second]) == ""
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


def test_the_space_before_a_first_word_goes_only_at_a_text_start(scored: Tokenizer) -> None:
    ids = scored.encode("a a", add_special=False)

    assert Detokenizer(scored).push(ids) == "a a"
    assert Detokenizer(scored, is_text_start=False).push(ids) == " a a"


def test_an_empty_first_push_does_not_use_up_the_leading_space(scored: Tokenizer) -> None:
    stream = Detokenizer(scored)

    assert stream.push([1]) == ""  # <s> is special and skipped
    assert stream.push(scored.encode("a", add_special=False)) == "a"


def reference(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The rule itself, without any automaton: first end wins, then the longest."""
    found = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    end, _, stop = min(found)
    return text[: end - len(stop)], stop


small_text = st.text(alphabet="abé🦊", max_size=40)
small_stops = st.lists(st.text(alphabet="abé🦊", min_size=1, max_size=5), max_size=5)


@given(small_text, small_stops, st.lists(st.integers(0, 1000), max_size=10))
def test_stopping_does_not_depend_on_the_split(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher = StopMatcher(stops)
    bounds = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})

    shown, is_stopped = "", False
    for start, stop in pairwise(bounds):
        part, is_stopped = matcher.push(text[start:stop])
        shown += part
    shown += matcher.flush()

    expected, expected_stop = reference(text, stops)
    assert shown == expected
    assert matcher.matched == expected_stop
    assert is_stopped == (expected_stop is not None)


def test_ten_thousand_streams_stop_as_their_whole_texts_do(tokenizer: Tokenizer) -> None:
    draw = random.Random(50)
    parts = ("a", "b", "ab", "é", "e\u0301", "漢", "🦊", "👩‍👧", " the", "\n")

    for _ in range(10_000):
        text = "".join(draw.choices(parts, k=draw.randrange(12)))
        stops = ["".join(draw.choices(parts, k=draw.randrange(1, 4))) for _ in range(draw.randrange(4))]
        # Any tokenisation, not only the tokenizer's own: bytes, or what it makes of a random cut.
        cut = draw.randrange(len(text) + 1)
        ids = tokenizer.encode(text[:cut], add_special=False) + tokenizer.encode(text[cut:], add_special=False)
        if draw.random() < 0.5:
            ids = [tokenizer.encode("é", add_special=False)[0] - 0xC3 + byte for byte in text.encode()]
        stream, matcher = Detokenizer(tokenizer), StopMatcher(stops)

        shown = "".join([matcher.push(stream.push([index]))[0] for index in ids])
        shown += matcher.push(stream.flush())[0] + matcher.flush()

        assert (shown, matcher.matched) == reference(text, stops)


@given(small_text, small_stops)
def test_text_is_held_only_while_it_may_become_a_stop(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)

    shown = ""
    for end, char in enumerate(text, 1):
        part, is_stopped = matcher.push(char)
        shown += part
        if is_stopped:
            return
        held = text[len(shown) : end]
        assert not held or any(stop.startswith(held) for stop in stops)


def test_of_overlapping_stops_the_one_complete_first_wins() -> None:
    matcher = StopMatcher(["abcd", "bc"])

    assert matcher.push("xabcd") == ("xa", True)
    assert matcher.matched == "bc"


def test_after_a_stop_nothing_is_shown() -> None:
    matcher = StopMatcher(["END"])

    assert matcher.push("yes EN") == ("yes ", False)
    assert matcher.push("D no") == ("", True)
    assert matcher.push("more") == ("", True)
    assert matcher.flush() == ""


def test_text_is_not_normalised_before_it_is_compared() -> None:
    matcher = StopMatcher(["\u00e9"])

    assert matcher.push("e\u0301") == ("e\u0301", False)


@pytest.mark.parametrize(
    ("stops", "message"),
    [([""], "0 characters"), (["x" * 257], "257 characters"), (["x"] * 17, "17 strings, the limit is 16")],
    ids=["empty", "long", "many"],
)
def test_unusable_stops_are_refused(stops: list[str], message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        check_stops(stops)

    assert caught.value.param == "stop"


def test_the_largest_allowed_stops_match_in_linear_steps() -> None:
    stops = ["a" * 255 + chr(ord("b") + index) for index in range(16)]
    matcher = StopMatcher(stops)

    shown = [matcher.push("a")[0] for _ in range(10_000)]

    assert "".join(shown) == "a" * (10_000 - 255)
    assert matcher.push("r") == ("a" * 255 + "r", False)
    assert matcher.push("a" * 256 + "q") == ("a", True)


def test_a_token_with_part_of_a_character_is_written_as_bytes(tokenizer: Tokenizer) -> None:
    first, second = tokenizer.encode("é", add_special=False)
    whole = tokenizer.encode("the", add_special=False)

    assert token_text(tokenizer, first) == ("bytes:\\xc3", [0xC3])
    assert token_text(tokenizer, second) == ("bytes:\\xa9", [0xA9])
    assert "".join(token_text(tokenizer, index).text for index in whole) == "the"
    assert token_text(tokenizer, 1) == ("<|im_start|>", list(b"<|im_start|>"))
