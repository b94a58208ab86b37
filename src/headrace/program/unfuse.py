"""Takes a program apart into one instruction per operation, and puts it together again one fusion at a time.

What the fused instructions bring is measured with this (``engine.ablate``): every stage computes the same bits with the
same kernels and weights, and only the number of instructions, hence of barriers and of passes through memory, differs.
Experts stay one instruction at every stage, and a bias stays in its product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from headrace.program.ir import NONE, Buffer, Instruction, Program, WeightSpec, seal, weights_read
from headrace.program.model import Architecture
from headrace.program.opcodes import (
    FIELDS,
    LANES,
    Activation,
    Domain,
    Epilogue,
    Layout,
    Norm,
    Opcode,
    prepared_width,
)
from headrace.program.records import PackedLike


class Fusion(IntEnum):
    """What is joined, in the order in which the stages join it."""

    QUANTISE = 1
    """Rows are brought into the form of the weight inside the product."""
    NORM = 2
    """Rows are normed inside the product, or where they are quantised."""
    GATE = 3
    """Gate and up are one product, and the activation is its epilogue."""
    RESIDUAL = 4
    """Products are added to the residual stream as they come."""
    QKV = 5
    """Queries, keys and values are one product."""
    ROTATE = 6
    """Heads are turned, and keys and values stored, as they come from the product."""
    HEAD = 7
    """Logits are sampled as they come, and never stored."""


STAGES = len(Fusion) + 1
"""Stage n has the first n fusions; the last is the program itself."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Column tiles ``start, start + step, …`` below ``stop`` of a weight of the whole program."""

    source: int
    start: int
    stop: int
    step: int = 1


@dataclass(frozen=True, slots=True)
class Unfused:
    """A program and where each of its weights comes from."""

    program: Program
    cuts: tuple[Cut | int, ...]


@dataclass(frozen=True, slots=True)
class CutWeight:
    """A packed weight that is part of another, as the VM takes it."""

    layout: Layout
    n: int
    k: int
    data: NDArray[np.uint8]


def unfuse(program: Program, stage: int) -> Unfused:
    """Returns the program of a decoder with the first ``stage`` fusions only, each instruction in a phase of its own.

    Args:
        stage: 0 … ``STAGES`` − 1; the last gives the program as it is.
    """
    assert program.spec.architecture is not Architecture.ENCODER_ONLY
    assert 0 <= stage < STAGES
    if stage == STAGES - 1:
        return Unfused(program, tuple(range(len(program.weights))))
    return _Taking(program, stage).unfused()


class Cutter:
    """Gives the packed weights of unfused programs: whole ones as they are, parts copied to aligned memory once.

    Args:
        weights: of the whole program, by index.
    """

    def __init__(self, weights: Sequence[PackedLike]) -> None:
        self._weights = weights
        self._made: dict[Cut, CutWeight] = {}

    def weights_of(self, unfused: Unfused) -> list[PackedLike]:
        """Returns the weights of ``unfused``'s table; parts that another program had are shared with it."""
        return [self._weights[cut] if isinstance(cut, int) else self._part(cut) for cut in unfused.cuts]

    def _part(self, cut: Cut) -> CutWeight:
        if cut not in self._made:
            self._made[cut] = _cut(cut, self._weights[cut.source])
        return self._made[cut]


