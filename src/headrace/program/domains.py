"""What each buffer has a row for, and how many rows that is at most: memory is reserved by it.

A classifier has a row for each sequence, the scores of masked words one for each mark. With a row of every token of the
step they would take 1.6 GB for ModernBERT's whole context.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.program.ir import NONE, Instruction, Program, effect
from headrace.program.opcodes import Domain, Opcode


@dataclass(frozen=True, slots=True)
class RowLimits:
    """The most that a step has of each domain: rows, sequences and output rows."""

    rows: int
    sequences: int
    outputs: int

    @classmethod
    def of_rows(cls, rows: int) -> RowLimits:
        """Returns the limits of steps whose every row may be a sequence of its own and have an output."""
        return cls(rows, rows, rows)

    def most(self, domain: Domain) -> int:
        """Returns the rows of a buffer of this domain."""
        match domain:
            case Domain.ROWS:
                return self.rows
            case Domain.SEQUENCES:
                return self.sequences
            case Domain.OUTPUTS:
                return self.outputs


def domain_read(item: Instruction) -> Domain:
    """Returns what the buffers that an instruction reads have a row for."""
    if item.opcode is Opcode.HEAD and item.integer("weight") == NONE:
        return Domain.OUTPUTS  # it only chooses, from logits of the output rows
    return Domain(int(item.values.get("domain", Domain.ROWS)))


def domain_written(item: Instruction) -> Domain:
    """Returns what the buffers that an instruction writes have a row for."""
    match item.opcode:
        case Opcode.POOL:
            return Domain.SEQUENCES
        case Opcode.PICK:
            return Domain.OUTPUTS
        case _:
            return domain_read(item)


def buffer_sizes(program: Program, limits: RowLimits) -> list[int]:
    """Returns the bytes of each buffer: the most rows of any domain that it is written in, f32.

    One that nothing writes has none.
    """
    rows = [0] * len(program.buffers)
    for item in program.instructions:
        seen = effect(item)
        for index in (*seen.updates, *seen.writes):
            rows[index] = max(rows[index], limits.most(domain_written(item)))
    return [count * buffer.width * 4 for count, buffer in zip(rows, program.buffers, strict=True)]
