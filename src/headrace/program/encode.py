"""Lowers a logical program to the VM's records: buffers get arena offsets, instructions get their binary form.

A buffer lives from its first write to its last touch, counted in phases, and two buffers share memory only when no
phase sees both alive: instructions of one phase run at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.base.errors import ModelTooLargeError
from headrace.program.domains import RowLimits, buffer_sizes
from headrace.program.ir import NONE, Program, effect
from headrace.program.opcodes import FIELDS
from headrace.program.records import pack_record

ALIGNMENT_BYTES = 64
"""A cache line, and the widest vector register."""
MAX_ARENA_BYTES = 2**40
"""Far above any machine; keeps offsets in range whatever the limits of a step say."""


@dataclass(frozen=True, slots=True)
class BoundBuffer:
    """Where a buffer lies: ``[most rows of its domain, width]`` f32 at ``offset`` of the arena, alive in phases
    [start, stop].
    """

    name: str
    offset: int
    width: int
    size_bytes: int
    start_phase: int
    stop_phase: int


@dataclass(frozen=True, slots=True)
class Encoded:
    """What the VM is made from: ``RECORD_BYTES`` per instruction, and the arena that they index.

    ``limits`` are what the VM must be given too.
    """

    records: bytes
    arena_bytes: int
    buffers: tuple[BoundBuffer, ...]
    limits: RowLimits

    def buffer(self, name: str) -> BoundBuffer:
        """Returns the buffer called ``name``."""
        return next(buffer for buffer in self.buffers if buffer.name == name)


def lifetimes(program: Program) -> list[tuple[int, int] | None]:
    """Returns per buffer the first and last phase that touches it, None for one that nothing touches."""
    spans: list[tuple[int, int] | None] = [None] * len(program.buffers)
    for item in program.instructions:
        seen = effect(item)
        for index in (*seen.reads, *seen.updates, *seen.writes):
            span = spans[index]
            spans[index] = (item.phase, item.phase) if span is None else (min(span[0], item.phase), item.phase)
    for index in program.kept:
        span = spans[index]
        assert span is not None, "nothing writes a buffer that is kept"
        spans[index] = (span[0], program.instructions[-1].phase)
    return spans


def encode(program: Program, limits: RowLimits | int) -> Encoded:
    """Returns the program's binary form for steps within ``limits``; a number is ``RowLimits.of_rows``.

    Offsets are first-fit in order of birth: with a chain of layers this reuses the same few buffers for all of them.

    Raises:
        ModelTooLargeError: the arena would pass ``MAX_ARENA_BYTES``.
    """
    if isinstance(limits, int):
        limits = RowLimits.of_rows(limits)
    assert min(limits.rows, limits.sequences, limits.outputs) > 0
    spans = lifetimes(program)
    sizes = buffer_sizes(program, limits)
    order = sorted((span[0], index) for index, span in enumerate(spans) if span is not None)
    placed: list[BoundBuffer] = []
    by_index: dict[int, BoundBuffer] = {}
    for start, index in order:
        span = spans[index]
        assert span is not None
        buffer = program.buffers[index]
        size = -(-sizes[index] // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        alive = sorted(
            (other for other in placed if other.stop_phase >= start and other.start_phase <= span[1]),
            key=lambda other: other.offset,
        )
        offset = 0
        for other in alive:
            if offset + size <= other.offset:
                break
            offset = max(offset, other.offset + other.size_bytes)
        bound = BoundBuffer(buffer.name, offset, buffer.width, size, span[0], span[1])
        placed.append(bound)
        by_index[index] = bound
    arena_bytes = max((bound.offset + bound.size_bytes for bound in placed), default=0)
    if arena_bytes > MAX_ARENA_BYTES:
        raise ModelTooLargeError(
            f"activations of {limits.rows} rows take {arena_bytes} bytes, the limit is {MAX_ARENA_BYTES}: "
            "lower the rows of a step"
        )
    records = []
    for item in program.instructions:
        values: dict[str, float] = {}
        for field in FIELDS[item.opcode]:
            value = item.values[field.name]
            if field.type == "buffer":
                index = int(value)
                value = NONE if index == NONE else by_index[index].offset
            values[field.name] = value
        records.append(pack_record(item.opcode, item.phase, **values))
    return Encoded(b"".join(records), arena_bytes, tuple(placed), limits)
