"""What a step must move and compute, per instruction: the numerators of "share of the machine's limit".

Bytes count every weight once per step, KV pages read and written, and activation rows once where they are read and
once where they are written; caches can only make it less. Operations count multiply and add as two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from headrace.program.ir import NONE, Instruction, Program, WeightSpec
from headrace.program.opcodes import GROUP, LANES, Domain, Epilogue, KvType, Layout, Opcode, Pooling

_F32 = 4


def layout_bytes(layout: Layout, n: int, k: int) -> int:
    """Returns the packed size of an [n, k] weight (``Layout`` says how it lies)."""
    tiles, groups = -(-n // LANES), k // GROUP
    match layout:
        case Layout.VECTOR_F32:
            return n * _F32
        case Layout.ROPE_F32:
            return n * k * _F32
        case Layout.F32:
            return tiles * LANES * k * _F32
        case Layout.BF16 | Layout.F16:
            return tiles * LANES * k * 2
        case Layout.Q8:
            return tiles * groups * (LANES * 2 + LANES * GROUP)
        case Layout.Q4:
            return tiles * groups * (LANES * 2 + LANES * GROUP // 2)
        case Layout.Q4M:
            return tiles * groups * (LANES * 4 + LANES * GROUP // 2)


@dataclass(frozen=True, slots=True)
class Work:
    """A step's size.

    Args:
        rows: rows of the step.
        sequences: sequences of the step.
        outputs: rows that choose or score a token.
        contexts: per row, positions that it sees, itself included.
    """

    rows: int
    outputs: int
    contexts: Sequence[int]
    sequences: int = 1


@dataclass(frozen=True, slots=True)
class Cost:
    """Bytes moved to or from memory, by what they are, and arithmetic operations."""

    weight_bytes: int = 0
    kv_bytes: int = 0
    activation_bytes: int = 0
    operations: int = 0

    @property
    def bytes_moved(self) -> int:
        """All bytes together."""
        return self.weight_bytes + self.kv_bytes + self.activation_bytes

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.weight_bytes + other.weight_bytes,
            self.kv_bytes + other.kv_bytes,
            self.activation_bytes + other.activation_bytes,
            self.operations + other.operations,
        )


class Arithmetic(IntEnum):
    """What the products of a matrix are computed in; the numbers are those of ``csrc/core/kernels.h``."""

    INT8 = 0
    BF16 = 1
    FP32 = 2


def arithmetic_of(layout: Layout) -> Arithmetic:
    """Returns what products with weights of that layout are computed in, on the fastest instruction set."""
    match layout:
        case Layout.Q8 | Layout.Q4 | Layout.Q4M:
            return Arithmetic.INT8
        case Layout.BF16:
            return Arithmetic.BF16
        case Layout.F16 | Layout.F32 | Layout.VECTOR_F32 | Layout.ROPE_F32:
            return Arithmetic.FP32


def limit_s(bytes_moved: float, operations: float, *, bandwidth: float, peak: float) -> float:
    """Returns the least seconds that a machine needs: the one formula behind every "share of the limit" (DESIGN §8).

    Args:
        bandwidth: bytes per second, probed on a buffer as large as what is moved.
        peak: operations per second, probed in registers.
    """
    return max(bytes_moved / bandwidth, operations / peak)


def instruction_cost(
    program: Program, item: Instruction, layouts: Mapping[int, Layout], kv_type: KvType, work: Work
) -> Cost:
    """Returns the cost of one instruction.

    Args:
        layouts: layout of each weight by index.
        kv_type: element type of the KV pool.
    """

    def weight(*names: str) -> int:
        total = 0
        for index in (item.integer(name) for name in names):
            if index != NONE:
                found: WeightSpec = program.weights[index]
                total += layout_bytes(layouts[index], found.n, found.k)
        return total

    def row_bytes(name: str, width: int) -> int:
        index = item.integer(name)
        return 0 if index == NONE else layout_bytes(layouts[index], LANES, width) // LANES

    def rows_of(item: Instruction) -> int:
        match Domain(item.integer("domain")):
            case Domain.ROWS:
                return work.rows
            case Domain.SEQUENCES:
                return work.sequences
            case Domain.OUTPUTS:
                return work.outputs

    element = _F32 if kv_type is KvType.F32 else 2
    match item.opcode:
        case Opcode.EMBED:
            width = item.integer("width")
            row = sum(row_bytes(name, width) for name in ("table", "positions", "types"))
            return Cost(row * work.rows, 0, work.rows * width * _F32, work.rows * width)
        case Opcode.LINEAR:
            n, k = item.integer("n"), item.integer("k")
            out = n // 2 if item.integer("epilogue") == Epilogue.GLU else n
            passes = 2 if item.integer("epilogue") == Epilogue.ADD else 1
            rows = rows_of(item)
            return Cost(
                weight("weight", "bias", "norm_weight", "norm_bias"),
                0,
                rows * (k + out * passes) * _F32,
                2 * rows * n * k,
            )
        case Opcode.QKV:
            k, heads, kv_heads = item.integer("k"), item.integer("heads"), item.integer("kv_heads")
            size = item.integer("head_size")
            return Cost(
                weight("weight", "bias", "norm_weight", "norm_bias", "q_norm", "k_norm"),
                work.rows * 2 * kv_heads * size * element,
                work.rows * (k + heads * size) * _F32,
                2 * work.rows * (heads + 2 * kv_heads) * size * k,
            )
        case Opcode.ATTENTION:
            heads, kv_heads = item.integer("heads"), item.integer("kv_heads")
            size, window = item.integer("head_size"), item.integer("window")
            seen = sum(min(context, window) if window else context for context in work.contexts)
            return Cost(
                0,
                seen * 2 * kv_heads * size * element,
                2 * work.rows * heads * size * _F32,
                4 * seen * heads * size,
            )
        case Opcode.HEAD:
            k, vocab = item.integer("k"), item.integer("vocab")
            return Cost(
                weight("weight", "norm_weight", "norm_bias") if work.outputs else 0,
                0,
                work.outputs * k * _F32,
                2 * work.outputs * vocab * k,
            )
        case Opcode.NORM:
            k, passes = item.integer("k"), 3 if item.integer("epilogue") == Epilogue.ADD else 2
            rows = rows_of(item)
            return Cost(weight("norm_weight", "norm_bias"), 0, rows * k * passes * _F32, 4 * rows * k)
        case Opcode.POOL:
            k = item.integer("k")
            rows = work.rows if item.integer("pooling") == Pooling.MEAN else work.sequences
            read_bytes, written_bytes = rows * k * _F32, work.sequences * k * _F32
            return Cost(weight("norm_weight", "norm_bias"), 0, read_bytes + written_bytes, 4 * rows * k)
        case Opcode.PREPARE:
            rows, k = rows_of(item), item.integer("k")
            return Cost(0, 0, 2 * rows * k * _F32, 2 * rows * k)
        case Opcode.ROTATE:
            heads, kv_heads = item.integer("heads"), item.integer("kv_heads")
            size = item.integer("head_size")
            kv_elements = 2 * work.rows * kv_heads * size
            moved = (2 * work.rows * heads * size + kv_elements) * _F32
            return Cost(weight("q_norm", "k_norm"), kv_elements * element, moved, 3 * work.rows * heads * size)
        case Opcode.GATE:
            passes = 2 if item.integer("up") == NONE else 3
            return Cost(0, 0, work.rows * item.integer("width") * passes * _F32, work.rows * item.integer("width"))
        case Opcode.PICK:
            return Cost(0, 0, 2 * work.outputs * item.integer("k") * _F32, 0)
        case Opcode.MOE:
            k, hidden, experts = item.integer("k"), item.integer("hidden"), item.integer("experts")
            pairs = work.rows * item.integer("top_k")
            # Experts that the step's rows may take at most; each is read once.
            read = min(experts, pairs)
            return Cost(
                weight("router", "norm_weight", "norm_bias") + weight("gate_up", "down") * read // experts,
                0,
                (work.rows * 3 * k + pairs * 2 * hidden) * _F32,
                2 * work.rows * experts * k + 6 * pairs * hidden * k,
            )


def step_cost(program: Program, layouts: Mapping[int, Layout], kv_type: KvType, work: Work) -> Cost:
    """Returns the cost of a whole step."""
    total = Cost()
    for item in program.instructions:
        total = total + instruction_cost(program, item, layouts, kv_type, work)
    return total
