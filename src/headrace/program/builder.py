"""Builds a logical program by calls that read like the model: ``x = b.embed(…)``, ``q = b.qkv(x, …)``, …

The builder only records. It forms phases from the data flow (an instruction that depends on one of the running phase
starts the next), seals the digest, and leaves proof to ``verify``.
"""

from __future__ import annotations

from headrace.program.ir import (
    NONE,
    Buffer,
    Instruction,
    Part,
    Program,
    WeightSpec,
    effect,
    kv_read,
    kv_written,
    seal,
)
from headrace.program.model import ModelSpec
from headrace.program.opcodes import LANES, Epilogue, Norm, Opcode


class Builder:
    """Collects weights, buffers and instructions of one program."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self._weights: list[WeightSpec] = []
        self._buffers: list[Buffer] = []
        self._instructions: list[tuple[Opcode, dict[str, float]]] = []

    # Weights

    def matrix(self, name: str, k: int, *parts: Part, interleave: int = 0) -> int:
        """Adds a matrix of ``k`` inputs whose columns are the rows of ``parts``; returns its index."""
        return self._weight(name, "matrix", k, parts, interleave)

    def vector(self, name: str, *parts: Part, interleave: int = 0) -> int:
        """Adds an f32 vector (norm weight or bias); returns its index."""
        return self._weight(name, "vector", 1, parts, interleave)

    def rope(self, name: str, positions: int, head_size: int) -> int:
        """Adds a rotary table, computed at load from the spec; returns its index."""
        self._weights.append(WeightSpec(len(self._weights), name, "rope", positions, head_size))
        return len(self._weights) - 1

    def _weight(self, name: str, kind: str, k: int, parts: tuple[Part, ...], interleave: int) -> int:
        assert interleave in (0, LANES)
        n = sum(part.n for part in parts)
        self._weights.append(WeightSpec(len(self._weights), name, kind, n, k, parts, interleave))
        return len(self._weights) - 1

    # Instructions

    def _buffer(self, name: str, width: int) -> int:
        self._buffers.append(Buffer(len(self._buffers), name, width))
        return len(self._buffers) - 1

    def embed(self, name: str, table: int, *, scale: float = 1.0) -> int:
        """Residual rows from the step's token ids; returns the new buffer."""
        out = self._buffer(name, self._weights[table].k)
        self._instructions.append(
            (Opcode.EMBED, {"table": table, "out": out, "width": self._weights[table].k, "scale": scale})
        )
        return out

    def qkv(
        self,
        name: str,
        x: int,
        weight: int,
        *,
        layer: int,
        rope: int = NONE,
        norm_weight: int = NONE,
        bias: int = NONE,
    ) -> int:
        """Norm, q/k/v product, RoPE, and append to the layer's pages; returns the buffer of q."""
        shape = self.spec.layer(layer)
        out = self._buffer(name, shape.heads * shape.head_size)
        self._instructions.append(
            (
                Opcode.QKV,
                {
                    "weight": weight,
                    "bias": bias,
                    "input": x,
                    "q_out": out,
                    "k": self._weights[weight].k,
                    "heads": shape.heads,
                    "kv_heads": shape.kv_heads,
                    "head_size": shape.head_size,
                    **self._norm(norm_weight),
                    "rope": rope,
                    "layer": layer,
                },
            )
        )
        return out

    def attention(self, name: str, q: int, *, layer: int, softcap: float = 0.0) -> int:
        """Causal attention of q over the layer's pages; returns the new buffer."""
        shape = self.spec.layer(layer)
        out = self._buffer(name, shape.heads * shape.head_size)
        scale = self.spec.attention_scale
        self._instructions.append(
            (
                Opcode.ATTENTION,
                {
                    "q": q,
                    "out": out,
                    "heads": shape.heads,
                    "kv_heads": shape.kv_heads,
                    "head_size": shape.head_size,
                    "layer": layer,
                    "scale": shape.head_size**-0.5 if scale is None else scale,
                    "window": shape.window,
                    "softcap": softcap,
                },
            )
        )
        return out

    def linear(
        self,
        name: str,
        x: int,
        weight: int,
        *,
        bias: int = NONE,
        norm_weight: int = NONE,
        epilogue: Epilogue = Epilogue.STORE,
        add_to: int = NONE,
    ) -> int:
        """Norm, product, bias, epilogue. ADD accumulates into ``add_to`` and returns it; else returns a new buffer."""
        assert (epilogue is Epilogue.ADD) == (add_to != NONE)
        n = self._weights[weight].n
        if epilogue is Epilogue.ADD:
            out = add_to
        else:
            out = self._buffer(name, n // 2 if epilogue is Epilogue.SILU_GLU else n)
        self._instructions.append(
            (
                Opcode.LINEAR,
                {
                    "weight": weight,
                    "bias": bias,
                    "input": x,
                    "out": out,
                    "k": self._weights[weight].k,
                    "n": n,
                    **self._norm(norm_weight),
                    "epilogue": epilogue,
                },
            )
        )
        return out

    def head(self, x: int, weight: int, *, norm_weight: int = NONE, scale: float = 1.0, softcap: float = 0.0) -> None:
        """Norm, vocabulary product and sampling of the output rows."""
        self._instructions.append(
            (
                Opcode.HEAD,
                {
                    "weight": weight,
                    "input": x,
                    "k": self._weights[weight].k,
                    "vocab": self._weights[weight].n,
                    **self._norm(norm_weight),
                    "scale": scale,
                    "softcap": softcap,
                },
            )
        )

    def _norm(self, norm_weight: int) -> dict[str, float]:
        norm = Norm.NONE if norm_weight == NONE else Norm.RMS
        return {"norm": norm, "norm_weight": norm_weight, "norm_eps": self.spec.norm_eps}

    def program(self) -> Program:
        """Returns the sealed program, phases formed."""
        instructions = form_phases([Instruction(opcode, 0, values) for opcode, values in self._instructions])
        return seal(Program(self.spec, instructions, tuple(self._weights), tuple(self._buffers)))


def form_phases(instructions: list[Instruction]) -> tuple[Instruction, ...]:
    """Returns the instructions with phases as long as the data flow allows, in the order given.

    Two instructions share a phase only if neither touches what the other writes, KV pages included.
    """
    phase = 0
    touched: set[int] = set()
    written: set[int] = set()
    kv_written_now: set[int] = set()
    kv_read_now: set[int] = set()
    formed = []
    for item in instructions:
        seen = effect(item)
        changes = {*seen.updates, *seen.writes}
        uses = {*seen.reads, *changes}
        depends = bool(uses & written) or bool(changes & touched)
        depends |= kv_read(item) in kv_written_now or kv_written(item) in kv_read_now | kv_written_now
        if depends:
            phase += 1
            for group in (touched, written, kv_written_now, kv_read_now):
                group.clear()
        touched |= uses
        written |= changes
        if (layer := kv_written(item)) is not None:
            kv_written_now.add(layer)
        if (layer := kv_read(item)) is not None:
            kv_read_now.add(layer)
        formed.append(Instruction(item.opcode, phase, item.values))
    return tuple(formed)
