"""Loads a model's weights: stored tensors → rows in program order → packed arrays that the VM reads.

One weight is in the making per thread, so beside the packed result only that many raw copies exist at a time; the
stored side is a memory map whose pages are given back as soon as they are packed. Row moves (fusing, un-permuting)
work on quantised rows as they are: a row is a whole number of blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.base.errors import ModelFormatError
from headrace.engine.packed_linear import packed_rows
from headrace.engine.quantize import to_f32
from headrace.engine.weight_plan import SourcePart, WeightPlan, plan_weights
from headrace.program.cost import layout_bytes
from headrace.program.ir import Program
from headrace.program.model import ModelSpec
from headrace.program.opcodes import LANES, Layout
from headrace.program.rope import rope_table
from headrace.registry.model import ModelFiles
from headrace.registry.pages import release_pages

ALIGNMENT_BYTES = 64
"""A cache line, and the widest vector register: kernels load packed weights with aligned instructions."""


class Pack(Protocol):
    """``kernels.vm.pack``: stored rows → a packed layout. ``raw`` is f32 or uint16 [n, k], or uint8 [n, row bytes]."""

    def __call__(self, layout: Layout, source: str, raw: NDArray[np.generic], n: int, k: int, /) -> NDArray[np.uint8]:
        """Returns the packed bytes."""


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """One entry of the VM's weight table; ``data`` is uint8, 64-byte aligned, ``layout_bytes(layout, n, k)`` long."""

    index: int
    layout: Layout
    n: int
    k: int
    data: NDArray[np.uint8]


def load_weights(
    files: ModelFiles,
    program: Program,
    *,
    dtype: str = "bf16",
    quantization: str = "none",
    rope_positions: int | None = None,
    threads: int = 2,
    progress: Callable[[int, int], None] | None = None,
    pack: Pack | None = None,
    stored: Mapping[int, PackedWeight] | None = None,
) -> list[PackedWeight]:
    """Returns the program's weights, packed, in the order of its table.

    Args:
        rope_positions: positions of the rope table; None takes the model's whole context.

    Raises:
        ConfigError, ModelFormatError, ModelUnsupportedError: as ``plan_weights``, before anything is allocated.
        ModelFormatError, MachineError: as ``make_weights``.
    """
    plans = plan_weights(files, program, dtype=dtype, quantization=quantization, rope_positions=rope_positions)
    return make_weights(plans, program.spec, threads=threads, progress=progress, pack=pack, stored=stored)


def make_weights(
    planned: Sequence[WeightPlan],
    spec: ModelSpec,
    *,
    threads: int = 2,
    progress: Callable[[int, int], None] | None = None,
    pack: Pack | None = None,
    stored: Mapping[int, PackedWeight] | None = None,
) -> list[PackedWeight]:
    """Returns the planned weights, packed, in the order of their plans.

    Args:
        planned: of the whole table.
        progress: called in this thread with packed bytes done and in all.
        pack: None takes the native one.
        stored: weights by index that are there already; they are not made again.

    Raises:
        ModelFormatError: a vector holds a value that is not finite.
        MachineError: the native library is missing.

    Cost: reads every stored byte once; about 0.3 s per 100 MB of 4-bit blocks on one thread.
    """
    weights = dict(stored or {})
    plans = [plan for plan in planned if plan.spec.index not in weights]
    total = sum(plan.size_bytes for plan in plans)
    packer = (
        _native_packer(total + len(plans) * ALIGNMENT_BYTES)
        if pack is None
        else _Packer(pack, pack, lambda size_bytes: np.empty(size_bytes, np.uint8))
    )
    done = 0
    with ThreadPoolExecutor(max(1, threads)) as pool:
        for weight in pool.map(lambda plan: _make(plan, spec, packer), plans):
            weights[weight.index] = weight
            done += weight.data.nbytes
            if progress is not None:
                progress(done, total)
    return [weights[plan.spec.index] for plan in planned]


@dataclass(frozen=True, slots=True)
class _Packer:
    """Packs into the weights' common memory, or apart from it what is joined there afterwards."""

    pack: Pack
    pack_apart: Pack
    take: Callable[[int], NDArray[np.uint8]]


def _native_packer(size_bytes: int) -> _Packer:
    # Late: planning and memory estimates must work where the native library is not built.
    from headrace.kernels.vm import WeightMemory, pack

    memory = WeightMemory(size_bytes)
    return _Packer(partial(pack, memory=memory), pack, memory.take)


def _make(plan: WeightPlan, spec: ModelSpec, packer: _Packer) -> PackedWeight:
    k = plan.spec.k
    match plan.spec.kind:
        case "rope":
            assert plan.spec.rope is not None
            data = rope_table(plan.spec.rope, k, plan.n).reshape(-1).view(np.uint8)
        case "vector":
            data = _vector(plan).view(np.uint8)
        case _:
            data = _matrix(plan, packer)
    assert data.nbytes == layout_bytes(plan.layout, plan.n, k), plan.spec.name
    weight = PackedWeight(plan.spec.index, plan.layout, plan.n, k, _aligned(data))
    for part in plan.parts:
        release_pages(part.tensor.data)
    return weight


