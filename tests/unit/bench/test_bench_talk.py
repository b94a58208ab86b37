"""Requests as bytes, and conversations that go on with what was answered."""

from __future__ import annotations

import json

import pytest

from headrace.base.errors import ConfigError
from headrace.bench.connection import Target, parse_target
from headrace.bench.records import Settings
from headrace.bench.sample import Sample
from headrace.bench.talk import Talk, Wire

SETTINGS = Settings(url="http://h:1", model="m", concurrency=1)


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("http://h:8000", Target("h", 8000, False, "")),
        ("http://h:8000/v1/", Target("h", 8000, False, "")),
        ("h:9", Target("h", 9, False, "")),
        ("https://h/api/v1", Target("h", 443, True, "/api")),
        ("http://[::1]:7", Target("::1", 7, False, "")),
    ],
)
def test_urls_with_and_without_v1_lead_to_the_same(url: str, target: Target) -> None:
    assert parse_target(url) == target


@pytest.mark.parametrize("url", ["ftp://h", "http://", "http://h:x", "http://h:99999", "http://u:p@h", "http://h?a=1"])
def test_what_is_no_server_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="--server-url is"):
        parse_target(url)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [("x-a", "b\r\nx-c: d", "one line"), ("", "b", "one line"), ("x-ü", "b", "ASCII"), ("Host", "b", "host is set by")],
)
def test_headers_that_would_break_the_request_are_refused(name: str, value: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Wire(parse_target("http://h"), {name: value})


def test_a_request_says_its_number_unless_the_caller_does() -> None:
    ours = Wire(parse_target("http://h:1/x"), {"Authorization": "Bearer k"}).request("chat", 7, b"{}")
    theirs = Wire(parse_target("http://h:1"), {"X-Request-Id": "a"}).request("chat", 7, b"{}")

    assert ours.startswith(b"POST /x/v1/chat/completions HTTP/1.1\r\nhost: h:1\r\n")
    assert b"\r\nauthorization: Bearer k\r\n" in ours
    assert b"\r\nx-request-id: bench-7\r\n" in ours
    assert theirs.count(b"x-request-id") == 1


def test_a_conversation_goes_on_with_the_answer_and_ends_after_its_last_turn() -> None:
    first, second = {"role": "user", "content": "a"}, {"role": "user", "content": "b"}
    sample = Sample("chat", {"messages": [first]}, follow_ups=((second,),), pauses_s=(1.5,))
    talk = Talk(4, sample, SETTINGS, Wire(parse_target("http://h:1"), {}), is_counted=False)

    pause_s = talk.advance("the answer")
    flight = talk.take_off(0.0)

    assert pause_s == 1.5
    assert (flight.index, flight.turn) == (5, 1)
    assert json.loads(flight.wire.split(b"\r\n\r\n", 1)[1])["messages"] == [
        first,
        {"role": "assistant", "content": "the answer"},
        second,
    ]
    assert talk.advance("more") is None
