"""Programs of one interesting instruction, fed with chosen numbers: how attention and the head are tested alone.

Numbers enter through the token table: EMBED of an f32 table gives its rows bit for bit, and an identity QKV passes them
on, so a test picks q, k, v or logits freely. What is not here: whole models (``testing.tiny``).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headrace.kernels.vm import KvConfig, Vm, pack
from headrace.program.opcodes import FIELDS, GROUP, Activation, Domain, Epilogue, KvType, Layout, Norm, Opcode
from headrace.program.records import OUTPUT_DTYPE, pack_record

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
_NEUTRAL: dict[str, float] = {
    "bias": -1,
    "norm": Norm.NONE,
    "norm_weight": -1,
    "norm_bias": -1,
    "norm_eps": 1e-5,
    "activation": Activation.NONE,
    "epilogue": Epilogue.STORE,
    "scale": 1.0,
    "softcap": 0.0,
    "window": 0,
    "positions": -1,
    "position_offset": 0,
    "types": -1,
    "domain": Domain.ROWS,
    "is_bidirectional": 0,
    "is_normalised": 0,
    "q_norm": -1,
    "k_norm": -1,
    "qk_norm_eps": 1e-5,
    "rope": -1,
    "rotary_size": 0,
    "layer": 0,
}


def plain_record(opcode: Opcode, phase: int, **values: float) -> bytes:
    """Returns a record whose fields do nothing (no norm, no bias, no positions, …) unless they are given."""
    names = {field.name for field in FIELDS[opcode]}
    return pack_record(opcode, phase, **{name: value for name, value in _NEUTRAL.items() if name in names} | values)


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A weight as the VM takes it."""

    layout: Layout
    n: int
    k: int
    data: NDArray[np.uint8]


def packed(values: F32, layout: Layout = Layout.F32) -> PackedMatrix:
    """Returns a matrix [n, k] packed for the VM."""
    n, k = values.shape
    raw = np.ascontiguousarray(values, dtype=np.float32)
    return PackedMatrix(layout, n, k, pack(layout, "F32", raw, n, k))


@dataclass(frozen=True, slots=True)
class Rows:
    """Some rows of one sequence: token ids, the position of the first, and the sequence's pages."""

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]