def _matrix(plan: WeightPlan, packer: _Packer) -> NDArray[np.uint8]:
    """Returns the packed parts. Parts of one stored type are packed as one; others each by itself, tile by tile."""
    k, interleave = plan.spec.k, plan.spec.interleave
    pieces = [_typed_rows(part, plan.layout) for part in plan.parts]
    types, raws = [kind for kind, _ in pieces], [raw for _, raw in pieces]
    if len(set(types)) == 1:
        return _pack(packer.pack, plan.layout, types[0], _join(raws, interleave), k)
    if all(len(raw) % LANES == 0 for raw in raws) and interleave in (0, LANES):
        tiles = [
            _pack(packer.pack_apart, plan.layout, kind, raw, k).reshape(len(raw) // LANES, -1)
            for kind, raw in zip(types, raws, strict=True)
        ]
        return _join(tiles, interleave // LANES, packer.take(plan.size_bytes)).reshape(-1)
    values = [to_f32(kind, raw, k).view(np.uint8) for kind, raw in zip(types, raws, strict=True)]
    return _pack(packer.pack, plan.layout, "F32", _join(values, interleave), k)


def _pack(pack: Pack, layout: Layout, stored: str, raw: NDArray[np.uint8], k: int) -> NDArray[np.uint8]:
    element = {"F32": "<f4", "F16": "<u2", "BF16": "<u2"}.get(stored, "u1")
    # Files align tensors to 8 bytes or not at all; a copy is made only where the elements do not lie naturally.
    return pack(layout, stored, np.require(raw.view(element), requirements=("C", "A")), len(raw), k)


def _rows(part: SourcePart) -> NDArray[np.uint8]:
    return _typed_rows(part, Layout.VECTOR_F32)[1]


def _typed_rows(part: SourcePart, layout: Layout) -> tuple[str, NDArray[np.uint8]]:
    """Returns stored type and rows of a part, [n, row bytes] uint8, with q and k rows back in half-split RoPE order."""
    tensor = part.tensor
    if tensor.packed is None:
        return tensor.dtype, _choose_rows(part, tensor.data)
    kind, data = packed_rows(tensor, layout)
    return kind, _choose_rows(part, data)


def _choose_rows(part: SourcePart, data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    source, tensor = part.source, part.tensor
    if source.is_transposed:
        columns = slice(source.start, source.start + part.n)
        elements = data.reshape(*tensor.shape, -1)  # [k, rows, element bytes]
        return np.ascontiguousarray(elements[:, columns].swapaxes(0, 1)).reshape(part.n, -1)
    rows = part.n if source.rows is None else source.rows
    first = source.expert * rows + source.start
    raw = data.reshape(max(source.experts, 1) * rows, -1)[first : first + part.n]
    if not part.head_size:
        return raw
    # Source row 2·i + j of a head is row i + j·D/2.
    moved = raw.reshape(part.n // part.head_size, part.head_size // 2, 2, -1).swapaxes(1, 2)
    return np.ascontiguousarray(moved).reshape(part.n, -1)


def _join(raws: list[NDArray[np.uint8]], interleave: int, out: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
    """Returns the parts' rows one after the other, or of each pair of parts ``interleave`` rows in turn.

    ``out`` is where they shall lie, if it is given.
    """
    if len(raws) == 1:
        return raws[0]
    row_bytes = raws[0].shape[1]
    if interleave:
        raws = [
            np.stack([raw.reshape(-1, interleave, row_bytes) for raw in pair], axis=1).reshape(-1, row_bytes)
            for pair in zip(raws[::2], raws[1::2], strict=True)
        ]
    return np.concatenate(raws, out=None if out is None else out.reshape(-1, row_bytes))


def _vector(plan: WeightPlan) -> NDArray[np.float32]:
    columns = [_vector_rows(part).view(np.uint8) for part in plan.parts]
    values = _join(columns, plan.spec.interleave).view(np.float32).reshape(-1)
    if not np.isfinite(values).all():
        raise ModelFormatError(f"{plan.parts[0].tensor.name}: holds a value that is not a finite number")
    return values


def _vector_rows(part: SourcePart) -> NDArray[np.float32]:
    values = to_f32(part.tensor.dtype, _rows(part), 1)
    return values + np.float32(part.source.offset) if part.source.offset else values


def _aligned(data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Returns ``data`` itself where it is aligned and not a view of the file (those are read-only), else a copy."""
    if data.ctypes.data % ALIGNMENT_BYTES == 0 and data.flags.c_contiguous and data.flags.writeable:
        return data
    room = np.empty(data.nbytes + ALIGNMENT_BYTES, np.uint8)
    start = -room.ctypes.data % ALIGNMENT_BYTES
    out = room[start : start + data.nbytes]
    out[:] = data.reshape(-1)
    return out
