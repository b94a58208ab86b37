"""Builds a logical program by calls that read like the model: ``x = b.embed(…)``, ``q = b.qkv(x, …)``, …

The builder only records. It forms phases from the data flow (an instruction that depends on one of the running phase
starts the next), seals the digest, and leaves proof to ``verify``.

Arguments that many instructions share: ``norm_weight`` and ``norm_bias`` are vectors of the norm that the input goes
through first; ``norm`` says which, and by default is RMS where a weight is given and none where not.
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
from headrace.program.model import Architecture, ModelSpec, RopeSpec
from headrace.program.opcodes import LANES, STEP_PAGES, Activation, Domain, Epilogue, Norm, Opcode, Pooling


class Builder:
    """Collects weights, buffers and instructions of one program."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self._weights: list[WeightSpec] = []
        self._buffers: list[Buffer] = []
        self._instructions: list[tuple[Opcode, dict[str, float]]] = []

    # Weights

    def matrix(self, name: str, k: int, *parts: Part, interleave: int = 0) -> int:
        """Adds a matrix of ``k`` inputs whose columns are the rows of ``parts``; returns its index.

        ``interleave`` 16: parts come in pairs (gate, up; of experts one pair after the other), 16 rows of each in turn.
        """
        return self._weight(name, "matrix", k, parts, interleave)

    def vector(self, name: str, *parts: Part, interleave: int = 0) -> int:
        """Adds an f32 vector (norm weight or bias); returns its index."""
        return self._weight(name, "vector", 1, parts, interleave)

    def rope(self, name: str, positions: int, rotary_size: int, rope: RopeSpec) -> int:
        """Adds a rotary table, computed at load; returns its index. Layers may name different ones."""
        spec = WeightSpec(len(self._weights), name, "rope", positions, rotary_size, rope=rope)
        self._weights.append(spec)
        return spec.index

    def _weight(self, name: str, kind: str, k: int, parts: tuple[Part, ...], interleave: int) -> int:
        assert interleave in (0, LANES)
        n = sum(part.n for part in parts)
        self._weights.append(WeightSpec(len(self._weights), name, kind, n, k, parts, interleave))
        return len(self._weights) - 1

    # Instructions

    def width_of(self, buffer: int) -> int:
        """Returns the elements of a row of ``buffer``."""
        return self._buffers[buffer].width

    def _buffer(self, name: str, width: int) -> int:
        self._buffers.append(Buffer(len(self._buffers), name, width))
        return len(self._buffers) - 1

    def _add(self, opcode: Opcode, **values: float) -> None:
        self._instructions.append((opcode, values))

    def _out(self, name: str, width: int, epilogue: Epilogue, add_to: int) -> int:
        assert (epilogue is Epilogue.ADD) == (add_to != NONE)
        return add_to if epilogue is Epilogue.ADD else self._buffer(name, width)

    def _norm(self, norm: Norm | None, weight: int, bias: int) -> dict[str, float]:
        if norm is None:
            norm = Norm.NONE if weight == NONE else Norm.RMS
        return {"norm": norm, "norm_weight": weight, "norm_bias": bias, "norm_eps": self.spec.norm_eps}

    def embed(
        self,
        name: str,
        table: int,
        *,
        scale: float = 1.0,
        positions: int = NONE,
        position_offset: int = 0,
        types: int = NONE,
    ) -> int:
        """Rows from the step's token ids, table · scale + positions + types; returns the new buffer.

        Args:
            positions: matrix of learned positions, [positions, width].
            position_offset: its row of position 0.
            types: matrix of token types, [types, width].
        """
        width = self._weights[table].k
        out = self._buffer(name, width)
        self._add(
            Opcode.EMBED,
            table=table,
            out=out,
            width=width,
            scale=scale,
            positions=positions,
            position_offset=position_offset,
            types=types,
        )
        return out

    def norm(
        self,
        name: str,
        x: int,
        *,
        norm_weight: int = NONE,
        norm_bias: int = NONE,
        norm: Norm | None = None,
        epilogue: Epilogue = Epilogue.STORE,
        add_to: int = NONE,
        domain: Domain = Domain.ROWS,
    ) -> int:
        """A norm that no product follows. ADD accumulates into ``add_to`` and returns it; else returns a new buffer."""
        k = self._buffers[x].width
        out = self._out(name, k, epilogue, add_to)
        values = self._norm(norm, norm_weight, norm_bias)
        self._add(Opcode.NORM, input=x, out=out, k=k, epilogue=epilogue, domain=domain, **values)
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
        norm_bias: int = NONE,
        norm: Norm | None = None,
        bias: int = NONE,
        q_norm: int = NONE,
        k_norm: int = NONE,
        is_kept: bool | None = None,
    ) -> int:
        """Norm, q/k/v product, norms of the heads, RoPE, and append to the layer's pages; returns the buffer of q.

        Args:
            is_kept: keys and values stay in the pool for later steps; else every sequence must stand in the step whole.
                None: in all models but encoders.
            rope: rotary table; its width says how many elements of a head turn. NONE for a layer without positions.
            q_norm, k_norm: vectors [head size] of an RMS norm of every head.
        """
        shape = self.spec.layer(layer)
        out = self._buffer(name, shape.heads * shape.head_size)
        self._add(
            Opcode.QKV,
            weight=weight,
            bias=bias,
            input=x,
            q_out=out,
            k=self._weights[weight].k,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_size=shape.head_size,
            **self._norm(norm, norm_weight, norm_bias),
            q_norm=q_norm,
            k_norm=k_norm,
            qk_norm_eps=self.spec.norm_eps,
            rope=rope,
            rotary_size=0 if rope == NONE else self._weights[rope].k,
            layer=self._pages(layer, is_kept),
        )
        return out

    def _pages(self, layer: int, is_kept: bool | None) -> int:
        if is_kept is None:
            is_kept = self.spec.architecture is not Architecture.ENCODER_ONLY
        return layer if is_kept else STEP_PAGES

    def attention(
        self,
        name: str,
        q: int,
        *,
        layer: int,
        scale: float | None = None,
        softcap: float = 0.0,
        is_kept: bool | None = None,
        is_bidirectional: bool | None = None,
    ) -> int:
        """Attention of q over the layer's pages, in the layer's window; returns the new buffer.

        Args:
            scale: multiplies the scores; None takes the spec's, which by default is 1/√head size.
            softcap: tanh cap of the scores, 0 for none.
            is_kept: as ``qkv`` was told.
            is_bidirectional: later positions are visible too, and a window counts on each side. None: in encoders.
        """
        if is_bidirectional is None:
            is_bidirectional = self.spec.architecture is Architecture.ENCODER_ONLY
        shape = self.spec.layer(layer)
        out = self._buffer(name, shape.heads * shape.head_size)
        if scale is None:
            scale = self.spec.attention_scale
        self._add(
            Opcode.ATTENTION,
            q=q,
            out=out,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_size=shape.head_size,
            layer=self._pages(layer, is_kept),
            scale=shape.head_size**-0.5 if scale is None else scale,
            window=shape.window,
            is_bidirectional=int(is_bidirectional),
            softcap=softcap,
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
        norm_bias: int = NONE,
        norm: Norm | None = None,
        epilogue: Epilogue = Epilogue.STORE,
        activation: Activation = Activation.NONE,
        add_to: int = NONE,
        domain: Domain = Domain.ROWS,
    ) -> int:
        """Norm, product, bias, activation, epilogue, for every row, or for the one of each sequence that POOL made.

        ADD accumulates into ``add_to`` and returns it; else returns a new buffer. GLU reads a weight of two parts that
        are interleaved, gate and up, and gives activation(gate) × up.
        """
        n = self._weights[weight].n
        out = self._out(name, n // 2 if epilogue is Epilogue.GLU else n, epilogue, add_to)
        self._add(
            Opcode.LINEAR,
            weight=weight,
            bias=bias,
            input=x,
            out=out,
            k=self._weights[weight].k,
            n=n,
            **self._norm(norm, norm_weight, norm_bias),
            epilogue=epilogue,
            activation=activation,
            domain=domain,
        )
        return out

    def pool(
        self,
        name: str,
        x: int,
        *,
        pooling: Pooling,
        is_normalised: bool = False,
        norm_weight: int = NONE,
        norm_bias: int = NONE,
        norm: Norm | None = None,
    ) -> int:
        """One row of each sequence from its (normed) rows; returns the new buffer, of domain SEQUENCES.

        Args:
            is_normalised: the row is divided by its Euclidean length.
        """
        k = self._buffers[x].width
        out = self._buffer(name, k)
        values = self._norm(norm, norm_weight, norm_bias)
        self._add(Opcode.POOL, input=x, out=out, k=k, pooling=pooling, is_normalised=int(is_normalised), **values)
        return out

    def pick(self, name: str, x: int) -> int:
        """The rows that the step's outputs name; returns the new buffer, of domain OUTPUTS."""
        k = self._buffers[x].width
        out = self._buffer(name, k)
        self._add(Opcode.PICK, input=x, out=out, k=k)
        return out

    def moe(
        self,
        x: int,
        *,
        router: int,
        gate_up: int,
        down: int,
        top_k: int,
        is_renormalised: bool,
        add_to: int,
        norm_weight: int = NONE,
        norm_bias: int = NONE,
        norm: Norm | None = None,
        activation: Activation = Activation.SILU,
    ) -> int:
        """Routed experts, added to ``add_to`` (which may be ``x``); returns ``add_to``.

        Args:
            router: matrix [experts, width].
            gate_up: matrix [experts · 2 · hidden, width] of parts gate₀, up₀, gate₁, up₁, … and ``interleave=16``.
            down: matrix [experts · width, hidden].
            top_k: experts of a row.
            is_renormalised: the probabilities of a row's experts are divided by their sum.
        """
        self._add(
            Opcode.MOE,
            input=x,
            out=add_to,
            router=router,
            gate_up=gate_up,
            down=down,
            k=self._weights[router].k,
            hidden=self._weights[down].k,
            experts=self._weights[router].n,
            top_k=top_k,
            is_renormalised=int(is_renormalised),
            **self._norm(norm, norm_weight, norm_bias),
            activation=activation,
        )
        return add_to

    def head(
        self,
        x: int,
        weight: int,
        *,
        norm_weight: int = NONE,
        norm_bias: int = NONE,
        norm: Norm | None = None,
        scale: float = 1.0,
        softcap: float = 0.0,
    ) -> None:
        """Norm, vocabulary product and sampling of the output rows. ``softcap``: tanh cap of the logits, 0 for none."""
        self._add(
            Opcode.HEAD,
            weight=weight,
            input=x,
            k=self._weights[weight].k,
            vocab=self._weights[weight].n,
            **self._norm(norm, norm_weight, norm_bias),
            scale=scale,
            softcap=softcap,
        )

    def program(self, *kept: int) -> Program:
        """Returns the sealed program, phases formed.

        Args:
            kept: buffers that are read after the step, beside what the last instruction writes.
        """
        instructions = form_phases([Instruction(opcode, 0, values) for opcode, values in self._instructions])
        return seal(Program(self.spec, instructions, tuple(self._weights), tuple(self._buffers), kept=kept))


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
