"""Bad words of a request: what the next token may not be, given the output so far."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.base.errors import RequestError
from headrace.engine.request import Request
from headrace.engine.validate import MAX_BAD_WORDS, check_submit
from headrace.protocol.frames import Submit

VOCAB = 70


def request_of(
    bad_words: list[list[int]], *, allowed: list[int] | None = None, prompt: tuple[int, ...] = (5,)
) -> Request:
    submit = Submit("r", list(prompt), 9, bad_words=bad_words, allowed_token_ids=allowed)
    request = Request(0, submit, order=0, now_s=0.0, eos_token_ids=frozenset(), context_tokens=64)
    request.grow()
    return request


def choosable(request: Request) -> set[int]:
    mask = np.zeros(-(-VOCAB // 32), np.uint32)
    request.fill_mask(mask)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB]
    return set(np.flatnonzero(bits).tolist())


def test_a_word_of_one_token_is_never_choosable() -> None:
    request = request_of([[33], [1]])

    assert request.has_mask
    assert choosable(request) == set(range(VOCAB)) - {33, 1}


def test_a_longer_word_is_stopped_at_its_last_token_and_only_behind_the_others() -> None:
    request = request_of([[7, 8, 69]])
    seen = []
    for token in (7, 7, 8, 8):
        seen.append(69 in choosable(request))
        request.append(token)

    assert seen == [True, True, True, False]
    assert 69 in choosable(request)


def test_the_prompt_is_no_part_of_a_word() -> None:
    request = request_of([[7, 8]], prompt=(6, 7))

    assert 8 in choosable(request)


def test_a_ban_that_leaves_nothing_is_lifted() -> None:
    assert choosable(request_of([[3], [4]], allowed=[3, 4])) == {3, 4}
    assert choosable(request_of([[3]], allowed=[3, 4])) == {4}


@pytest.mark.parametrize("words", [[[]], [[VOCAB]], [[1]] * (MAX_BAD_WORDS + 1)], ids=["empty", "id", "many"])
def test_words_out_of_range_are_refused(words: list[list[int]]) -> None:
    with pytest.raises(RequestError, match="bad_words"):
        check_submit(Submit("r", [1], 1, bad_words=words), vocab_size=VOCAB, context_tokens=9)