class LoneAttention:
    """ATTENTION over a paged pool.

    Args:
        table: [N, (heads + 2·kv_heads)·D] f32: q, k and v of token id N.
    """

    def __init__(
        self,
        table: F32,
        *,
        heads: int,
        kv_heads: int,
        head_size: int,
        kv_type: KvType = KvType.F32,
        window: int = 0,
        softcap: float = 0.0,
        scale: float | None = None,
        blocks: int = 64,
        threads: int = 1,
        isa: str = "scalar",
        max_rows: int = 256,
        max_sequences: int = 16,
    ) -> None:
        width = (heads + 2 * kv_heads) * head_size
        assert table.shape[1] == width
        self._heads, self._head_size = heads, head_size
        sizes = [4 * max_rows * size for size in (width, heads * head_size, heads * head_size)]
        x, q, self._out = (int(offset) for offset in np.cumsum([0, *(-(-size // 64) * 64 for size in sizes)])[:3])
        records = [
            plain_record(Opcode.EMBED, 0, table=0, out=x, width=width),
            plain_record(
                Opcode.QKV, 1, weight=1, input=x, q_out=q, k=width, heads=heads, kv_heads=kv_heads, head_size=head_size
            ),
            plain_record(
                Opcode.ATTENTION, 2, q=q, out=self._out, heads=heads, kv_heads=kv_heads, head_size=head_size,
                scale=head_size**-0.5 if scale is None else scale, window=window, softcap=softcap,
            ),
        ]  # fmt: skip
        self._vm = Vm(
            b"".join(records),
            self._out + -(-sizes[2] // 64) * 64,
            [packed(table), packed(np.eye(width, dtype=np.float32))],
            threads=threads,
            isa=isa,
            max_rows=max_rows,
            max_sequences=min(max_sequences, max_rows),
            max_outputs=1,
            max_top=0,
            kv=KvConfig(kv_type, 1, kv_heads, head_size, blocks),
        )

    def step(self, batch: Sequence[Rows]) -> list[F32]:
        """Runs one ragged batch; returns [rows, H, D] of each of its sequences."""
        sizes = [len(rows.tokens) for rows in batch]
        starts = np.cumsum([0, *sizes]).astype(np.int32)
        tables = np.zeros((len(batch), max(len(rows.blocks) for rows in batch)), np.int32)
        for table, rows in zip(tables, batch, strict=True):
            table[: len(rows.blocks)] = rows.blocks
        positions = np.concatenate([np.arange(rows.start, rows.start + len(rows.tokens)) for rows in batch])
        self._vm.step(
            np.concatenate([np.asarray(rows.tokens) for rows in batch]).astype(np.int32),
            positions.astype(np.int32),
            starts,
            tables,
            np.zeros(0, OUTPUT_DTYPE),
        )
        out = self._vm.read_buffer(self._out, int(starts[-1]), self._heads * self._head_size)
        out = out.reshape(-1, self._heads, self._head_size)
        return [out[start:stop] for start, stop in itertools.pairwise(starts)]


@dataclass(frozen=True, slots=True)
class Choice:
    """How one output row chooses; the fields of ``OUTPUT_DTYPE`` with their neutral values."""

    row: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    seed: int = 0
    position: int = 0
    num_logprobs: int = -1
    target: int = -1
    counts: Sequence[tuple[int, int]] = ()
    bias: Sequence[tuple[int, float]] = ()
    allowed: NDArray[np.bool_] | None = field(default=None)

    def fields(self) -> dict[str, float]:
        """Returns the plain fields by name."""
        names = [
            "temperature",
            "top_k",
            "top_p",
            "min_p",
            "repetition",
            "presence",
            "frequency",
            "seed",
            "position",
            "num_logprobs",
            "target",
        ]
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True)
class Chosen:
    """What the head said about each output row."""

    results: NDArray[np.void]
    top_ids: I32
    top_logprobs: F32


class LoneHead:
    """HEAD over chosen logits.

    Args:
        logits: [N, V]: row N is what token id N produces; NaN in a row makes that row's input NaN instead.
    """

    def __init__(
        self,
        logits: F32,
        *,
        layout: Layout = Layout.F32,
        threads: int = 1,
        isa: str = "scalar",
        max_rows: int = 256,
        max_top: int = 256,
        scale: float = 1.0,
        softcap: float = 0.0,
    ) -> None:
        num_rows, self.vocab = logits.shape
        k = -(-num_rows // GROUP) * GROUP
        table = np.eye(num_rows, k, dtype=np.float32)
        table[np.isnan(logits).any(axis=1)] = np.nan
        weight = np.zeros((self.vocab, k), np.float32)
        weight[:, :num_rows] = np.nan_to_num(logits).T
        records = [
            plain_record(Opcode.EMBED, 0, table=0, out=0, width=k),
            plain_record(Opcode.HEAD, 1, weight=1, input=0, k=k, vocab=self.vocab, scale=scale, softcap=softcap),
        ]
        self._max_top = max_top
        self._vm = Vm(
            b"".join(records),
            -(-4 * max_rows * k // 64) * 64,
            [packed(table), packed(weight, layout)],
            threads=threads,
            isa=isa,
            max_rows=max_rows,
            max_sequences=1,
            max_outputs=max_rows,
            max_top=max_top,
            kv=KvConfig(KvType.F32, 1, 1, 32, max_rows // 32 + 1),
        )

    def step(self, choices: Sequence[Choice]) -> Chosen:
        """Runs one step whose i-th row is the logits of ``choices[i].row``."""
        outputs = np.zeros(len(choices), OUTPUT_DTYPE)
        pairs: dict[str, list[tuple[int, float]]] = {"counts": [], "bias": []}
        masks: list[NDArray[np.uint32]] = []
        for i, choice in enumerate(choices):
            for name, value in choice.fields().items():
                outputs[name][i] = value
            outputs["row"][i] = i
            for name, entries in (("counts", sorted(choice.counts)), ("bias", sorted(choice.bias))):
                outputs[f"{name}_start"][i], outputs[f"{name}_len"][i] = len(pairs[name]), len(entries)
                pairs[name] += entries
            outputs["mask"][i] = -1 if choice.allowed is None else len(masks)
            if choice.allowed is not None:
                bits = np.zeros(-(-self.vocab // 32) * 32, np.bool_)
                bits[: self.vocab] = choice.allowed
                masks.append(np.packbits(bits, bitorder="little").view(np.uint32))
        rows = len(choices)
        results, top_ids, top_logprobs = self._vm.step(
            np.array([choice.row for choice in choices], np.int32),
            np.arange(rows, dtype=np.int32),
            np.array([0, rows], np.int32),
            np.arange(-(-rows // 32), dtype=np.int32)[None, :],
            outputs,
            count_ids=np.array([token for token, _ in pairs["counts"]], np.int32),
            counts=np.array([count for _, count in pairs["counts"]], np.int32),
            bias_ids=np.array([token for token, _ in pairs["bias"]], np.int32),
            bias_values=np.array([value for _, value in pairs["bias"]], np.float32),
            masks=np.stack(masks) if masks else np.zeros((0, -(-self.vocab // 32)), np.uint32),
        )
        return Chosen(results, top_ids, top_logprobs)
