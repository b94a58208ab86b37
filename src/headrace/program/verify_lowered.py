"""Proves that a program's binary form says what the program says, and that no memory is written that is still needed.

The records are replayed against the bytes of the arena, without using what ``encode`` believes about lifetimes.

Rules (each has a mutant in the tests):
    arena       offsets are aligned and inside, records say what the program says
    aliasing    no write overlaps bytes that a later read still needs
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from headrace.program.domains import buffer_sizes
from headrace.program.encode import ALIGNMENT_BYTES, Encoded
from headrace.program.ir import NONE, Instruction, Program, effect, result
from headrace.program.opcodes import FIELDS, RECORD_BYTES
from headrace.program.records import unpack_record
from headrace.program.verify import Fault, ProgramError, where_of


def verify_encoded(program: Program, encoded: Encoded) -> None:
    """Returns when ``encoded`` is a sound lowering of ``program``.

    Raises:
        ProgramError: names the first rule that is broken, and where.
    """
    for fault in encoded_faults(program, encoded):
        raise ProgramError(fault)


def encoded_faults(program: Program, encoded: Encoded) -> list[Fault]:
    """Returns what is wrong with a lowering: see the rules ``arena`` and ``aliasing``."""
    count = len(program.instructions)
    if len(encoded.records) != count * RECORD_BYTES:
        return [Fault("arena", "records", f"{len(encoded.records)} bytes for {count} instructions")]
    offsets: dict[int, int] = {}
    sizes = buffer_sizes(program, encoded.limits)
    found: list[Fault] = []
    for number, item in enumerate(program.instructions):
        found += _record(encoded, sizes, offsets, number, item)
    if not found:
        found += _aliasing(program, sizes, offsets)
    return found


def _record(
    encoded: Encoded, sizes: list[int], offsets: dict[int, int], number: int, item: Instruction
) -> Iterator[Fault]:
    where = where_of(number, item)
    opcode, phase, values = unpack_record(encoded.records[number * RECORD_BYTES : (number + 1) * RECORD_BYTES])
    if (opcode, phase) != (item.opcode, item.phase):
        yield Fault("arena", where, f"its record is {opcode.name} in phase {phase}")
        return
    for field in FIELDS[opcode]:
        want, got = item.values[field.name], values[field.name]
        if field.type == "buffer" and want == NONE:
            if got != NONE:
                yield Fault("arena", where, f"{field.name} is {got}, it has none")
        elif field.type == "buffer":
            index, offset = int(want), int(got)
            size = sizes[index]
            if offsets.setdefault(index, offset) != offset:
                yield Fault("arena", where, f"{field.name} lies at {offset} here and at {offsets[index]} elsewhere")
            if offset < 0 or offset % ALIGNMENT_BYTES or offset + size > encoded.arena_bytes:
                yield Fault("arena", where, f"{field.name} at {offset} + {size} of {encoded.arena_bytes}")
        elif field.type == "f32":
            if not math.isclose(want, got, rel_tol=2**-23):
                yield Fault("arena", where, f"{field.name} is {got}, not {want}")
        elif want != got:
            yield Fault("arena", where, f"{field.name} is {got}, not {want}")


def _aliasing(program: Program, sizes: list[int], offsets: dict[int, int]) -> Iterator[Fault]:
    """Replays the records phase by phase: a read must find all bytes of its buffer as its writer left them."""

    def extent(index: int) -> tuple[int, int]:
        return offsets[index], offsets[index] + sizes[index]

    def overlaps(left: int, right: int) -> bool:
        (a, b), (c, d) = extent(left), extent(right)
        return a < d and c < b

    intact: set[int] = set()
    phases: dict[int, list[int]] = {}
    for number, item in enumerate(program.instructions):
        phases.setdefault(item.phase, []).append(number)
    for numbers in phases.values():
        touched = [(number, effect(program.instructions[number])) for number in numbers]
        for number, seen in touched:
            where = where_of(number, program.instructions[number])
            for index in (*seen.reads, *seen.updates):
                if index not in intact:
                    yield Fault("aliasing", where, f"{program.buffers[index].name} was overwritten by another buffer")
            changes = {*seen.updates, *seen.writes}
            for other_number, other in touched:
                for index in changes:
                    for used in (*other.reads, *other.updates, *other.writes):
                        if used != index and overlaps(index, used):
                            clash = f"{program.buffers[index].name} overlaps {program.buffers[used].name}"
                            yield Fault("aliasing", where, f"{clash}, used by instruction {other_number}")
        for _, seen in touched:
            for index in (*seen.updates, *seen.writes):
                intact -= {other for other in intact if other != index and overlaps(index, other)}
                intact.add(index)
    left = result(program)
    if left is not None and left not in intact:
        yield Fault("aliasing", "program", f"{program.buffers[left].name}, the result, was overwritten")
