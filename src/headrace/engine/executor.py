"""Turns a step plan into the arrays of one VM call, and the VM's arrays into a step result.

Everything is allocated once. What does not change while a request runs (its sampling row, its block table) is written
when it takes its seat and gathered by slot each step, so a decode step touches a handful of numbers per sequence.
The VM comes in by its shape (``StepVm``): the real one, a fake one in tests, a cost model in the simulator.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from headrace.engine.request import Request
from headrace.engine.step import StepPlan, StepResult
from headrace.program.opcodes import BLOCK_TOKENS
from headrace.program.records import OUTPUT_DTYPE

Int32s = npt.NDArray[np.int32]
Float32s = npt.NDArray[np.float32]
_NO_INTS = np.empty(0, np.int32)
_NO_FLOATS = np.empty(0, np.float32)
_SEED_MASK = 2**64 - 1


class StepVm(Protocol):
    """What the engine needs of ``kernels.vm.Vm``. Legend: R rows, S sequences, B blocks, L output rows."""

    def use_threads(self, count: int) -> None:
        """Sets how many threads the steps from now on use."""
        ...

    def step(
        self,
        tokens: Int32s,
        positions: Int32s,
        seq_starts: Int32s,
        block_tables: Int32s,
        outputs: npt.NDArray[np.void],
        *,
        count_ids: Int32s,
        counts: Int32s,
        bias_ids: Int32s,
        bias_values: Float32s,
        masks: npt.NDArray[np.uint32],
    ) -> tuple[npt.NDArray[np.void], Int32s, Float32s]:
        """Runs one step: [R], [R], [S + 1], [S, B], [L] in; results [L], top ids and log-probs [L, max_top] out."""
        ...

    def decode(
        self,
        tokens: Int32s,
        positions: Int32s,
        seq_starts: Int32s,
        block_tables: Int32s,
        outputs: npt.NDArray[np.void],
        *,
        num_steps: int,
        stop_ids: Int32s,
        stop_starts: Int32s,
        wake_fd: int,
    ) -> tuple[npt.NDArray[np.void], Int32s, Float32s]:
        """Runs decode steps in a row, at most ``num_steps``; the results of all, one step after the other."""
        ...


class _Call(NamedTuple):
    """The arrays of one VM call; views into the executor's own, ``output_positions`` into ``outputs``."""

    tokens: Int32s
    positions: Int32s
    seq_starts: Int32s
    tables: Int32s
    outputs: npt.NDArray[np.void]
    output_positions: Int32s
    count_ids: Int32s
    counts: Int32s
    bias_ids: Int32s
    bias_values: Float32s
    masks: npt.NDArray[np.uint32]


