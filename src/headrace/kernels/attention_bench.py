"""Times ATTENTION alone: ``python -m headrace.kernels.attention_bench``. One line per context and number of rows.

A step is the last rows of a sequence (or of several) whose context is already in its pages, through as many layers as
asked for, so that pages come from memory as they do in a model. What the same step takes without ATTENTION is taken
off. GMAC/s count each visible position twice a head (scores and values); the share is of the f32 peak probed before.
GB/s count each page once a sequence and kv head.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.kernels import vm
from headrace.kernels.microbench import PackedWeight
from headrace.program.cost import Arithmetic
from headrace.program.opcodes import BLOCK_TOKENS, KvType, Layout, Norm, Opcode
from headrace.program.records import OUTPUT_DTYPE, pack_record

_INPUT = 32  # width of what q, k and v are made from: little work, and numbers of all kinds


def _packed(rng: np.random.Generator, n: int, k: int) -> PackedWeight:
    return PackedWeight(
        Layout.F32, n, k, vm.pack(Layout.F32, "F32", rng.standard_normal((n, k), dtype=np.float32), n, k)
    )


@dataclass(frozen=True, slots=True)
class _Step:
    """Arrays of a step: ``sequences`` times the last ``rows`` rows of a context."""

    tokens: NDArray[np.int32]
    positions: NDArray[np.int32]
    starts: NDArray[np.int32]
    tables: NDArray[np.int32]

    @staticmethod
    def of(start: int, rows: int, sequences: int, pages: int) -> _Step:
        positions = np.tile(np.arange(start, start + rows, dtype=np.int32), sequences)
        seq = np.repeat(np.arange(sequences, dtype=np.int32), rows)
        return _Step(
            (positions * 31 + seq * 7) % 251,
            positions,
            np.arange(sequences + 1, dtype=np.int32) * rows,
            np.arange(sequences * pages, dtype=np.int32).reshape(sequences, pages),
        )


def _machine(
    options: argparse.Namespace,
    weights: list[PackedWeight],
    rows: int,
    sequences: int,
    blocks: int,
    *,
    has_attention: bool,
) -> vm.Vm:
    heads, kv_heads, size = options.heads, options.kv_heads, options.head_size
    x_bytes = -(-rows * _INPUT * 4 // 64) * 64
    q_bytes = -(-rows * heads * size * 4 // 64) * 64
    records = [
        pack_record(
            Opcode.EMBED, 0, table=0, out=0, width=_INPUT, scale=1.0, positions=-1, position_offset=0, types=-1,
        )
    ]  # fmt: skip
    for layer in range(options.layers):
        records.append(
            pack_record(
                Opcode.QKV, 2 * layer + 1, weight=1, bias=-1, input=0, q_out=x_bytes, k=_INPUT, heads=heads,
                kv_heads=kv_heads, head_size=size, layer=layer, norm=Norm.NONE, norm_weight=-1, norm_bias=-1,
                norm_eps=1e-5, q_norm=-1, k_norm=-1, qk_norm_eps=1e-5, rope=-1, rotary_size=0,
            )
        )  # fmt: skip
        if has_attention:
            records.append(
                pack_record(
                    Opcode.ATTENTION, 2 * layer + 2, q=x_bytes, out=x_bytes + q_bytes, heads=heads, kv_heads=kv_heads,
                    head_size=size, layer=layer, scale=size**-0.5 / 8, window=options.window, softcap=0.0,
                    is_bidirectional=0,
                )
            )  # fmt: skip
    return vm.Vm(
        b"".join(records), x_bytes + 2 * q_bytes, weights, threads=options.threads, max_rows=rows, isa=options.isa,
        max_sequences=sequences, max_outputs=1, max_top=0,
        kv=vm.KvConfig(KvType[options.kv.upper()], options.layers, kv_heads, size, blocks),
    )  # fmt: skip


def _run(machine: vm.Vm, step: _Step) -> float:
    started = time.perf_counter()
    machine.step(step.tokens, step.positions, step.starts, step.tables, np.zeros(0, OUTPUT_DTYPE))
    return time.perf_counter() - started


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--isa", default=vm.best_isa())
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--kv", choices=("bf16", "f32"), default="bf16")
    parser.add_argument("--window", type=int, default=0)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 2048, 4096])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 16, 64, 512])
    parser.add_argument("--sequences", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.5)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    width = (options.heads + 2 * options.kv_heads) * options.head_size
    weights = [_packed(rng, 251, _INPUT), _packed(rng, width, _INPUT)]
    sequences = options.sequences
    for context in options.contexts:
        pages = -(-context // BLOCK_TOKENS)
        fill = 512
        most = sequences * max(fill, *options.rows)
        limits = (most, sequences, sequences * pages)
        attention = _machine(options, weights, *limits, has_attention=True)
        without = _machine(options, weights, *limits, has_attention=False)
        for rows in options.rows:
            if rows > context:
                continue
            step = _Step.of(context - rows, rows, sequences, pages)
            if rows == options.rows[0]:
                for start in range(0, context, fill):
                    _run(attention, _Step.of(start, min(fill, context - start), sequences, pages))
            peak = vm.probe_peak(attention.isa, Arithmetic.FP32, options.threads) / 2
            times: list[float] = []
            others: list[float] = []
            stop = time.perf_counter() + options.seconds
            while len(times) < 3 or time.perf_counter() < stop:
                times.append(_run(attention, step))
                others.append(_run(without, step))
            best = (min(times) - min(others)) / options.layers
            middle = float(np.median(times) - np.median(others)) / options.layers
            positions = np.arange(context - rows, context) + 1
            seen = int(np.minimum(positions, options.window or context).sum())
            work = 2 * sequences * seen * options.heads * options.head_size
            item = 4 if options.kv == "f32" else 2
            read = 2 * sequences * min(context, (options.window or context) + rows) * options.kv_heads
            moved = read * options.head_size * item
            sys.stdout.write(
                f"{attention.isa:>10} context {context:6} rows {rows:4}  {middle * 1e6:9.1f} µs a layer"
                f" (best {best * 1e6:9.1f})  {work / middle / 1e9:6.1f} GMAC/s (best {work / best / 1e9:6.1f},"
                f" {work / best / peak:4.0%} of {peak / 1e9:.0f})  {moved / best / 1e9:5.1f} GB/s at best\n"
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
