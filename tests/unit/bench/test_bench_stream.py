"""Events out of bytes that are cut anywhere."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.bench import stream
from headrace.bench.stream import EventReader, read_chunk

STREAMS = [
    pytest.param(b'data: {"a":1}\n\ndata: [DONE]\n\n', [b'{"a":1}', b"[DONE]"], id="as all write it"),
    pytest.param(b"data: a\r\n\r\ndata: b\r\n\r\n", [b"a", b"b"], id="CRLF"),
    pytest.param(b"data: a\r\rdata: b\r\r", [b"a", b"b"], id="CR alone"),
    pytest.param(b": ping\n\nevent: x\nid: 3\ndata: a\n\n", [b"a"], id="comments, names and ids"),
    pytest.param(b"data: a\ndata: b\n\n", [b"a\nb"], id="several lines of data"),
    pytest.param(b"data:a\n\ndata:  b\n\n", [b"a", b" b"], id="one blank belongs to the field"),
    pytest.param(b"retry: 5\n\n", [], id="nothing to read"),
    pytest.param("data: ü\n\n".encode(), ["ü".encode()], id="UTF-8"),
]


@pytest.mark.parametrize(("wire", "payloads"), STREAMS)
@given(data=st.data())
def test_events_are_the_same_however_the_bytes_are_cut(wire: bytes, payloads: list[bytes], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=6)))
    reader = EventReader()

    read: list[bytes] = []
    for start, stop in zip([0, *cuts], [*cuts, len(wire)], strict=True):
        read += reader.feed(wire[start:stop])

    assert read == payloads


def test_an_event_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "MAX_EVENT_BYTES", 100)
    reader = EventReader()
    reader.feed(b"data: " + b"x" * 90)

    with pytest.raises(ValueError, match="over 100 bytes"):
        reader.feed(b"x" * 20)


@pytest.mark.parametrize(
    ("payload", "text", "is_output"),
    [
        ('{"choices":[{"delta":{"role":"assistant","content":""}}]}', "", False),
        ('{"choices":[{"delta":{"content":"a"}}]}', "a", True),
        ('{"choices":[{"delta":{"reasoning_content":"r"}}]}', "r", True),
        ('{"choices":[{"delta":{"tool_calls":[{"index":0}]}}]}', "", True),
        ('{"choices":[{"delta":{"tool_calls":null}}]}', "", False),
        ('{"choices":[{"delta":{"tool_calls":[]}}]}', "", False),
        ('{"choices":[{"text":"b"}]}', "b", True),
        ('{"choices":[{"delta":{},"finish_reason":"stop"}]}', "", False),
        ('{"choices":[{"message":{"content":"c"}}]}', "c", True),
    ],
)
def test_what_counts_as_output(payload: str, text: str, is_output: bool) -> None:
    (choice,) = read_chunk(payload.encode()).choices

    assert choice.outputs() == (text, is_output)


@pytest.mark.parametrize(
    ("payload", "said"),
    [
        ('{"error":{"message":"full"}}', '{"message":"full"}'),
        ('{"object":"error","message":"full"}', "full"),
        ('{"error":null,"choices":[]}', None),
        ('{"choices":[]}', None),
    ],
)
def test_errors_inside_a_stream_are_found(payload: str, said: str | None) -> None:
    assert read_chunk(payload.encode()).error_text == said