class Executor:
    """Runs plans on a VM.

    Args:
        max_rows, max_sequences: limits of a plan, as given to the VM.
        context_tokens: the longest sequence; sizes the block tables.
        vocab_size: sizes the token masks.
        wake_fd: ends steps in a row when it has something to read; −1 for none.
    """

    def __init__(
        self,
        vm: StepVm,
        *,
        max_rows: int,
        max_sequences: int,
        context_tokens: int,
        vocab_size: int,
        wake_fd: int = -1,
    ) -> None:
        self._vm = vm
        self._wake_fd = wake_fd
        max_blocks = -(-context_tokens // BLOCK_TOKENS)
        self._tokens = np.zeros(max_rows, np.int32)  # [R]
        self._positions = np.zeros(max_rows, np.int32)  # [R]
        self._iota = np.arange(context_tokens, dtype=np.int32)
        self._seq_starts = np.zeros(max_sequences + 1, np.int32)  # [S + 1]
        self._tables = np.zeros((max_sequences, max_blocks), np.int32)  # [S, B] in step order
        self._outputs = np.zeros(max_rows, OUTPUT_DTYPE)  # [L]
        self._masks = np.zeros((max_sequences, -(-vocab_size // 32)), np.uint32)  # [S, words]
        self._slot_tables = np.zeros((max_sequences, max_blocks), np.int32)
        self._slot_num_blocks = [0] * max_sequences
        self._slot_seats = [0] * max_sequences
        self._slot_outputs = np.zeros(max_sequences, OUTPUT_DTYPE)
        score = np.zeros(1, OUTPUT_DTYPE)
        score["top_p"] = score["repetition"] = 1.0
        self._score_row = score[0]
        self._repeat: _Call | None = None  # what was prepared last, where it can be moved on
        self._num_steps = 0  # that were run since
        self._stops: tuple[Int32s, Int32s] | None = None  # stop ids of its sequences, and where each one's begin

    def run(self, plan: StepPlan) -> StepResult:
        """Runs one step, or as many decode steps in a row as the plan allows.

        Raises:
            ValueError: the VM refused an id, position or block: a bug in the bookkeeping above, not in a request.
            MemoryError: no memory for the result arrays.
        """
        call = self._repeat
        if call is not None and plan.is_repeat:
            call.tokens[:] = [chunk.request.last_token for chunk in plan.chunks]
            np.add(call.positions, self._num_steps, out=call.positions)
            np.add(call.output_positions, self._num_steps, out=call.output_positions)
        else:
            call = self._prepare(plan)
        if plan.num_steps > 1:
            return self._decode(plan, call)
        self._num_steps = 1
        results, top_ids, top_logprobs = self._vm.step(
            call.tokens,
            call.positions,
            call.seq_starts,
            call.tables,
            call.outputs,
            count_ids=call.count_ids,
            counts=call.counts,
            bias_ids=call.bias_ids,
            bias_values=call.bias_values,
            masks=call.masks,
        )
        return StepResult(results, top_ids, top_logprobs)

    def _decode(self, plan: StepPlan, call: _Call) -> StepResult:
        if self._stops is None:
            stops = [chunk.request.stop_array for chunk in plan.chunks]
            starts = np.zeros(len(stops) + 1, np.int32)
            np.cumsum([len(ids) for ids in stops], out=starts[1:])
            self._stops = np.concatenate(stops), starts
        stop_ids, stop_starts = self._stops
        results, top_ids, top_logprobs = self._vm.decode(
            call.tokens,
            call.positions,
            call.seq_starts,
            call.tables,
            call.outputs,
            num_steps=plan.num_steps,
            stop_ids=stop_ids,
            stop_starts=stop_starts,
            wake_fd=self._wake_fd,
        )
        self._num_steps = len(results) // len(plan.chunks)
        return StepResult(results, top_ids, top_logprobs)

    def _prepare(self, plan: StepPlan) -> _Call:
        """Fills the arrays for a plan, and keeps them for a repetition where only tokens and positions will move."""
        num_rows = self._write_rows(plan)
        counts, biases, num_masks = self._write_outputs(plan)
        num_sequences = len(plan.chunks)
        outputs = self._outputs[: plan.num_sampled + plan.num_scored]
        call = _Call(
            tokens=self._tokens[:num_rows],
            positions=self._positions[:num_rows],
            seq_starts=self._seq_starts[: num_sequences + 1],
            tables=self._tables[:num_sequences],
            outputs=outputs,
            output_positions=outputs["position"],
            count_ids=np.concatenate([ids for ids, _ in counts]) if counts else _NO_INTS,
            counts=np.concatenate([values for _, values in counts]) if counts else _NO_INTS,
            bias_ids=np.concatenate([ids for ids, _ in biases]) if biases else _NO_INTS,
            bias_values=np.concatenate([values for _, values in biases]) if biases else _NO_FLOATS,
            masks=self._masks[:num_masks],
        )
        has_history = bool(counts or biases or num_masks)  # penalties, bans and masks change from step to step
        self._repeat = None if has_history else call
        self._stops = None
        return call

    def _write_rows(self, plan: StepPlan) -> int:
        """Fills tokens, positions, sequence starts and block tables; returns the number of rows."""
        seats, slot_num_blocks = self._slot_seats, self._slot_num_blocks
        tokens: list[int] = []  # of decode rows; prefill rows leave gaps that are filled below
        positions: list[int] = []
        starts = [0]
        slots = []
        prefills = []
        num_rows = 0
        for chunk in plan.chunks:
            request, start, rows, *_ = chunk
            slot = request.slot
            if seats[slot] != request.seat:
                self._seat(request)
            if slot_num_blocks[slot] != len(request.blocks):
                self._extend_table(request)
            slots.append(slot)
            if rows == 1:
                tokens.append(int(request.tokens[start]) if start + 1 < request.num_tokens else request.last_token)
                positions.append(start)
            else:
                prefills.append((num_rows, chunk))
                tokens += [0] * rows
                positions += [0] * rows
            num_rows += rows
            starts.append(num_rows)
        self._tokens[:num_rows] = tokens
        self._positions[:num_rows] = positions
        for first, chunk in prefills:
            stop = chunk.start + chunk.rows
            self._tokens[first : first + chunk.rows] = chunk.request.tokens[chunk.start : stop]
            self._positions[first : first + chunk.rows] = self._iota[chunk.start : stop]
        self._seq_starts[: len(starts)] = starts
        np.take(self._slot_tables, slots, axis=0, out=self._tables[: len(slots)])
        return num_rows

    def _write_outputs(self, plan: StepPlan) -> tuple[list[tuple[Int32s, Int32s]], list[tuple[Int32s, Float32s]], int]:
        """Fills the output rows and masks; returns the penalty counts, biases and masks that they point into."""
        outputs = self._outputs
        sampled = [(chunk, chunk.request) for chunk in plan.chunks if chunk.is_sampled]
        if sampled:
            outputs[: len(sampled)] = self._slot_outputs[[request.slot for _, request in sampled]]
            last_rows = []
            row = -1
            for chunk in plan.chunks:
                row += chunk.rows
                if chunk.is_sampled:
                    last_rows.append(row)
            outputs["row"][: len(sampled)] = last_rows
            outputs["position"][: len(sampled)] = [request.num_tokens for _, request in sampled]
        counts: list[tuple[Int32s, Int32s]] = []
        biases: list[tuple[Int32s, Float32s]] = []
        num_counts = num_biases = num_masks = 0
        for index, (_, request) in enumerate(sampled):
            if request.counts is not None:
                outputs[index]["counts_start"] = num_counts
                outputs[index]["counts_len"] = len(request.counts.ids)
                counts.append((request.counts.ids, request.counts.counts))
                num_counts += len(request.counts.ids)
            if (bias := request.bias) is not None:
                outputs[index]["bias_start"] = num_biases
                outputs[index]["bias_len"] = len(bias[0])
                biases.append(bias)
                num_biases += len(bias[0])
            if request.has_mask:
                outputs[index]["mask"] = num_masks
                request.fill_mask(self._masks[num_masks])
                num_masks += 1
        if plan.num_scored:
            self._write_scores(plan, len(sampled))
        return counts, biases, num_masks

    def _write_scores(self, plan: StepPlan, first: int) -> None:
        outputs = self._outputs
        first_row = 0
        for chunk in plan.chunks:
            count = chunk.score_stop - chunk.score_start
            if count:
                here = outputs[first : first + count]
                here[:] = self._score_row
                row = first_row + chunk.score_start - 1 - chunk.start
                here["row"] = self._iota[:count] + row
                here["position"] = self._iota[:count] + chunk.score_start
                here["target"] = chunk.request.tokens[chunk.score_start : chunk.score_stop]
                here["num_logprobs"] = chunk.request.submit.echo_logprobs
                here["mask"] = -1
                first += count
            first_row += chunk.rows

    def _seat(self, request: Request) -> None:
        """Writes what stays as it is while the request keeps its slot."""
        slot = request.slot
        sampling = request.submit.sampling
        row = self._slot_outputs[slot]
        row["top_k"] = sampling.top_k
        row["temperature"] = sampling.temperature
        row["top_p"] = sampling.top_p
        row["min_p"] = sampling.min_p
        row["repetition"] = sampling.repetition_penalty
        row["presence"] = sampling.presence_penalty
        row["frequency"] = sampling.frequency_penalty
        row["seed"] = sampling.seed & _SEED_MASK
        row["num_logprobs"] = -1 if sampling.num_logprobs is None else sampling.num_logprobs
        row["target"] = -1
        row["mask"] = -1
        row["counts_start"] = row["counts_len"] = row["bias_start"] = row["bias_len"] = 0
        self._slot_seats[slot] = request.seat
        self._slot_num_blocks[slot] = 0

    def _extend_table(self, request: Request) -> None:
        slot = request.slot
        known = self._slot_num_blocks[slot]
        self._slot_tables[slot, known : len(request.blocks)] = request.blocks[known:]
        self._slot_num_blocks[slot] = len(request.blocks)
