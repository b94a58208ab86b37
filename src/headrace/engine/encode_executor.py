"""Turns an encode plan into one VM call, and what the program left in its buffers into results of the wanted forms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from headrace.engine.encode_scheduler import EncodePlan
from headrace.engine.executor import Float32s, Int32s
from headrace.program.records import OUTPUT_DTYPE
from headrace.protocol.frames import EncodeForm

_NO_INTS = np.empty(0, np.int32)


class EncodeVm(Protocol):
    """What is needed of ``kernels.vm.Vm`` here. Legend: R rows, S sequences, L outputs."""

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
        """Runs one step: [R], [R], [S + 1], [S, 0], [L] and [R] or [0] in; the arena holds what comes out."""
        ...

    def read_buffer(self, offset: int, rows: int, width: int) -> Float32s:
        """Returns rows of the arena."""
        ...


@dataclass(frozen=True, slots=True)
class View:
    """Where the program leaves what a form is made of, a row for each sequence, row or output, and its elements."""

    offset: int
    width: int


class EncodeExecutor:
    """Runs plans on a VM.

    Args:
        views: the forms that the program makes.
        max_rows: limit of a plan, as given to the VM.
        has_types: the model tells the second text of a pair by its token type.
    """

    def __init__(self, vm: EncodeVm, views: Mapping[EncodeForm, View], *, max_rows: int, has_types: bool) -> None:
        self._vm = vm
        self._views = views
        self._has_types = has_types
        self._iota = np.arange(max_rows, dtype=np.int32)

    def run(self, plan: EncodePlan) -> list[Float32s]:
        """Returns the result of each item, of the shape that its form has.

        Raises:
            ValueError: the VM refused an id or position: a bug in the bookkeeping above, not in a request.
            MemoryError: no memory for the arrays.
        """
        lengths = [item.num_tokens for item in plan.items]
        starts = np.zeros(len(lengths) + 1, np.int32)
        np.cumsum(lengths, out=starts[1:])
        marked = [start + mark for start, item in zip(starts.tolist(), plan.items, strict=False) for mark in item.marks]
        self._vm.step(
            np.concatenate([item.ids for item in plan.items]),
            np.concatenate([self._iota[:length] for length in lengths]),
            starts,
            np.zeros((len(lengths), 0), np.int32),
            _outputs(marked),
            token_types=self._types(plan),
        )
        return self._results(plan, starts.tolist(), len(marked))

    def _results(self, plan: EncodePlan, starts: list[int], num_marked: int) -> list[Float32s]:
        wanted = {item.request.encode.form for item in plan.items}
        counts = {EncodeForm.POOLED: len(plan.items), EncodeForm.ROWS: plan.num_rows, EncodeForm.MASKED: num_marked}
        found = {form: self._read(form, counts[form]) for form in wanted}
        results: list[Float32s] = []
        first_mark = 0
        for number, item in enumerate(plan.items):
            form = item.request.encode.form
            match form:
                case EncodeForm.POOLED:
                    results.append(found[form][number])
                case EncodeForm.ROWS:
                    results.append(found[form][starts[number] : starts[number + 1]])
                case EncodeForm.MASKED:
                    stop = first_mark + len(item.marks)
                    results.append(likeliest(found[form][first_mark:stop], item.request.encode.num_top))
                    first_mark = stop
        return results

    def _read(self, form: EncodeForm, count: int) -> Float32s:
        view = self._views[form]
        return self._vm.read_buffer(view.offset, count, view.width)

    def _types(self, plan: EncodePlan) -> Int32s:
        """Returns the token types of the rows, [rows]; none where all are 0."""
        if not self._has_types or not any(item.second_start < item.num_tokens for item in plan.items):
            return _NO_INTS
        return np.concatenate([self._iota[: item.num_tokens] >= item.second_start for item in plan.items]).astype(
            np.int32
        )


def _outputs(rows: list[int]) -> npt.NDArray[np.void]:
    """Returns outputs that only name rows: no token is chosen, for the program has no head."""
    outputs = np.zeros(len(rows), OUTPUT_DTYPE)
    outputs["row"] = rows
    outputs["top_p"] = outputs["repetition"] = 1.0
    outputs["mask"] = outputs["target"] = -1
    return outputs


def likeliest(scores: Float32s, count: int) -> Float32s:
    """Returns for each row of scores [n, vocabulary] the best tokens, [n, count, 2]: id and probability, best first.

    Equal scores come in the order of their ids. f32 holds every id of a vocabulary below 2^24 exactly.
    """
    exact = scores.astype(np.float64)
    powers = np.exp(exact - exact.max(axis=1, keepdims=True))
    shares = powers / powers.sum(axis=1, keepdims=True)
    best = np.argsort(-exact, axis=1, kind="stable")[:, :count]
    chosen = np.take_along_axis(shares, best, axis=1)
    return np.stack([best.astype(np.float32), chosen.astype(np.float32)], axis=2)
