"""The typed handle of the native virtual machine: packing, probing, and running steps.

Everything numerical lives in ``csrc``; this module checks types, allocates results and turns the native library's
complaints into the error tree. Nothing here runs a model without the native library.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.base.errors import MachineError, ModelFormatError
from headrace.program.cost import Arithmetic
from headrace.program.opcodes import RECORD_BYTES, KvType, Layout, Opcode
from headrace.program.records import OUTPUT_DTYPE, RESULT_DTYPE, PackedLike

try:
    from headrace.kernels import _native
except ImportError as missing:
    raise MachineError(
        f"the native library of Headrace cannot be loaded ({missing})",
        hint="install Headrace with a C++20 compiler present, or run scripts/build-native in a source tree",
    ) from missing

ISA_VARIABLE = "HEADRACE_ISA"
"""Environment override of the instruction set; an explicit argument wins."""
_ALIGNMENT = 64
_RANKED_ISAS = ("scalar", "avx2", "avx512", "avx512bf16")


@dataclass(frozen=True, slots=True)
class KvConfig:
    """The KV pool: ``blocks`` pages of 32 tokens for every layer."""

    type: KvType
    layers: int
    kv_heads: int
    head_size: int
    blocks: int


def available_isas() -> list[str]:
    """Instruction sets that this build holds and this CPU runs, best last; ``scalar`` is always there."""
    return _native.available_isas()


def best_isa() -> str:
    """The instruction set to use: ``HEADRACE_ISA`` where it is set, else the best available.

    Raises:
        MachineError: the variable names one that this build or CPU does not have.
    """
    wanted = os.environ.get(ISA_VARIABLE)
    return available_isas()[-1] if not wanted else _known_isa(wanted)


def _known_isa(isa: str) -> str:
    available = available_isas()
    if isa not in available:
        raise MachineError(
            f"instruction set {isa!r} is not available, this build and CPU have {', '.join(available)}",
            hint=f"unset {ISA_VARIABLE} to use the best",
        )
    return isa


def cpu_features() -> dict[str, bool]:
    """CPU features that the kernels ask about, and whether CPU and operating system offer them."""
    return dict(_native.cpu_features())


def kernel_names(isa: str) -> dict[Opcode, str | None]:
    """For each opcode, the instruction set that its kernel in table ``isa`` was written in; None where it has none.

    A name other than ``isa`` is a slower stand-in.
    """
    try:
        return {Opcode(number): name for number, name in _native.kernel_names(isa)}
    except ValueError as error:
        raise MachineError(str(error)) from error


def aligned_empty(size_bytes: int) -> NDArray[np.uint8]:
    """An uninitialised 64-byte aligned array, as weights must be."""
    memory = np.empty(size_bytes + _ALIGNMENT, dtype=np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size_bytes]


class WeightMemory:
    """One allocation for many weights: the system backs it by huge pages, which arrays below 4 MB never get.

    Decode reads all weights once per token; with 4 KB pages it reaches about half of the memory's bandwidth.
    """

    def __init__(self, size_bytes: int) -> None:
        """Takes room for arrays whose sizes, each rounded up to 64, add up to ``size_bytes``."""
        self._memory = aligned_empty(size_bytes)
        self._taken_bytes = 0
        self._lock = threading.Lock()

    def take(self, size_bytes: int) -> NDArray[np.uint8]:
        """Returns the next ``size_bytes``, aligned; an array of its own when there is no room left. Thread-safe."""
        with self._lock:
            start = self._taken_bytes
            stop = start + size_bytes
            if stop > self._memory.size:
                return aligned_empty(size_bytes)
            self._taken_bytes = stop + -stop % _ALIGNMENT
        return self._memory[start:stop]


def packed_bytes(layout: Layout, n: int, k: int) -> int:
    """Size of a packed matrix of ``n`` columns and ``k`` inputs."""
    return _native.packed_bytes(layout, n, k)


def pack(
    layout: Layout,
    source: str,
    raw: NDArray[np.generic],
    n: int,
    k: int,
    *,
    threads: int = 1,
    memory: WeightMemory | None = None,
) -> NDArray[np.uint8]:
    """Packs a matrix for the VM. Formats that hold the same numbers are copied bit for bit, others go through f32.

    Args:
        layout: a matrix layout.
        source: ``F32``, ``BF16``, ``F16`` (raw is [n, k] of that width) or a block of GGUF: ``Q4_0``, ``Q4_1``,
            ``Q5_0``, ``Q5_1``, ``Q8_0``, ``Q4_K``, ``Q5_K``, ``Q6_K``.
        raw: the source in row-major order, any dtype of the right total size.
        n: output columns of the product, any positive number.
        k: inputs, a multiple of 32, and of 256 for the three of K.
        threads: how many to use.
        memory: where the result shall lie; None gives it an array of its own.

    Raises:
        ModelFormatError: the shape, the size or the values do not allow it.
    """
    try:
        size = _native.packed_bytes(layout, n, k)
        out = aligned_empty(size) if memory is None else memory.take(size)
        _native.pack(layout, source, _as_bytes(raw), n, k, threads, out)
    except ValueError as error:
        raise ModelFormatError(f"cannot pack a weight as {layout.name}: {error}") from error
    return out


def dequantise(source: str, raw: NDArray[np.generic], n: int, k: int) -> NDArray[np.float32]:
    """The stored weights as f32 [n, k]: bit for bit what the ``gguf`` package's reference gives.

    Args:
        source, raw, n, k: as for ``pack``.

    Raises:
        ModelFormatError: the shape or the size do not allow it.
    """
    try:
        _native.packed_bytes(Layout.F32, n, k)
        out = np.empty((n, k), dtype=np.float32)
        _native.dequantise(source, _as_bytes(raw), n, k, out)
    except ValueError as error:
        raise ModelFormatError(f"cannot read a weight of {source}: {error}") from error
    return out


def unpack(layout: Layout, data: NDArray[np.uint8], n: int, k: int) -> NDArray[np.float32]:
    """The matrix as f32 [n, k], each value exactly what the layout says.

    Raises:
        ModelFormatError: ``data`` has not the size of that shape.
    """
    try:
        _native.packed_bytes(layout, n, k)
        out = np.empty((n, k), dtype=np.float32)
        _native.unpack(layout, data, n, k, out)
    except ValueError as error:
        raise ModelFormatError(f"cannot unpack a weight of {layout.name}: {error}") from error
    return out


def probe_bandwidth(num_bytes: int, threads: int, seconds: float = 0.2) -> float:
    """Bytes per second that ``threads`` read together from ``num_bytes`` of memory, best pass within ``seconds``."""
    return _native.probe_bandwidth(num_bytes, threads, seconds)


def probe_peak(isa: str, arithmetic: Arithmetic, threads: int, seconds: float = 0.05) -> float:
    """Operations per second, multiply and add as two, that ``threads`` reach together in registers: the best pass.

    An instruction set without instructions of that kind computes it in fp32, and so is its peak.
    """
    return _native.probe_peak(_known_isa(isa), arithmetic, threads, seconds)


def probe_barrier(threads: int) -> float:
    """Seconds that one barrier between phases takes, median of 15 batches of 1000."""
    return _native.probe_barrier(threads)


def _as_bytes(array: NDArray[np.generic]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


_NO_IDS = np.empty(0, dtype=np.int32)
_NO_VALUES = np.empty(0, dtype=np.float32)
_NO_MASKS = np.empty((0, 0), dtype=np.uint32)


class Vm:
    """A validated program with its arena, KV pool and threads. One step at a time, from one thread at a time."""

    def __init__(
        self,
        records: bytes,
        arena_bytes: int,
        weights: Sequence[PackedLike],
        *,
        threads: int,
        max_rows: int,
        kv: KvConfig,
        isa: str | None = None,
        max_sequences: int | None = None,
        max_outputs: int | None = None,
        max_top: int = 0,
    ) -> None:
        """Checks every record against the weights, the arena and the limits, and starts the threads.

        Args:
            records: encoded program, 128 bytes each.
            arena_bytes: size of the activation arena that the program's offsets refer to.
            weights: by the index that the records use.
            threads: including the caller's.
            max_rows: rows of a step.
            kv: the KV pool to allocate (zeroed lazily by the system).
            isa: one of ``available_isas``; None means ``best_isa``.
            max_sequences: sequences of a step, at most and by default ``max_rows``.
            max_outputs: output rows of a step, at most and by default ``max_rows``.
            max_top: width of the top log-probabilities, at most 256.

        Raises:
            ModelFormatError: a record or weight is wrong; the message names it.
            MachineError: the instruction set is missing here, or memory was refused.
        """
        isa = best_isa() if isa is None else _known_isa(isa)
        table = [(int(weight.layout), weight.n, weight.k, weight.data) for weight in weights]
        try:
            self._native = _native.Vm(
                records,
                arena_bytes,
                table,
                threads,
                isa,
                max_rows,
                max_rows if max_sequences is None else max_sequences,
                max_rows if max_outputs is None else max_outputs,
                max_top,
                int(kv.type),
                kv.layers,
                kv.kv_heads,
                kv.head_size,
                kv.blocks,
            )
        except ValueError as error:
            raise ModelFormatError(f"the program cannot be run: {error}") from error
        except MemoryError as error:
            raise MachineError("the system refused the memory for the arena or the KV pool") from error
        self.kv = kv
        self.threads = threads
        self._num_records = len(records) // RECORD_BYTES
        self.max_rows = max_rows
        self.max_top = max_top

    def use_threads(self, count: int) -> None:
        """Sets how many of the threads the steps from now on use; the results do not depend on it.

        Raises:
            ValueError: below 1 or more than there are, or a step is running.
        """
        self._native.set_threads(count)

    def time_records(self, is_on: bool) -> None:
        """Starts to add up from zero what each record of the program takes on each thread, or stops.

        Raises:
            ValueError: a step is running.
        """
        self._native.time_records(is_on)

    def record_times(self) -> NDArray[np.int64]:
        """Returns nanoseconds [threads, records, 2]: waiting at the barrier before a record, and in it.

        Raises:
            ValueError: they are not being added up.
        """
        out = np.zeros((self.threads, self._num_records, 2), dtype=np.int64)
        self._native.read_record_times(out)
        return out

    def step(
        self,
        tokens: NDArray[np.int32],
        positions: NDArray[np.int32],
        seq_starts: NDArray[np.int32],
        block_tables: NDArray[np.int32],
        outputs: NDArray[np.void],
        *,
        token_types: NDArray[np.int32] = _NO_IDS,
        count_ids: NDArray[np.int32] = _NO_IDS,
        counts: NDArray[np.int32] = _NO_IDS,
        bias_ids: NDArray[np.int32] = _NO_IDS,
        bias_values: NDArray[np.float32] = _NO_VALUES,
        masks: NDArray[np.uint32] = _NO_MASKS,
        num_records: int | None = None,
    ) -> tuple[NDArray[np.void], NDArray[np.int32], NDArray[np.float32]]:
        """Runs one ragged step of R rows in S sequences and returns what it chose for L output rows.

        Args:
            tokens: [R] ids.
            positions: [R] of each token in its sequence; they rise by one within a sequence.
            seq_starts: [S + 1] first row of each sequence, ends with R.
            block_tables: [S, B] pages of each sequence; entries past its last position are not read.
            outputs: [L] OUTPUT_DTYPE.
            token_types: [R], or empty for all 0.
            count_ids: token ids for penalties, ascending within each output's range.
            counts: how often, see OUTPUT_FIELDS.
            bias_ids: token ids with a bias, ascending within each output's range.
            bias_values: what is added to their logits.
            masks: [M, words] allowed tokens as bits.
            num_records: run only the first so many instructions (tests).

        Returns:
            results [L] RESULT_DTYPE, top_ids [L, max_top], top_logprobs [L, max_top].

        Raises:
            ValueError: an input is outside the limits. Nothing was run.
        """
        results, top_ids, top_logprobs = self._room_for(outputs, 1)
        try:
            self._native.step(
                tokens,
                token_types,
                positions,
                seq_starts,
                block_tables,
                _as_bytes(outputs),
                results.view(np.uint8),
                top_ids,
                top_logprobs,
                count_ids,
                counts,
                bias_ids,
                bias_values,
                masks,
                -1 if num_records is None else num_records,
            )
        except TypeError as error:
            raise ValueError(f"an array of the step has the wrong dtype, dimensions or order: {error}") from error
        return results, top_ids, top_logprobs

    def decode(
        self,
        tokens: NDArray[np.int32],
        positions: NDArray[np.int32],
        seq_starts: NDArray[np.int32],
        block_tables: NDArray[np.int32],
        outputs: NDArray[np.void],
        *,
        num_steps: int,
        stop_ids: NDArray[np.int32],
        stop_starts: NDArray[np.int32],
        wake_fd: int = -1,
    ) -> tuple[NDArray[np.void], NDArray[np.int32], NDArray[np.float32]]:
        """Runs decode steps in a row: each of S sequences goes on with the token that it chose.

        Ends early after the step in which a sequence chose one of its stop ids or gave no number, or when ``wake_fd``
        has something to read. The tokens are those that single steps would choose.

        Args:
            tokens, positions: [S], of the first step.
            seq_starts: [S + 1], 0 … S.
            block_tables: [S, B], with the pages of all steps.
            outputs: [S] OUTPUT_DTYPE of the first step, row i of sequence i, without penalties, biases or mask.
            num_steps: how many at most.
            stop_ids: tokens that end a sequence, of all sequences.
            stop_starts: [S + 1] ranges of them.
            wake_fd: a descriptor, −1 for none.

        Returns:
            results [n · S] RESULT_DTYPE of the n steps that ran, one step after the other; top_ids and top_logprobs
            [n · S, max_top].

        Raises:
            ValueError: an input is outside the limits. Nothing was run.
        """
        results, top_ids, top_logprobs = self._room_for(outputs, num_steps)
        try:
            done = self._native.decode(
                tokens,
                positions,
                seq_starts,
                block_tables,
                _as_bytes(outputs),
                results.view(np.uint8),
                top_ids,
                top_logprobs,
                num_steps,
                stop_ids,
                stop_starts,
                wake_fd,
            )
        except TypeError as error:
            raise ValueError(f"an array of the step has the wrong dtype, dimensions or order: {error}") from error
        size = outputs.shape[0] * done
        return results[:size], top_ids[:size], top_logprobs[:size]

    def _room_for(
        self, outputs: NDArray[np.void], num_steps: int
    ) -> tuple[NDArray[np.void], NDArray[np.int32], NDArray[np.float32]]:
        """Gives empty results, top ids and log-probs of so many steps.

        Raises:
            ValueError: the outputs have another dtype.
        """
        if outputs.dtype != OUTPUT_DTYPE:
            raise ValueError(f"outputs have dtype {outputs.dtype}, they must have OUTPUT_DTYPE")
        size = outputs.shape[0] * num_steps
        top = (size, self.max_top)
        return np.zeros(size, dtype=RESULT_DTYPE), np.zeros(top, dtype=np.int32), np.zeros(top, dtype=np.float32)

    def read_buffer(self, offset: int, rows: int, width: int) -> NDArray[np.float32]:
        """Copies f32 [rows, width] out of the arena; for tests and traces."""
        out = np.empty(rows * width, dtype=np.float32)
        self._native.read_arena(offset, out)
        return out.reshape(rows, width)

    def read_keys(self, layer: int, block: int, head: int) -> NDArray[np.float32]:
        """One K page as f32 [BLOCK_TOKENS, head_size]; for tests."""
        size = self.kv.head_size
        out = np.empty(32 * size, dtype=np.float32)
        self._native.read_page(layer, block, head, False, out)
        if self.kv.type is KvType.F32:
            return out.reshape(size, 32).T
        return out.reshape(size // 2, 32, 2).transpose(1, 0, 2).reshape(32, size)

    def read_values(self, layer: int, block: int, head: int) -> NDArray[np.float32]:
        """One V page as f32 [BLOCK_TOKENS, head_size]; for tests."""
        size = self.kv.head_size
        out = np.empty(32 * size, dtype=np.float32)
        self._native.read_page(layer, block, head, True, out)
        if self.kv.type is KvType.F32:
            return out.reshape(32, size)
        return out.reshape(16, size, 2).transpose(0, 2, 1).reshape(32, size)

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV pool (reserved; touched as pages are used)."""
        return self._native.kv_bytes

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the threads' scratch."""
        return self._native.scratch_bytes

    @property
    def max_positions(self) -> int:
        """Positions that the rotation table and the pool allow."""
        return self._native.max_positions

    @property
    def isa(self) -> str:
        """The instruction set in use."""
        return self._native.isa
