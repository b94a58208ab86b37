"""Server-sent events: the three frames that a stream is made of."""

from __future__ import annotations

from typing import Final

DONE: Final = b"data: [DONE]\n\n"
PING: Final = b": ping\n\n"
HEADERS: Final[tuple[tuple[bytes, bytes], ...]] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
)


def event(name: bytes, payload: bytes) -> bytes:
    """Gives the frame of one JSON payload under an event's name."""
    return b"event: " + name + b"\ndata: " + payload + b"\n\n"


def data(payload: bytes) -> bytes:
    """Gives the frame of one JSON payload (which holds no raw line break)."""
    return b"data: " + payload + b"\n\n"
