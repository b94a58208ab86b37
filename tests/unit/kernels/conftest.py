"""Small programs for the kernel tests: weights from numpy, one VM, one step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.kernels import vm
from headrace.program.opcodes import Activation, Epilogue, KvType, Layout, Norm, Opcode
from headrace.program.records import OUTPUT_DTYPE
from headrace.testing.lone_op import plain_record

MATRIX_LAYOUTS = (Layout.F32, Layout.BF16, Layout.F16, Layout.Q8, Layout.Q4, Layout.Q4M)


@dataclass(frozen=True, slots=True)
class Weight:
    """What the VM takes for a weight."""

    layout: Layout
    n: int
    k: int
    data: NDArray[np.uint8]


def floats(values: NDArray[np.float32], layout: Layout = Layout.VECTOR_F32) -> Weight:
    """A vector [n] or a rotation table [n, k] as a weight."""
    data = vm.aligned_empty(values.size * 4)
    data.view(np.float32)[:] = values.ravel()
    return Weight(layout, values.shape[0], values.shape[1] if values.ndim == 2 else 0, data)


def matrix(values: NDArray[np.float32], layout: Layout) -> Weight:
    """A matrix [n, k] packed from f32."""
    n, k = values.shape
    return Weight(layout, n, k, vm.pack(layout, "F32", values, n, k))


def unpacked(weight: Weight) -> NDArray[np.float32]:
    """The numbers that a packed matrix holds."""
    return vm.unpack(weight.layout, weight.data, weight.n, weight.k)


def no_outputs() -> NDArray[np.void]:
    """A step that chooses no token."""
    return np.zeros(0, dtype=OUTPUT_DTYPE)


@dataclass
class Product:
    """EMBED rows from an exact f32 table, then one LINEAR; the table's row t is input row t."""

    x: NDArray[np.float32]  # [rows, k]
    weight: Weight
    bias: NDArray[np.float32] | None = None
    norm_weight: NDArray[np.float32] | None = None
    norm_bias: NDArray[np.float32] | None = None
    norm: Norm = Norm.NONE
    activation: Activation = Activation.NONE
    epilogue: Epilogue = Epilogue.STORE
    eps: float = 1e-5
    repeats: int = 1  # how often the LINEAR runs; an ADD epilogue accumulates

    def run(self, isa: str, *, threads: int = 1, rows: NDArray[np.int32] | None = None) -> NDArray[np.float32]:
        """The output [rows, n or n/2]; ``rows`` picks and orders the input rows."""
        picked = np.arange(len(self.x), dtype=np.int32) if rows is None else rows.astype(np.int32)
        k, n = self.weight.k, self.weight.n
        width = n // 2 if self.epilogue is Epilogue.GLU else n
        weights = [matrix(self.x, Layout.F32), self.weight]
        indices = {}
        for name, values in (("bias", self.bias), ("norm_weight", self.norm_weight), ("norm_bias", self.norm_bias)):
            indices[name] = -1 if values is None else len(weights)
            if values is not None:
                weights.append(floats(values))
        out = -(-len(picked) * k * 4 // 64) * 64
        program = plain_record(Opcode.EMBED, 0, table=0, out=0, width=k)
        for phase in range(1, 1 + self.repeats):
            program += plain_record(
                Opcode.LINEAR, phase, weight=1, input=0, out=out, k=k, n=n, norm=self.norm, norm_eps=self.eps,
                epilogue=self.epilogue, activation=self.activation, **indices,
            )  # fmt: skip
        machine = vm.Vm(
            program, out + len(picked) * width * 4, weights, threads=threads, max_rows=len(picked), isa=isa,
            kv=vm.KvConfig(KvType.BF16, 1, 1, 32, 1),
        )  # fmt: skip
        machine.step(
            picked,
            np.arange(len(picked), dtype=np.int32),
            np.array([0, len(picked)], dtype=np.int32),
            np.zeros((1, 0), dtype=np.int32),
            no_outputs(),
        )
        return machine.read_buffer(out, len(picked), width)


@pytest.fixture
def rng() -> np.random.Generator:
    """The same numbers in every run."""
    return np.random.default_rng(20)


@pytest.fixture
def product() -> Callable[..., Product]:
    """Makes products."""
    return Product
