"""Turns an encode plan into one VM call, and what the program pooled into vectors."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from headrace.engine.encode_scheduler import EncodePlan
from headrace.engine.executor import Int32s
from headrace.program.records import OUTPUT_DTYPE

Float32s = npt.NDArray[np.float32]
_NO_OUTPUTS = np.empty(0, OUTPUT_DTYPE)
_NO_INTS = np.empty(0, np.int32)


class EncodeVm(Protocol):
    """What is needed of ``kernels.vm.Vm`` here. Legend: R rows, S sequences."""

    def step(
        self,
        tokens: Int32s,
        positions: Int32s,
        seq_starts: Int32s,
        block_tables: Int32s,
        outputs: npt.NDArray[np.void],
        *,
        token_types: Int32s,
    ) -> object:
        """Runs one step: [R], [R], [S + 1], [S, 0], [0] and [R] or [0] in; the arena holds what comes out."""
        ...

    def read_buffer(self, offset: int, rows: int, width: int) -> Float32s:
        """Returns rows of the arena."""
        ...


class EncodeExecutor:
    """Runs plans on a VM.

    Args:
        offset: where the program leaves one row for each sequence.
        width: elements of it.
        max_rows: limit of a plan, as given to the VM.
        has_types: the model tells the second text of a pair by its token type.
    """

    def __init__(self, vm: EncodeVm, *, offset: int, width: int, max_rows: int, has_types: bool) -> None:
        self._vm = vm
        self._offset = offset
        self._width = width
        self._has_types = has_types
        self._iota = np.arange(max_rows, dtype=np.int32)

    def run(self, plan: EncodePlan) -> Float32s:
        """Returns the vectors, [items, width].

        Raises:
            ValueError: the VM refused an id or position: a bug in the bookkeeping above, not in a request.
            MemoryError: no memory for the arrays.
        """
        lengths = [item.num_tokens for item in plan.items]
        starts = np.zeros(len(lengths) + 1, np.int32)
        np.cumsum(lengths, out=starts[1:])
        self._vm.step(
            np.concatenate([item.ids for item in plan.items]),
            np.concatenate([self._iota[:length] for length in lengths]),
            starts,
            np.zeros((len(lengths), 0), np.int32),
            _NO_OUTPUTS,
            token_types=self._types(plan),
        )
        return self._vm.read_buffer(self._offset, len(lengths), self._width)

    def _types(self, plan: EncodePlan) -> Int32s:
        """Returns the token types of the rows, [rows]; none where all are 0."""
        if not self._has_types or not any(item.second_start < item.num_tokens for item in plan.items):
            return _NO_INTS
        return np.concatenate([self._iota[: item.num_tokens] >= item.second_start for item in plan.items]).astype(
            np.int32
        )
