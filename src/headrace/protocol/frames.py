"""Frames of the worker link: what a front or supervisor and a worker say to each other.

A frame is a 4-byte big-endian length and a msgpack map tagged by ``t``. Nothing here executes code: msgspec
decodes into these types or raises. Version and sizes are checked at the door (``MAX_FRAME_BYTES``).

Flow: the peer connects and says Hello; the worker answers Welcome (or closes on a version mismatch) and from then on
sends Status at least every ``HEARTBEAT_INTERVAL_S`` and on every change of state. A front sends Submit (to a model that
generates) or Encode (to one that makes vectors) and Abort; per engine step the worker sends one Step frame with all
events of that connection's requests. Every request ends in exactly one Finished or Failed.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from enum import StrEnum
from typing import Final

import msgspec

LINK_VERSION = 4
MAX_FRAME_BYTES = 64 * 2**20
MAX_GRAMMAR_CHARS = 2**18
ID_BYTES = 4
"""Bytes of a packed token id."""
HEARTBEAT_INTERVAL_S = 0.5


def pack_ids(ids: Sequence[int]) -> bytes:
    """Gives token ids as i32 little-endian: a batch of millions then costs 4 bytes each on either side."""
    packed = array("i", ids)
    assert packed.itemsize == ID_BYTES
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


class WorkerState(StrEnum):
    """Where a worker is in its life."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"


class FinishReason(StrEnum):
    """Why a generation ended well (``aborted``: the front asked for it)."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"


# What must be over 0 stays so in the engine's f32, whose smallest normal number is 1.2e-38.
LEAST_POSITIVE: Final = 1e-30


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """How to choose tokens. Ranges are checked by the front and re-checked by the worker.

    Args:
        temperature: ≥ 0; 0 is greedy.
        top_k: 0 keeps all tokens.
        top_p: in (0, 1].
        min_p: in [0, 1]; relative to the most likely token.
        repetition_penalty: ≥ LEAST_POSITIVE; over prompt and output (1 is none).
        presence_penalty, frequency_penalty: in [-2, 2]; over output only.
        seed: any 64-bit value; random numbers are keyed by (seed, position).
        logit_bias: token id to added logit, each in [-100, 100].
        num_logprobs: None, or how many top log-probabilities to report beside the chosen token's (0..20).
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    logit_bias: dict[int, float] = {}
    num_logprobs: int | None = None


class GrammarKind(StrEnum):
    """What a grammar's source is written in: a JSON Schema, a regular expression (Rust's), or llguidance's Lark."""

    JSON = "json"
    REGEX = "regex"
    LARK = "lark"


class Grammar(msgspec.Struct, frozen=True):
    """What an answer must look like, from its first to its last token."""

    kind: GrammarKind
    source: str


class Hello(msgspec.Struct, tag="hello", tag_field="t", frozen=True):
    """First frame of a peer. ``peer`` is ``front`` or ``supervisor``, for logs only."""

    version: int
    peer: str


class Submit(msgspec.Struct, tag="submit", tag_field="t", frozen=True, omit_defaults=True):
    """Run one request. ``request_id`` is unique on its connection.

    Args:
        prompt_ids: token ids, 1 ≤ count ≤ context − 1.
        max_tokens: ≥ 1 tokens to generate at most.
        min_tokens: end-of-sequence and stop ids are ignored before this many tokens.
        stop_token_ids: ids that end the generation (delivered in ``stop_token_id`` of Finished, never as text).
        ignore_eos: the model's own end-of-sequence ids do not end the generation.
        timeout_s: seconds from receipt after which the worker fails the request with ``generation_timeout``.
        priority: lower runs first; equal ones first come, first served.
        cache_salt: prefix-cache blocks are shared only between equal salts.
        echo_logprobs: None, or how many top log-probabilities to report for every prompt position (0..256).
        allowed_token_ids: None, or the only ids that may be chosen.
        bad_words: token sequences that the output may not hold; one that leaves nothing to choose is let through.
        grammar: None, or what the answer must follow; where it may end, the model's end-of-sequence ids end it.
    """

    request_id: str
    prompt_ids: list[int]
    max_tokens: int
    sampling: Sampling = Sampling()
    min_tokens: int = 0
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    timeout_s: float = 600.0
    priority: int = 0
    cache_salt: str = ""
    echo_logprobs: int | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[list[int]] = []
    grammar: Grammar | None = None


class EncodeForm(StrEnum):
    """What is wanted of each input, and the shape of ``Encoded.vector`` then.

    POOLED: one vector, or scores of classes [width].
    ROWS: such for every token [tokens, width].
    MASKED: for every mark the likeliest tokens there, likeliest first, each its id and its probability [marks, top, 2].
    """

    POOLED = "pooled"
    ROWS = "rows"
    MASKED = "masked"


class Encode(msgspec.Struct, tag="encode", tag_field="t", frozen=True, omit_defaults=True):
    """Make a vector of each input. ``request_id`` is unique on its connection.

    Args:
        inputs: token ids of each as ``pack_ids`` makes them, 1 ≤ count ≤ context.
        second_starts: of pairs of texts, the first token of each input's second text; empty where there are none.
        form: one of those that the model's Welcome lists.
        marks: MASKED: of each input the positions to tell a token for, at least one.
        num_top: MASKED: tokens of each.
        is_normalised: ROWS: vectors are brought to length 1, as those of POOLED always are.
        dimensions: None, or how many leading elements of a vector are wanted; they are brought to length 1 again.
        timeout_s: seconds from receipt after which the worker fails the request with ``generation_timeout``.
        priority: lower runs first; equal ones take turns, one input each.
    """

    request_id: str
    inputs: list[bytes]
    second_starts: list[int] = []
    form: EncodeForm = EncodeForm.POOLED
    marks: list[list[int]] = []
    num_top: int = 0
    is_normalised: bool = False
    dimensions: int | None = None
    timeout_s: float = 600.0
    priority: int = 0


