"""Recorded outputs of real models are read as their own servers' tests say, however they are split."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest

from headrace.protocol.answers import CallDelta, Thought
from headrace.protocol.tool_use import ToolUse
from headrace.testing.recordings import Recording, recordings
from headrace.text.message import MessageReader

ALL = recordings()
IDS = [f"{recording.form}-{index}" for index, recording in enumerate(ALL)]


def read(recording: Recording, parts: list[str]) -> dict[str, Any]:
    use = ToolUse(recording.tools, recording.tools, is_forced=False, is_parallel=True)
    reader = MessageReader(recording.dialect, use, is_forced=False, is_thinking=False)
    message: dict[str, Any] = {"thought": "", "text": "", "calls": []}
    for item in [item for part in parts for item in reader.push(part)] + reader.flush():
        match item:
            case Thought():
                message["thought"] += item.text
            case CallDelta(_, _, str(name), arguments):
                message["calls"].append([name, arguments])
            case CallDelta(index, _, None, arguments):
                message["calls"][index][1] += arguments
            case _:
                message["text"] += item
    return message


def test_every_form_is_there() -> None:
    forms = {recording.form for recording in ALL}

    assert forms == {"hermes", "llama3", "mistral", "gemma", "gemma4", "generic"}
    assert all(recording.source.startswith(("vllm tests/", "llama.cpp tests/")) for recording in ALL)


@pytest.mark.parametrize("recording", ALL, ids=IDS)
def test_a_recorded_output_is_read_as_its_own_tests_say(recording: Recording) -> None:
    expected = {
        "thought": recording.thought,
        "text": recording.text,
        "calls": [list(call) for call in recording.calls],
    }

    assert read(recording, [recording.written]) == expected


@pytest.mark.parametrize("recording", ALL, ids=IDS)
def test_every_split_of_it_reads_alike(recording: Recording) -> None:
    written = recording.written
    expected = read(recording, [written])

    for at in range(1, len(written)):
        assert read(recording, [written[:at], written[at:]]) == expected, written[:at]
    for size in (1, 2, 3, 5):
        assert read(recording, [written[at : at + size] for at in range(0, len(written), size)]) == expected
    chance = random.Random(len(written))
    for _ in range(20):
        edges = sorted({0, len(written), *(chance.randrange(len(written) + 1) for _ in range(6))})
        assert read(recording, [written[a:b] for a, b in pairwise(edges)]) == expected, edges
