"""The logical program: a list of fused instructions over named row buffers and a table of weights.

Plain frozen data. ``builder`` makes it, ``verify`` proves it, ``cost`` and ``interpret`` read it, ``encode`` lowers it
to the VM's records. Buffers have one symbolic dimension, the rows of the step; a buffer is ``[rows, width]`` f32.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from headrace.program.model import ModelSpec, RopeSpec
from headrace.program.opcodes import FIELDS, Epilogue, Opcode

NONE = -1
"""No weight, or no buffer, in a field that allows it."""


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of one source tensor inside a fused weight. ``role`` is family-neutral, e.g. ``layers.3.q``."""

    role: str
    n: int


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """One entry of the weight table.

    Args:
        index: position in the table; instructions name weights by it.
        name: for people, e.g. ``layers.3.qkv``.
        kind: ``matrix`` ([n, k], packed), ``vector`` ([n] f32, k = 1), ``rope`` ([n positions, k turning] f32).
        n: output columns, the sum of the parts' rows.
        k: inputs.
        parts: source tensors in order; empty for ``rope``, which is computed.
        interleave: 0 concatenates the parts; with 16 they come in pairs, and 16 rows of each of the two are taken in
            turn, pair after pair (vectors likewise).
        rope: frequencies of a ``rope``, else None.
    """

    index: int
    name: str
    kind: str
    n: int
    k: int
    parts: tuple[Part, ...] = ()
    interleave: int = 0
    rope: RopeSpec | None = None


@dataclass(frozen=True, slots=True)
class Buffer:
    """Rows of activations: ``[rows, width]`` f32, row-major."""

    index: int
    name: str
    width: int


@dataclass(frozen=True, slots=True)
class Instruction:
    """One fused instruction. ``values`` has every field of the opcode; buffer fields hold buffer indices.

    Args:
        phase: instructions of one phase run without a barrier between them; phases never fall along the list.
    """

    opcode: Opcode
    phase: int
    values: Mapping[str, float]

    def integer(self, name: str) -> int:
        """Returns an integral field (count, weight or buffer index, enumerator)."""
        return int(self.values[name])


@dataclass(frozen=True, slots=True)
class Effect:
    """Which buffers an instruction reads whole, reads at the places it writes (in place), and writes."""

    reads: tuple[int, ...]
    updates: tuple[int, ...]
    writes: tuple[int, ...]


_READS = {
    Opcode.EMBED: (),
    Opcode.LINEAR: ("input",),
    Opcode.QKV: ("input",),
    Opcode.ATTENTION: ("q",),
    Opcode.HEAD: ("input",),
    Opcode.NORM: ("input",),
    Opcode.MOE: ("input",),
    Opcode.POOL: ("input",),
    Opcode.PREPARE: ("input",),
    Opcode.ROTATE: ("q", "keys", "values"),
    Opcode.GATE: ("gate", "up"),
    Opcode.PICK: ("input",),
}
_WRITES = {
    Opcode.EMBED: ("out",),
    Opcode.LINEAR: ("out",),
    Opcode.QKV: ("q_out",),
    Opcode.ATTENTION: ("out",),
    Opcode.HEAD: (),
    Opcode.NORM: ("out",),
    Opcode.MOE: ("out",),
    Opcode.POOL: ("out",),
    Opcode.PREPARE: ("out",),
    Opcode.ROTATE: ("q_out",),
    Opcode.GATE: ("out",),
    Opcode.PICK: ("out",),
}
_APPENDS = (Opcode.QKV, Opcode.ROTATE)


def effect(instruction: Instruction) -> Effect:
    """Returns the buffers that ``instruction`` touches."""
    named = (instruction.integer(name) for name in _READS[instruction.opcode])
    reads = tuple(index for index in named if index != NONE)
    writes = tuple(instruction.integer(name) for name in _WRITES[instruction.opcode])
    is_update = instruction.opcode is Opcode.MOE or instruction.values.get("epilogue") == Epilogue.ADD
    return Effect(reads, writes if is_update else (), () if is_update else writes)


def kv_written(instruction: Instruction) -> int | None:
    """Returns the layer (or STEP_PAGES) whose KV pages the instruction appends to, or None."""
    return instruction.integer("layer") if instruction.opcode in _APPENDS else None


def kv_read(instruction: Instruction) -> int | None:
    """Returns the layer (or STEP_PAGES) whose KV pages the instruction reads, or None."""
    return instruction.integer("layer") if instruction.opcode is Opcode.ATTENTION else None


def weights_read(instruction: Instruction) -> tuple[int, ...]:
    """Returns the indices of the weights that the instruction uses."""
    fields = FIELDS[instruction.opcode]
    indices = [instruction.integer(field.name) for field in fields if field.type == "weight"]
    return tuple(index for index in indices if index != NONE)


def result(program: Program) -> int | None:
    """Returns the buffer that a program without HEAD leaves its result in, None where a head chooses tokens.

    It has more than that one where ``Program.kept`` says so.
    """
    if not program.instructions or (last := program.instructions[-1]).opcode is Opcode.HEAD:
        return None
    return last.integer(_WRITES[last.opcode][0])


@dataclass(frozen=True, slots=True)
class Program:
    """What one step computes, for any number of rows. It ends with HEAD, or its last instruction writes the result.

    ``kept`` are buffers that hold what was written to them until the step ends, for whoever reads them then.

    ``digest`` is the SHA-256 of the instructions, weight table and buffers: equal digests compute the same function of
    equal weights. It stands in bug reports and benchmark output.
    """

    spec: ModelSpec
    instructions: tuple[Instruction, ...]
    weights: tuple[WeightSpec, ...]
    buffers: tuple[Buffer, ...]
    digest: str = ""
    kept: tuple[int, ...] = ()


def seal(program: Program) -> Program:
    """Returns the program with its digest filled in and its field mappings made read-only."""
    instructions = tuple(
        Instruction(item.opcode, item.phase, MappingProxyType(dict(item.values))) for item in program.instructions
    )
    hasher = hashlib.sha256()
    for item in instructions:
        hasher.update(f"{int(item.opcode)} {item.phase} {sorted(item.values.items())}\n".encode())
    for weight in program.weights:
        hasher.update(f"{weight}\n".encode())
    for buffer in program.buffers:
        hasher.update(f"{buffer}\n".encode())
    for index in program.kept:
        hasher.update(f"kept {index}\n".encode())
    return Program(program.spec, instructions, program.weights, program.buffers, hasher.hexdigest(), kept=program.kept)