class Abort(msgspec.Struct, tag="abort", tag_field="t", frozen=True):
    """End a request now; the worker answers Finished(aborted) unless it has ended already."""

    request_id: str


class Drain(msgspec.Struct, tag="drain", tag_field="t", frozen=True):
    """Finish what runs, refuse what is new."""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position, of the unmodified model distribution.

    ``logprob`` belongs to the token that was chosen (or, in an echo, that stands there); ``top_ids`` and
    ``top_logprobs`` are sorted from most to least likely.
    """

    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]


class Tokens(msgspec.Struct, tag="tokens", tag_field="t", frozen=True, omit_defaults=True):
    """New tokens of one request, in order. ``logprobs`` has one entry per id when they were asked for."""

    request_id: str
    ids: list[int]
    logprobs: list[TokenLogprobs] = []


class Started(msgspec.Struct, tag="started", tag_field="t", frozen=True):
    """The request left the queue; ``cached_tokens`` of its prompt came from the prefix cache."""

    request_id: str
    cached_tokens: int


class EchoLogprobs(msgspec.Struct, tag="echo", tag_field="t", frozen=True):
    """Log-probabilities of prompt positions ``start, start+1, …``; the first prompt token has none, so start ≥ 1."""

    request_id: str
    start: int
    logprobs: list[TokenLogprobs]


class Encoded(msgspec.Struct, tag="encoded", tag_field="t", frozen=True):
    """What was wanted of one input of an Encode, f32 little-endian, row-major. Inputs come back in order."""

    request_id: str
    index: int
    vector: bytes


class Finished(msgspec.Struct, tag="finished", tag_field="t", frozen=True, omit_defaults=True):
    """The request ended well. Times are seconds on the worker's monotonic clock, as durations.

    ``stop_logprobs`` belong to the id that ended it, where log-probabilities were asked for.
    """

    request_id: str
    reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    queue_s: float
    prefill_s: float
    decode_s: float
    stop_token_id: int | None = None
    num_preemptions: int = 0
    stop_logprobs: TokenLogprobs | None = None


class Failed(msgspec.Struct, tag="failed", tag_field="t", frozen=True):
    """The request ended badly. ``code`` is one of ``base.errors``; ``has_started`` says whether it had run."""

    request_id: str
    code: str
    message: str
    has_started: bool


Event = Tokens | Started | EchoLogprobs | Encoded | Finished | Failed


class Step(msgspec.Struct, tag="step", tag_field="t", frozen=True):
    """All events of one engine step for one connection, in order."""

    events: list[Event]


class Welcome(msgspec.Struct, tag="welcome", tag_field="t", frozen=True):
    """The worker's answer to Hello.

    Args:
        vector_width: elements of what it makes of each input of an Encode, 0 where it generates.
        labels: where these are scores of classes, their names.
        forms: what an Encode may want; empty where it generates.
    """

    version: int
    pid: int
    model_digest: str
    context_tokens: int
    vocab_size: int
    eos_token_ids: list[int]
    vector_width: int = 0
    labels: list[str] = []
    forms: list[EncodeForm] = []


class Status(msgspec.Struct, tag="status", tag_field="t", frozen=True, omit_defaults=True):
    """Heartbeat. ``num_steps`` only grows; work that waits while it stands still means a wedged worker.

    Blocks are KV pages: ``free`` + ``evictable`` (cached, unused) + in use = ``total``.
    """

    state: WorkerState
    num_steps: int
    num_running: int
    num_waiting: int
    free_blocks: int
    evictable_blocks: int
    total_blocks: int
    predicted_step_s: float
    progress_ratio: float = 0.0
    stage: str = ""
    prefill_tokens_per_s: float = 0.0
    num_preemptions: int = 0
    prefix_queries_tokens: int = 0
    prefix_hits_tokens: int = 0
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    step_seconds_total: float = 0.0
    turn_seconds_total: float = 0.0
    turn_wait_seconds_total: float = 0.0


ToWorker = Hello | Submit | Encode | Abort | Drain
FromWorker = Welcome | Status | Step


class FrameReader:
    """Cuts a byte stream into frames. Feed it what arrives, iterate over what is whole.

    Raises:
        ProtocolError: a length over ``MAX_FRAME_BYTES``, or a body that is not one of ``types``.
    """

    def __init__(self, types: object) -> None:
        self._decoder: msgspec.msgpack.Decoder[object] = msgspec.msgpack.Decoder(types)
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> list[object]:
        """Returns the frames that ``data`` completes, in order."""
        from headrace.base.errors import ProtocolError

        self._buffer += data
        frames: list[object] = []
        offset = 0
        while len(self._buffer) - offset >= 4:
            size = int.from_bytes(self._buffer[offset : offset + 4], "big")
            if size > MAX_FRAME_BYTES:
                raise ProtocolError(f"frame of {size} bytes, the limit is {MAX_FRAME_BYTES}")
            end = offset + 4 + size
            if len(self._buffer) < end:
                break
            try:
                frames.append(self._decoder.decode(bytes(self._buffer[offset + 4 : end])))
            except msgspec.MsgspecError as error:
                raise ProtocolError(f"malformed frame: {error}") from error
            offset = end
        del self._buffer[:offset]
        return frames


_encoder = msgspec.msgpack.Encoder()


def encode_frame(frame: ToWorker | FromWorker) -> bytes:
    """Returns the frame's wire bytes, length included."""
    body = _encoder.encode(frame)
    return len(body).to_bytes(4, "big") + body
