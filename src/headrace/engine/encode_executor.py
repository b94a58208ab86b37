"""Turns an encode plan into one VM call, and what the program pooled into vectors."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from headrace.engine.encode_scheduler import EncodePlan
from headrace.engine.executor import StepVm
from headrace.program.records import OUTPUT_DTYPE

Float32s = npt.NDArray[np.float32]
_NO_OUTPUTS = np.empty(0, OUTPUT_DTYPE)
_NO_INTS = np.empty(0, np.int32)
_NO_FLOATS = np.empty(0, np.float32)
_NO_MASKS = np.empty((0, 0), np.uint32)


class EncodeVm(StepVm, Protocol):
    """What is needed of ``kernels.vm.Vm`` here."""

    def read_buffer(self, offset: int, rows: int, width: int) -> Float32s:
        """Returns rows of the arena."""
        ...


class EncodeExecutor:
    """Runs plans on a VM.

    Args:
        offset: where the program leaves one row for each sequence.
        width: elements of it.
        max_rows: limit of a plan, as given to the VM.
    """

    def __init__(self, vm: EncodeVm, *, offset: int, width: int, max_rows: int) -> None:
        self._vm = vm
        self._offset = offset
        self._width = width
        self._iota = np.arange(max_rows, dtype=np.int32)

    def run(self, plan: EncodePlan) -> Float32s:
        """Returns the vectors, [items, width].

        Raises:
            ValueError: the VM refused an id or position: a bug in the bookkeeping above, not in a request.
            MemoryError: no memory for the arrays.
        """
        lengths = [len(item.ids) for item in plan.items]
        starts = np.zeros(len(lengths) + 1, np.int32)
        np.cumsum(lengths, out=starts[1:])
        self._vm.step(
            np.concatenate([np.array(item.ids, np.int32) for item in plan.items]),
            np.concatenate([self._iota[:length] for length in lengths]),
            starts,
            np.zeros((len(lengths), 0), np.int32),
            _NO_OUTPUTS,
            count_ids=_NO_INTS,
            counts=_NO_INTS,
            bias_ids=_NO_INTS,
            bias_values=_NO_FLOATS,
            masks=_NO_MASKS,
        )
        return self._vm.read_buffer(self._offset, len(lengths), self._width)
