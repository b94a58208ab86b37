"""The reference interpreter: what every opcode computes, in numpy. The VM must give the same bits.

Same inputs as the native ``Vm.step``, no tiles, no threads, no fused loops. Exactness where it is promised: integer
products are exact, every float operation is the VM's with one rounding (``lanes``), in the same order along K. It is
slow (seconds for a two-layer toy) and meant for tests and for finding where a kernel goes wrong.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.program.ir import NONE, Instruction, Program
from headrace.program.lanes import F32, exp_weight, f32, fma, reduce_add, round_bf16, soft_cap
from headrace.program.layouts import Numbers, unpack
from headrace.program.opcodes import (
    BLOCK_TOKENS,
    LANES,
    STEP_PAGES,
    Activation,
    Epilogue,
    KvType,
    Norm,
    Opcode,
    Pooling,
)
from headrace.program.records import RESULT_DTYPE, PackedLike
from headrace.program.rowwise import FOLDING_ISAS, activate, gated, layer_norm, pool, product, rms_norm, route
from headrace.program.sampling import choose, modified

I32 = NDArray[np.int32]
SLICE_TOKENS = 512
"""Positions whose partial attention is formed on its own; partials are merged in order (determinism)."""
SOFTMAX_TOKENS = 128
"""Positions between two looks at the largest score."""


@dataclass(frozen=True, slots=True)
class StepInput:
    """A ragged batch: R rows of S sequences, L output rows. See ``csrc/core/step.h``.

    Args:
        tokens, positions: [R].
        seq_starts: [S + 1], row ranges of the sequences.
        block_tables: [S, B], pages of each sequence in order.
        outputs: [L] of ``OUTPUT_DTYPE``.
        masks: [M, ⌈V/32⌉] u32, bit t of word t/32: token t allowed.
        token_types: [R], None for all 0.
    """

    tokens: I32
    positions: I32
    seq_starts: I32
    block_tables: I32
    outputs: NDArray[np.void]
    count_ids: I32
    counts: I32
    bias_ids: I32
    bias_values: F32
    masks: NDArray[np.uint32]
    token_types: I32 | None = None


@dataclass(frozen=True, slots=True)
class _Pages:
    """One layer's pages, [blocks, kv heads, 32, D] as they are stored, and whose they are, [S, B] or [B]."""

    keys: F32
    values: F32
    tables: I32


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What the head says, and the logits that the VM never stores: [L, V] f32 before any modification."""

    results: NDArray[np.void]
    top_ids: I32
    top_logprobs: F32
    logits: F32


class Interpreter:
    """Runs a program step by step, with its own paged KV.

    Args:
        weights: one per entry of the program's table, packed as the VM gets them.
        blocks: KV pages per layer.
        isa: whose bits are wanted: they differ in where the second terms of Q8 are added (``FOLDING_ISAS``).

    ``buffers`` holds every activation buffer as the last instruction that wrote it left it, by buffer index.
    """

    def __init__(
        self, program: Program, weights: Sequence[PackedLike], *, kv_type: KvType, blocks: int, isa: str = "scalar"
    ) -> None:
        self.program = program
        self._is_folded = isa in FOLDING_ISAS
        self.kv_type = kv_type
        self.buffers: dict[int, F32] = {}
        self._matrices: dict[int, Numbers] = {}
        self._vectors: dict[int, F32] = {}
        for spec, weight in zip(program.weights, weights, strict=True):
            if spec.kind == "matrix":
                self._matrices[spec.index] = unpack(weight.layout, weight.data, weight.n, weight.k)
            else:
                values = weight.data.view("<f4")
                self._vectors[spec.index] = values.reshape(-1, spec.k) if spec.kind == "rope" else values[: spec.n]
        self._dequantised: dict[int, F32] = {}
        shape = (program.spec.layers, blocks, program.spec.kv_heads, BLOCK_TOKENS, program.spec.head_size)
        # [layers, blocks, kv heads, 32, D], values as the pool holds them
        self.keys = np.zeros(shape, np.float32)
        self.values = np.zeros(shape, np.float32)
        self._step_pages: _Pages | None = None

    def step(
        self, step: StepInput, *, max_top: int, after: Callable[[int, Instruction], None] | None = None
    ) -> StepOutput:
        """Runs the program on one batch.

        Args:
            max_top: width of the top log-probabilities.
            after: called after every instruction with its number, when its buffers can be looked at.
        """
        count = len(step.outputs)
        out = StepOutput(
            np.zeros(count, RESULT_DTYPE),
            np.full((count, max_top), -1, np.int32),
            np.full((count, max_top), -np.inf, np.float32),
            np.zeros((count, self.program.spec.vocab_size), np.float32),
        )
        for number, item in enumerate(self.program.instructions):
            match item.opcode:
                case Opcode.EMBED:
                    self._embed(item, step)
                case Opcode.LINEAR:
                    self._linear(item)
                case Opcode.QKV:
                    self._qkv(item, step)
                case Opcode.ATTENTION:
                    self._attention(item, step)
                case Opcode.HEAD:
                    self._head(item, step, out)
                case Opcode.NORM:
                    self._norm(item)
                case Opcode.MOE:
                    self._moe(item)
                case Opcode.POOL:
                    self._pool(item, step)
                case Opcode.PREPARE:  # the form of rows is the VM's own affair: products prepare them here
                    self.buffers[item.integer("out")] = self.buffers[item.integer("input")]
                case Opcode.ROTATE:
                    self._rotate(item, step)
                case Opcode.GATE:
                    self._gate(item)
                case Opcode.PICK:
                    self.buffers[item.integer("out")] = self.buffers[item.integer("input")][step.outputs["row"]]
            if after is not None:
                after(number, item)
        return out

    def _rows_of(self, index: int, rows: NDArray[np.integer]) -> F32:
        """Returns rows of a packed matrix, dequantised."""
        if index not in self._dequantised:
            self._dequantised[index] = self._matrices[index].dequantised()
        return f32(self._dequantised[index][rows])

    def _embed(self, item: Instruction, step: StepInput) -> None:
        rows = f32(self._rows_of(item.integer("table"), step.tokens) * np.float32(item.values["scale"]))
        if (positions := item.integer("positions")) != NONE:
            rows = f32(rows + self._rows_of(positions, step.positions + item.integer("position_offset")))
        if (types := item.integer("types")) != NONE:
            none = np.zeros(len(rows), np.int32)
            rows = f32(rows + self._rows_of(types, none if step.token_types is None else step.token_types))
        self.buffers[item.integer("out")] = rows

    def _prologue(self, item: Instruction, rows: F32) -> F32:
        weight, eps = self._vector(item, "norm_weight"), item.values["norm_eps"]
        match Norm(item.integer("norm")):
            case Norm.NONE | Norm.PREPARED:
                return rows
            case Norm.RMS:
                return rms_norm(rows, weight, eps)
            case Norm.LAYER:
                return layer_norm(rows, weight, self._vector(item, "norm_bias"), eps)

    def _vector(self, item: Instruction, name: str) -> F32 | None:
        index = item.integer(name)
        return None if index == NONE else self._vectors[index]

    def _times(self, rows: F32, weight: Numbers) -> F32:
        return product(rows, weight, is_folded=self._is_folded)

    def _product(self, item: Instruction, rows: F32) -> F32:
        """Norm, product and bias."""
        result = self._times(self._prologue(item, rows), self._matrices[item.integer("weight")])
        bias = self._vector(item, "bias") if "bias" in item.values else None
        return result if bias is None else f32(result + bias)

    def _put(self, item: Instruction, result: F32) -> None:
        out = item.integer("out")
        is_added = item.integer("epilogue") == Epilogue.ADD
        self.buffers[out] = f32(self.buffers[out] + result) if is_added else result

    def _linear(self, item: Instruction) -> None:
        result = self._product(item, self.buffers[item.integer("input")])
        function = Activation(item.integer("activation"))
        is_gated = item.integer("epilogue") == Epilogue.GLU
        self._put(item, gated(function, result) if is_gated else activate(function, result))

    def _norm(self, item: Instruction) -> None:
        self._put(item, self._prologue(item, self.buffers[item.integer("input")]))

    def _pool(self, item: Instruction, step: StepInput) -> None:
        rows = self._prologue(item, self.buffers[item.integer("input")])
        kind, is_normalised = Pooling(item.integer("pooling")), bool(item.integer("is_normalised"))
        pooled = [pool(rows[start:stop], kind, is_normalised) for start, stop in itertools.pairwise(step.seq_starts)]
        self.buffers[item.integer("out")] = np.stack(pooled)

    def _moe(self, item: Instruction) -> None:
        k, hidden, out = item.integer("k"), item.integer("hidden"), item.integer("out")
        rows = self._prologue(item, self.buffers[item.integer("input")])
        logits = self._times(rows, self._matrices[item.integer("router")])
        ids, shares = route(logits, item.integer("top_k"), bool(item.integer("is_renormalised")))
        total = self.buffers[out].copy()
        for expert in range(item.integer("experts")):
            chosen, column = np.nonzero(ids == expert)
            if not len(chosen):
                continue
            up = self._matrices[item.integer("gate_up")].columns(expert * 2 * hidden, (expert + 1) * 2 * hidden)
            down = self._matrices[item.integer("down")].columns(expert * k, (expert + 1) * k)
            result = self._times(gated(Activation(item.integer("activation")), self._times(rows[chosen], up)), down)
            total[chosen] = fma(shares[chosen, column][:, None], result, total[chosen])
        self.buffers[out] = total

    def _qkv(self, item: Instruction, step: StepInput) -> None:
        heads, kv_heads, size = item.integer("heads"), item.integer("kv_heads"), item.integer("head_size")
        result = self._product(item, self.buffers[item.integer("input")]).reshape(-1, heads + 2 * kv_heads, size)
        self._finish_heads(item, step, result)

    def _rotate(self, item: Instruction, step: StepInput) -> None:
        indices = [item.integer(name) for name in ("q", "keys", "values")]
        rows = np.concatenate([self.buffers[index] for index in indices if index != NONE], axis=1)
        self._finish_heads(item, step, rows.reshape(len(rows), -1, item.integer("head_size")))

    def _gate(self, item: Instruction) -> None:
        result = activate(Activation(item.integer("activation")), self.buffers[item.integer("gate")])
        if (up := item.integer("up")) != NONE:
            result = f32(result * self.buffers[up])
        self.buffers[item.integer("out")] = result

    def _finish_heads(self, item: Instruction, step: StepInput, result: F32) -> None:
        """Norms, turns and stores all heads of q, then k, then v: [R, H + 2K, D]."""
        heads, kv_heads, size = item.integer("heads"), item.integer("kv_heads"), item.integer("head_size")
        q = self._head_rows(item, step, "q_norm", result[:, :heads])
        keys = self._head_rows(item, step, "k_norm", result[:, heads : heads + kv_heads])
        values = result[:, heads + kv_heads :]
        self.buffers[item.integer("q_out")] = q.reshape(len(result), -1)
        if item.integer("layer") == STEP_PAGES:
            self._step_pages = self._empty_pages(step, kv_heads, size)
        pages = self._pages(item, step)
        for row, position in enumerate(step.positions):
            seq = int(np.searchsorted(step.seq_starts, row, side="right")) - 1
            block, slot = pages.tables[seq, position // BLOCK_TOKENS], position % BLOCK_TOKENS
            pages.keys[block, :, slot] = self._stored(keys[row])
            pages.values[block, :, slot] = self._stored(values[row])

    @staticmethod
    def _empty_pages(step: StepInput, kv_heads: int, size: int) -> _Pages:
        sequences, blocks = len(step.seq_starts) - 1, -(-int(np.diff(step.seq_starts).max()) // BLOCK_TOKENS)
        zeros = np.zeros((sequences * blocks, kv_heads, BLOCK_TOKENS, size), np.float32)
        return _Pages(zeros, zeros.copy(), np.arange(sequences * blocks, dtype=np.int32).reshape(sequences, blocks))

    def _pages(self, item: Instruction, step: StepInput) -> _Pages:
        if (layer := item.integer("layer")) == STEP_PAGES:
            assert self._step_pages is not None, "pages are read before they are written"
            return self._step_pages
        return _Pages(self.keys[layer], self.values[layer], step.block_tables)

    def _head_rows(self, item: Instruction, step: StepInput, norm: str, rows: F32) -> F32:
        """Returns heads, [R, H, D], each normed by itself if there is such a norm, and their first elements turned."""
        if (weight := self._vector(item, norm)) is not None:
            flat = rms_norm(rows.reshape(-1, rows.shape[2]), weight, item.values["qk_norm_eps"])
            rows = flat.reshape(rows.shape)
        if (table := self._vector(item, "rope")) is None:
            return rows
        size = item.integer("rotary_size")
        half = size // 2
        cosine, sine = table[step.positions][:, None, :half], table[step.positions][:, None, half:]
        low, high = rows[..., :half], rows[..., half:size]
        return f32(np.concatenate([low * cosine - high * sine, high * cosine + low * sine, rows[..., size:]], axis=2))

    def _stored(self, rows: F32) -> F32:
        return round_bf16(rows) if self.kv_type is KvType.BF16 else rows

    def _attention(self, item: Instruction, step: StepInput) -> None:
        heads, size = item.integer("heads"), item.integer("head_size")
        q = self.buffers[item.integer("q")].reshape(-1, heads, size)
        out = np.zeros_like(q)
        pages = self._pages(item, step)
        for seq in range(len(step.seq_starts) - 1):
            rows = slice(step.seq_starts[seq], step.seq_starts[seq + 1])
            own = _Pages(pages.keys, pages.values, pages.tables[seq])
            out[rows] = self._attend(item, self._stored(q[rows]), own, step.positions[rows])
        self.buffers[item.integer("out")] = out.reshape(len(q), -1)

    @staticmethod
    def _visible(item: Instruction, positions: I32) -> tuple[I32, I32]:
        """Returns per row the first position that it sees, and the first behind it that it does not."""
        window, stop = item.integer("window"), int(positions[-1]) + 1
        if item.integer("is_bidirectional"):
            reach = window or stop
            return np.maximum(positions - reach, 0), np.minimum(positions + reach + 1, stop)
        return np.maximum(positions - (window or stop) + 1, 0), positions + 1

    def _attend(self, item: Instruction, q: F32, pages: _Pages, positions: I32) -> F32:
        """Returns the attention of a sequence's rows, [T, H, D]: slices in order, in each a softmax over its blocks."""
        first, behind = self._visible(item, positions)
        stop = int(behind[-1])
        merged = _Softmax.empty(q.shape)
        for start in range(int(first[0]) // SLICE_TOKENS * SLICE_TOKENS, stop, SLICE_TOKENS):
            part = _Softmax.empty(q.shape)
            for base in range(start, min(start + SLICE_TOKENS, stop), SOFTMAX_TOKENS):
                tokens = np.arange(base, min(base + SOFTMAX_TOKENS, -(-stop // BLOCK_TOKENS) * BLOCK_TOKENS))
                seen = (tokens >= first[:, None]) & (tokens < behind[:, None])
                rows = np.flatnonzero(seen.any(axis=1))
                if len(rows):
                    blocks = pages.tables[tokens[::BLOCK_TOKENS] // BLOCK_TOKENS]
                    # [K, tokens, D]
                    keys, values = (np.concatenate(list(side[blocks]), axis=1) for side in (pages.keys, pages.values))
                    part.put(rows, self._block(item, q[rows], (keys, values), seen[rows], part.take(rows)))
            rows = np.flatnonzero(part.norm[:, 0] > 0)
            is_first = merged.norm[rows, 0] == 0
            merged.put(rows[is_first], part.take(rows[is_first]))
            rows = rows[~is_first]
            merged.put(rows, merged.take(rows).merge(part.take(rows)))
        return f32(merged.sums * (np.float32(1) / merged.norm)[..., None])

    def _block(
        self, item: Instruction, q: F32, block: tuple[F32, F32], seen: NDArray[np.bool_], state: _Softmax
    ) -> _Softmax:
        """Returns ``state`` after some positions; ``seen`` [T, positions] says which of them each row sees."""
        group = q.shape[1] // item.integer("kv_heads")
        # [H, positions, D]: each kv head serves `group` query heads
        keys, values = (np.repeat(part, group, axis=0) for part in block)
        scores = np.zeros((*q.shape[:2], seen.shape[1]), np.float32)
        for d in range(q.shape[2]):
            scores = fma(keys[:, :, d], q[:, :, d : d + 1], scores)
        scale, cap = np.float32(item.values["scale"]), item.values["softcap"]
        if cap:
            scores, scale = soft_cap(scores * scale, cap), np.float32(1)
        highest = np.where(seen[:, None], scores, np.float32(-np.inf)).max(axis=2)
        top = np.maximum(state.top, f32(highest * scale))
        scores = np.where(seen[:, None], scores, np.float32(0))
        weights = np.where(seen[:, None], exp_weight(fma(scores, scale, -top[..., None])), np.float32(0))
        shrink = exp_weight(state.top - top)
        lanes = weights.reshape(*weights.shape[:2], -1, LANES)
        total = lanes[:, :, 0]
        for index in range(1, lanes.shape[2]):
            total = total + lanes[:, :, index]
        norm = fma(state.norm, shrink, reduce_add(total))
        used = self._stored(weights)
        sums = f32(state.sums * shrink[..., None])
        for token in np.flatnonzero(seen.any(axis=0)):
            # A hidden token weighs nothing: the sum stays as it is, whatever its page holds.
            added = fma(values[:, token], used[..., token : token + 1], sums)
            sums = np.where(seen[:, token, None, None], added, sums)
        return _Softmax(top, norm, sums)

    def _head(self, item: Instruction, step: StepInput, out: StepOutput) -> None:
        rows = self.buffers[item.integer("input")]
        if item.integer("weight") != NONE:
            rows = self._product(item, rows[step.outputs["row"]])
        out.logits[:] = soft_cap(rows * np.float32(item.values["scale"]), item.values["softcap"])
        for index, row in enumerate(step.outputs):
            fields: Mapping[str, Any] = {name: row[name].item() for name in row.dtype.names or ()}
            self._settle(index, fields, step, out)

    def _settle(self, index: int, row: Mapping[str, Any], step: StepInput, out: StepOutput) -> None:
        logits, result = out.logits[index], out.results[index]
        with np.errstate(invalid="ignore"):
            best = float(logits.max())
            log_sum = best + float(np.log(np.exp(logits.astype(np.float64) - best).sum()))
        result["logsumexp"] = log_sum
        result["token"] = row["target"]
        if not np.isfinite(log_sum):
            result["status"], result["logprob"] = 1, np.nan
            return
        if row["num_logprobs"] > 0:
            ranked = np.lexsort((np.arange(len(logits)), -logits))[: row["num_logprobs"]]
            out.top_ids[index, : len(ranked)] = ranked
            out.top_logprobs[index, : len(ranked)] = logits[ranked].astype(np.float64) - log_sum
            result["num_top"] = len(ranked)
        if row["target"] < 0:
            result["token"] = choose(self._modified(logits, row, step), row)
        if result["token"] < 0:  # the mask allows nothing
            result["status"], result["logprob"] = 1, np.nan
            return
        result["logprob"] = float(logits[result["token"]]) - log_sum

    def _modified(self, logits: F32, row: Mapping[str, Any], step: StepInput) -> F32:
        counted = slice(row["counts_start"], row["counts_start"] + row["counts_len"])
        biased = slice(row["bias_start"], row["bias_start"] + row["bias_len"])
        allowed = None
        if row["mask"] >= 0:
            bits = np.unpackbits(step.masks[row["mask"]].astype("<u4").view(np.uint8), bitorder="little")
            allowed = bits[: len(logits)].astype(np.bool_)
        return modified(
            logits,
            row,
            list(zip(step.count_ids[counted].tolist(), step.counts[counted].tolist(), strict=True)),
            list(zip(step.bias_ids[biased].tolist(), step.bias_values[biased].tolist(), strict=True)),
            allowed,
        )


@dataclass(frozen=True, slots=True)
class _Softmax:
    """Running softmax of some positions: largest score, sum of e^(score − top), and the values weighed by it."""

    top: F32  # [T, H]
    norm: F32  # [T, H]
    sums: F32  # [T, H, D]

    @staticmethod
    def empty(shape: tuple[int, ...]) -> _Softmax:
        """Returns the softmax of no positions."""
        start = np.full(shape[:2], -np.inf, np.float32)
        return _Softmax(start, np.zeros(shape[:2], np.float32), np.zeros(shape, np.float32))

    def take(self, rows: NDArray[np.intp]) -> _Softmax:
        """Returns a copy of some rows."""
        return _Softmax(self.top[rows], self.norm[rows], self.sums[rows])

    def put(self, rows: NDArray[np.intp], other: _Softmax) -> None:
        """Sets some rows."""
        self.top[rows], self.norm[rows], self.sums[rows] = other.top, other.norm, other.sums

    def merge(self, later: _Softmax) -> _Softmax:
        """Returns the softmax of both position ranges."""
        top = np.maximum(self.top, later.top)
        a, b = exp_weight(self.top - top), exp_weight(later.top - top)
        return _Softmax(
            top,
            fma(later.norm, b, f32(self.norm * a)),
            fma(later.sums, b[..., None], f32(self.sums * a[..., None])),
        )
