"""What the run's process and its senders say to each other, over a socket pair: msgpack with a length before it."""

from __future__ import annotations

import asyncio
import struct
from typing import Final

import msgspec

from headrace.base.errors import ProtocolError
from headrace.bench.records import Settings
from headrace.bench.sample import Sample

_LENGTH: Final = struct.Struct("<I")
MAX_FRAME_BYTES: Final = 256 * 2**20


class Setup(msgspec.Struct, frozen=True, tag="setup"):
    """To a sender, first of all.

    Args:
        process: its number, from 0.
        headers: of every request; they may hold a key.
        concurrency: its share of a closed loop's; None in an open loop.
        num_open: connections to open ahead.
    """

    process: int
    settings: Settings
    headers: dict[str, str]
    concurrency: int | None
    num_open: int


class Go(msgspec.Struct, frozen=True, tag="go"):
    """To a sender: the run starts.

    Args:
        start_s: ``time.monotonic``, the same for all senders.
        stop_s: nothing new is sent from then on; None without a limit.
    """

    start_s: float
    stop_s: float | None


class Work(msgspec.Struct, frozen=True, tag="work"):
    """To a sender: a sample to send.

    Args:
        index: of its first turn; the following turns have the next numbers.
        at_s: seconds since the start; None as soon as there is a place.
    """

    index: int
    sample: Sample
    at_s: float | None


class NoMore(msgspec.Struct, frozen=True, tag="no_more"):
    """To a sender: that was the last sample."""


class Cut(msgspec.Struct, frozen=True, tag="cut"):
    """To a sender: stop what is under way and say ``Done``."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """From a sender: its connections stand."""


class Pulse(msgspec.Struct, frozen=True, tag="pulse"):
    """From a sender, a few times a second and last of all: what has happened since the one before.

    Args:
        lines: records of what has ended, one JSON line each.
        num_samples: that have ended with all their turns: so many more are wanted.
        num_warmup: of the records.
        num_chunks: with output, of all answers, ended or not.
        latest_s: a few recent (TTFT, E2E) for the screen.
        first_measured_s: when the first request after the warm-up was scheduled, once known; since the start.
    """

    lines: bytes
    num_exchanges: int
    num_samples: int
    num_warmup: int
    num_failed: int
    num_sent: int
    num_in_flight: int
    num_chunks: int
    output_tokens: int
    latest_s: list[tuple[float, float]]
    first_measured_s: float | None


class Done(msgspec.Struct, frozen=True, tag="done"):
    """From a sender: all has ended, and what it cost.

    Args:
        lags_s, late_s: how late the loop woke up, and how late requests with a connection waiting went out.
    """

    cpu_s: float
    wall_s: float
    lags_s: list[float]
    late_s: list[float]


ToSender = Setup | Go | Work | NoMore | Cut
FromSender = Ready | Pulse | Done
_ENCODER: Final = msgspec.msgpack.Encoder()
_TO_SENDER: Final[msgspec.msgpack.Decoder[ToSender]] = msgspec.msgpack.Decoder(ToSender)
_FROM_SENDER: Final[msgspec.msgpack.Decoder[FromSender]] = msgspec.msgpack.Decoder(FromSender)


def encode(message: ToSender | FromSender) -> bytes:
    """Gives a message's frame."""
    body = _ENCODER.encode(message)
    return _LENGTH.pack(len(body)) + body


async def read_to_sender(reader: asyncio.StreamReader) -> ToSender | None:
    """Gives the next message, or None when the other side has gone."""
    body = await _read(reader)
    return None if body is None else _TO_SENDER.decode(body)


async def read_from_sender(reader: asyncio.StreamReader) -> FromSender | None:
    """Gives the next message, or None when the other side has gone."""
    body = await _read(reader)
    return None if body is None else _FROM_SENDER.decode(body)


async def _read(reader: asyncio.StreamReader) -> bytes | None:
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if length > MAX_FRAME_BYTES:
            raise ProtocolError(f"a frame of {length} bytes, the limit is {MAX_FRAME_BYTES}")
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