def _cut(cut: Cut, weight: PackedLike) -> CutWeight:
    tiles = -(-weight.n // LANES)
    part = weight.data.reshape(tiles, -1)[cut.start : cut.stop : cut.step]
    memory = np.empty(part.size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    data = memory[start : start + part.size]
    data.reshape(part.shape)[:] = part
    return CutWeight(weight.layout, len(part) * LANES, weight.k, data)


class _Taking:
    """One walk over the program; buffers and weights are appended, then weights that nobody reads any more go."""

    def __init__(self, program: Program, stage: int) -> None:
        self.program = program
        self.stage = stage
        self.buffers = list(program.buffers)
        self.weights = list(program.weights)
        self.cuts: list[Cut | int] = list(range(len(program.weights)))
        self.items: list[tuple[Opcode, dict[str, float]]] = []

    def joins(self, fusion: Fusion) -> bool:
        return fusion <= self.stage

    def unfused(self) -> Unfused:
        for item in self.program.instructions:
            values = dict(item.values)
            match item.opcode:
                case Opcode.QKV:
                    self._qkv(values)
                case Opcode.LINEAR:
                    self._linear(values)
                case Opcode.HEAD:
                    self._head(values)
                case opcode:
                    self._add(opcode, values)
        readers = {values["input"]: values for opcode, values in self.items if values.get("norm") == Norm.PREPARED}
        for opcode, values in self.items:
            if opcode is Opcode.PREPARE:  # for a weight that is read: the whole one may be in parts
                values["weight"] = readers[values["out"]]["weight"]
        instructions = [Instruction(opcode, phase, values) for phase, (opcode, values) in enumerate(self.items)]
        used = sorted({index for item in instructions for index in weights_read(item)})
        moved = {index: position for position, index in enumerate(used)} | {NONE: NONE}
        read = sorted({index for item in instructions for index in _buffers_of(item)})
        placed = {index: position for position, index in enumerate(read)} | {NONE: NONE}
        program = Program(
            self.program.spec,
            tuple(_renumbered(item, moved, placed) for item in instructions),
            tuple(replace(self.weights[index], index=moved[index]) for index in used),
            tuple(replace(self.buffers[index], index=placed[index]) for index in read),
        )
        return Unfused(seal(program), tuple(self.cuts[index] for index in used))

    # Parts

    def _add(self, opcode: Opcode, values: dict[str, float]) -> None:
        self.items.append((opcode, values))

    def _buffer(self, what: str, width: int) -> int:
        index = len(self.buffers)
        self.buffers.append(Buffer(index, f"{what}.{index}", width))
        return index

    def _part(self, index: float, first: int, count: int, start: int, stop: int, step: int = 1) -> int:
        """Adds a weight of ``count`` parts of another from ``first`` on, which are those of its tiles."""
        if index == NONE:
            return NONE
        whole = self.weights[int(index)]
        parts = whole.parts[first : first + count]
        position = len(self.weights)
        n = sum(part.n for part in parts)
        self.weights.append(WeightSpec(position, f"{whole.name}.{parts[0].role}", whole.kind, n, whole.k, parts))
        self.cuts.append(Cut(int(index), start, stop, step))
        return position

    def _prologue(self, values: dict[str, float]) -> None:
        """Norms and prepares the input of a product by instructions of their own, as far as the stage wants it."""
        k, domain = int(values["k"]), values.get("domain", Domain.ROWS)
        if not self.joins(Fusion.NORM) and values["norm"] != Norm.NONE:
            normed = self._buffer("normed", k)
            norm = {name: values[name] for name in ("input", "k", "norm", "norm_weight", "norm_bias", "norm_eps")}
            self._add(Opcode.NORM, norm | {"out": normed, "epilogue": Epilogue.STORE, "domain": domain})
            values |= {"input": normed, "norm": Norm.NONE, "norm_weight": NONE, "norm_bias": NONE}
        if not self.joins(Fusion.QUANTISE):
            prepared = self._buffer("prepared", prepared_width(k))
            names = {name: values[name] for name in ("weight", "input", "k")}
            self._add(Opcode.PREPARE, names | {"out": prepared, "domain": domain})
            values |= {"input": prepared, "norm": Norm.PREPARED}

    def _product(self, values: dict[str, float], weight: float, bias: float, name: str, **changes: float) -> int:
        """Adds a product of the (prepared) input alone; returns its new buffer."""
        n = self.weights[int(weight)].n
        out = self._buffer(name, n)
        kept = {key: values[key] for key in ("input", "k", "norm", "norm_weight", "norm_bias", "norm_eps")}
        plain = {"epilogue": Epilogue.STORE, "activation": Activation.NONE, "domain": Domain.ROWS}
        self._add(Opcode.LINEAR, kept | plain | {"weight": weight, "bias": bias, "n": n, "out": out} | changes)
        return out

    def _qkv(self, values: dict[str, float]) -> None:
        self._prologue(values)
        if self.joins(Fusion.ROTATE):
            self._add(Opcode.QKV, values)
            return
        if self.joins(Fusion.QKV):
            sources = [self._product(values, values["weight"], values["bias"], "qkv"), NONE, NONE]
        else:
            sources = []
            start = 0
            for number, part in enumerate(self.weights[int(values["weight"])].parts):
                stop = start + part.n // LANES
                weight, bias = (self._part(values[name], number, 1, start, stop) for name in ("weight", "bias"))
                sources.append(self._product(values, weight, bias, part.role))
                start = stop
        q, keys, others = sources
        kept = {field.name: values[field.name] for field in FIELDS[Opcode.ROTATE] if field.name in values}
        self._add(Opcode.ROTATE, kept | {"q": q, "keys": keys, "values": others})

    def _linear(self, values: dict[str, float]) -> None:
        self._prologue(values)
        target, is_added = values["out"], values["epilogue"] == Epilogue.ADD
        if is_added and not self.joins(Fusion.RESIDUAL):
            n = int(values["n"])
            values |= {"out": self._buffer("summand", n), "epilogue": Epilogue.STORE}
        activation = values["activation"]
        if self.joins(Fusion.GATE) or (values["epilogue"] != Epilogue.GLU and activation == Activation.NONE):
            self._add(Opcode.LINEAR, values)
        else:
            self._gate(values)
        if values["out"] != target:
            plain = {"norm": Norm.NONE, "norm_weight": NONE, "norm_bias": NONE, "norm_eps": values["norm_eps"]}
            names = {"input": values["out"], "out": target, "k": values["n"], "domain": values["domain"]}
            self._add(Opcode.NORM, plain | names | {"epilogue": Epilogue.ADD})

    def _gate(self, values: dict[str, float]) -> None:
        weight, bias, n = values["weight"], values["bias"], int(values["n"])
        up = NONE
        if values["epilogue"] == Epilogue.GLU:
            tiles = n // LANES
            gate, up = (
                self._product(
                    values,
                    self._part(weight, side, 1, side, tiles, 2),
                    self._part(bias, side, 1, side, tiles, 2),
                    name,
                )
                for side, name in enumerate(("gate", "up"))
            )
            width = n // 2
        else:
            gate, width = self._product(values, weight, bias, "raw"), n
        names = {"gate": gate, "up": up, "out": values["out"], "width": width}
        self._add(Opcode.GATE, names | {"activation": values["activation"]})

    def _head(self, values: dict[str, float]) -> None:
        picked = self._buffer("picked", int(values["k"]))
        self._add(Opcode.PICK, {"input": values["input"], "out": picked, "k": values["k"]})
        values |= {"input": picked, "domain": Domain.OUTPUTS}
        self._prologue(values)
        logits = self._product(values, values["weight"], NONE, "logits", domain=Domain.OUTPUTS)
        plain = {"norm": Norm.NONE, "norm_weight": NONE, "norm_bias": NONE, "weight": NONE}
        del values["domain"]
        self._add(Opcode.HEAD, values | plain | {"input": logits, "k": values["vocab"]})


def _buffers_of(item: Instruction) -> list[int]:
    fields = [field.name for field in FIELDS[item.opcode] if field.type == "buffer"]
    return [index for index in map(item.integer, fields) if index != NONE]


def _renumbered(item: Instruction, weights: dict[int, int], buffers: dict[int, int]) -> Instruction:
    moved = {"weight": weights, "buffer": buffers}
    values = dict(item.values)
    for field in FIELDS[item.opcode]:
        if field.type in moved:
            values[field.name] = moved[field.type][item.integer(field.name)]
    return Instruction(item.opcode, item.phase, values)
