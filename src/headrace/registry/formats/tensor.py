"""A stored tensor as the parsers hand it on, and the element types that files may name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Stored:
    """How an element type lies in a file: ``block_values`` values share ``block_bytes`` bytes."""

    block_values: int
    block_bytes: int


STORED: dict[str, Stored] = {
    "F64": Stored(1, 8),
    "F32": Stored(1, 4),
    "F16": Stored(1, 2),
    "BF16": Stored(1, 2),
    "F8_E4M3": Stored(1, 1),
    "F8_E5M2": Stored(1, 1),
    "BOOL": Stored(1, 1),
    "I64": Stored(1, 8),
    "I32": Stored(1, 4),
    "I16": Stored(1, 2),
    "I8": Stored(1, 1),
    "U64": Stored(1, 8),
    "U32": Stored(1, 4),
    "U16": Stored(1, 2),
    "U8": Stored(1, 1),
    "Q4_0": Stored(32, 18),
    "Q4_1": Stored(32, 20),
    "Q5_0": Stored(32, 22),
    "Q5_1": Stored(32, 24),
    "Q8_0": Stored(32, 34),
    "Q2_K": Stored(256, 84),
    "Q3_K": Stored(256, 110),
    "Q4_K": Stored(256, 144),
    "Q5_K": Stored(256, 176),
    "Q6_K": Stored(256, 210),
    "IQ2_XXS": Stored(256, 66),
    "IQ2_XS": Stored(256, 74),
    "IQ3_XXS": Stored(256, 98),
    "IQ1_S": Stored(256, 50),
    "IQ4_NL": Stored(32, 18),
    "IQ3_S": Stored(256, 110),
    "IQ2_S": Stored(256, 82),
    "IQ4_XS": Stored(256, 136),
    "IQ1_M": Stored(256, 56),
    "TQ1_0": Stored(256, 54),
    "TQ2_0": Stored(256, 66),
    "MXFP4": Stored(32, 17),
}
"""By name. Names of safetensors and of ggml; where both have one they mean the same bytes."""


@dataclass(frozen=True, slots=True)
class TensorView:
    """One tensor inside a memory-mapped file.

    Args:
        dtype: a key of ``STORED``, or ``AWQ``, ``GPTQ``, ``GPTQ act-order`` where ``packed`` is given.
        shape: row-major, ``(out, in)`` for a matrix.
        raw: the bytes, a view of the map; their number is exactly what dtype and shape ask for.
        packed: what else a matrix of 4-bit integers in 32-bit words consists of; ``raw`` are the words.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    raw: memoryview
    packed: PackedLinear | None = None

    @property
    def data(self) -> NDArray[np.uint8]:
        """The bytes as an array, uint8 [bytes], without a copy; of a map it is read-only."""
        # Late: who only reads headers (supervisor, front) does without numpy, 0.1 s of CPU and 10 MiB a process.
        import numpy as np

        return np.frombuffer(self.raw, np.uint8)


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """The companions of an AWQ or GPTQ matrix [n, k] (``registry.formats.packed_linear``).

    Args:
        zeros: I32 [groups, n/8], eight zero points a word.
        scales: F16, BF16 or F32 [groups, n].
        order: I32 [k], the group of every input, where groups are not runs of inputs; else None.
        zero_offset: what must be added to stored zero points.
    """

    zeros: TensorView
    scales: TensorView
    order: TensorView | None
    zero_offset: int


def size_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Returns the bytes of a tensor; the innermost dimension must be a whole number of blocks."""
    stored = STORED[dtype]
    return prod(shape) // stored.block_values * stored.block_bytes
