"""Times LINEAR alone: ``python -m headrace.kernels.microbench``. One line per layout and number of rows.

Each figure is the median over steps of a program of many equal layers, so that the weights come from memory as they do
in a model. GB/s counts packed weight bytes; the share is of the read bandwidth probed just before on a buffer of that
size. Rows make the same step do more products: GMAC/s is what they reach together.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.kernels import vm
from headrace.program.opcodes import Activation, Domain, Epilogue, KvType, Layout, Norm, Opcode
from headrace.program.records import OUTPUT_DTYPE, pack_record

_LAYOUTS = (Layout.Q4M, Layout.Q4, Layout.Q8, Layout.BF16, Layout.F16, Layout.F32)


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A packed weight, as the VM takes it."""

    layout: Layout
    n: int
    k: int
    data: NDArray[np.uint8]


def _time_steps(machine: vm.Vm, rows: int, seconds: float) -> tuple[float, float]:
    """Median and best seconds of a step of ``rows`` rows."""
    tokens = np.zeros(rows, dtype=np.int32)
    positions = np.arange(rows, dtype=np.int32)
    starts = np.array([0, rows], dtype=np.int32)
    tables = np.zeros((1, 1), dtype=np.int32)
    outputs = np.zeros(0, dtype=OUTPUT_DTYPE)
    times: list[float] = []
    stop = time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < stop:
        start = time.perf_counter()
        machine.step(tokens, positions, starts, tables, outputs)
        times.append(time.perf_counter() - start)
    return float(np.median(times[1:])), min(times)


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--isa", default=None)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 32, 256])
    parser.add_argument("--layouts", nargs="+", default=[layout.name for layout in _LAYOUTS])
    parser.add_argument("--n", type=int, default=1536)
    parser.add_argument("--k", type=int, default=576)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=0.5)
    options = parser.parse_args()
    n, k = options.n, options.k
    rng = np.random.default_rng(0)
    values = rng.standard_normal((n, k), dtype=np.float32)
    for layout in (Layout[name] for name in options.layouts):
        packed = vm.pack(layout, "F32", values, n, k)
        layers = max(1, options.megabytes * 1_000_000 // packed.size)
        memory = vm.aligned_empty(layers * packed.size)
        memory.reshape(layers, -1)[:] = packed
        bandwidth = vm.probe_bandwidth(memory.size, options.threads)
        weights = [PackedWeight(layout, n, k, memory[i * packed.size : (i + 1) * packed.size]) for i in range(layers)]
        rows_max = max(options.rows)
        out = -(-rows_max * k * 4 // 64) * 64
        records = b"".join(
            pack_record(
                Opcode.LINEAR, i, weight=i, bias=-1, input=0, out=out, k=k, n=n,
                norm=Norm.RMS, norm_weight=-1, norm_bias=-1, norm_eps=1e-5, epilogue=Epilogue.STORE,
                activation=Activation.NONE, domain=Domain.ROWS,
            )
            for i in range(layers)
        )  # fmt: skip
        machine = vm.Vm(
            records, out + rows_max * n * 4, weights, threads=options.threads, max_rows=rows_max, isa=options.isa,
            kv=vm.KvConfig(KvType.BF16, 1, 1, 32, 1),
        )  # fmt: skip
        for rows in options.rows:
            median, best = _time_steps(machine, rows, options.seconds)
            sys.stdout.write(
                f"{machine.isa:>10} {layout.name:>5} rows {rows:4}  {median * 1e3:9.3f} ms (best {best * 1e3:9.3f})"
                f"  {memory.size / median / 1e9:6.1f} GB/s ({memory.size / best / bandwidth:5.0%} of"
                f" {bandwidth / 1e9:.1f} at best)  {n * k * layers * rows / median / 1e9:7.1f} GMAC/s"
                f" (best {n * k * layers * rows / best / 1e9:.1f})\n"
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
