"""Programs of pre-norm blocks, attention and MLP over one residual stream, as the spec says: all decoders are these.

Families differ in what they put into the spec and in where their files keep the weights; this is what they share.
"""

from __future__ import annotations

from typing import TypedDict

from headrace.program.builder import Builder
from headrace.program.families import encoder_heads
from headrace.program.ir import NONE, Part, Program
from headrace.program.model import Architecture, LayerSpec, ModelSpec, RopeSpec
from headrace.program.opcodes import LANES, Epilogue, Norm


def build(spec: ModelSpec) -> Program:
    """Returns the program of one step: 4 to 7 instructions per layer, then the head, or what makes a vector."""
    b = Builder(spec)
    table = b.matrix("embed", spec.width, Part("embed", spec.vocab_size))
    positions = NONE
    if spec.has_learned_positions:
        positions = b.matrix("positions", spec.width, Part("positions", spec.context_tokens))
    ropes = rotary_tables(b)
    x = b.embed("x", table, scale=spec.embed_scale, positions=positions)
    for index in range(spec.layers):
        Block(b, index, x).add(ropes[index])
    norms = norm_of(b, "final_norm")
    if spec.architecture is Architecture.ENCODER_ONLY:
        return encoder_heads.embed(b, b.norm(encoder_heads.ROWS, x, **norms, norm=spec.norm), table)
    head = table if spec.is_tied else b.matrix("head", spec.width, Part("head", spec.vocab_size))
    b.head(x, head, **norms, norm=spec.norm, scale=spec.logit_scale, softcap=spec.logit_softcap)
    return b.program()


class NormArguments(TypedDict):
    """A builder's arguments of a norm."""

    norm_weight: int
    norm_bias: int


def rotary_tables(b: Builder) -> list[int]:
    """Adds a table for each rotary spec that some layer has; returns the layers' tables, NONE for those without."""
    spec = b.spec
    turning = dict.fromkeys(rope for index in range(spec.layers) if (rope := spec.layer(index).rope) is not None)
    rotary_size = spec.rotary_size or spec.head_size
    tables: dict[RopeSpec | None, int] = {None: NONE}
    for number, rope in enumerate(turning):
        name = f"rope.{number}" if number else "rope"
        tables[rope] = b.rope(name, spec.context_tokens, rotary_size, rope)
    return [tables[spec.layer(index).rope] for index in range(spec.layers)]


def norm_of(b: Builder, role: str) -> NormArguments:
    """Adds a norm's weight, and its bias where the model has them; returns them as a builder's arguments."""
    width, has_bias = b.spec.width, b.spec.has_norm_bias
    return {
        "norm_weight": b.vector(role, Part(role, width)),
        "norm_bias": b.vector(f"{role}_bias", Part(f"{role}_bias", width)) if has_bias else NONE,
    }


class Block:
    """One layer in the making; ``x`` is updated in place."""

    def __init__(self, b: Builder, index: int, x: int) -> None:
        self.b, self.index, self.x = b, index, x
        self.spec: ModelSpec = b.spec
        self.shape: LayerSpec = b.spec.layer(index)
        self.at = f"layers.{index}"

    def add(self, rope: int, *, is_normed: bool = True) -> None:
        """Adds attention, then the MLP or the experts.

        Args:
            rope: rotary table, or NONE.
            is_normed: attention reads the stream through a norm.
        """
        self._attend(rope, is_normed)
        if self.shape.experts:
            self._route()
        else:
            self._mlp()

    def _parts(self, suffix: str, *sizes: tuple[str, int]) -> list[Part]:
        return [Part(f"{self.at}.{name}{suffix}", n) for name, n in sizes]

    def _bias(self, has_bias: bool, name: str, *sizes: tuple[str, int], interleave: int = 0) -> int:
        if not has_bias:
            return NONE
        return self.b.vector(f"{self.at}.{name}_bias", *self._parts("_bias", *sizes), interleave=interleave)

    def _vector(self, name: str, n: int) -> int:
        return self.b.vector(f"{self.at}.{name}", Part(f"{self.at}.{name}", n))

    def _attend(self, rope: int, is_normed: bool) -> None:
        b, spec, shape, at = self.b, self.spec, self.shape, self.at
        q_size, kv_size = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
        qkv = (("q", q_size), ("k", kv_size), ("v", kv_size))
        q = b.qkv(
            f"{at}.q",
            self.x,
            b.matrix(f"{at}.qkv", spec.width, *self._parts("", *qkv)),
            layer=self.index,
            rope=rope,
            **(norm_of(b, f"{at}.attention_norm") if is_normed else NormArguments(norm_weight=NONE, norm_bias=NONE)),
            norm=spec.norm if is_normed else Norm.NONE,
            bias=self._bias(spec.has_attention_bias, "qkv", *qkv),
            q_norm=self._vector("q_norm", shape.head_size) if spec.has_qk_norm else NONE,
            k_norm=self._vector("k_norm", shape.head_size) if spec.has_qk_norm else NONE,
        )
        mixed = b.attention(
            f"{at}.attention",
            q,
            layer=self.index,
            softcap=spec.attention_softcap,
            is_bidirectional=spec.architecture is Architecture.ENCODER_ONLY and not spec.is_causal,
        )
        self._add_product("o", mixed, q_size, spec.has_output_bias, "attention_out_norm")

    def _mlp(self) -> None:
        b, spec, hidden, at = self.b, self.spec, self.shape.hidden, self.at
        sizes = (("gate", hidden), ("up", hidden)) if spec.is_gated else (("up", hidden),)
        name, interleave = ("gate_up", LANES) if spec.is_gated else ("up", 0)
        inner = b.linear(
            f"{at}.hidden",
            self.x,
            b.matrix(f"{at}.{name}", spec.width, *self._parts("", *sizes), interleave=interleave),
            **norm_of(b, f"{at}.mlp_norm"),
            norm=spec.norm,
            bias=self._bias(spec.has_mlp_bias, name, *sizes, interleave=interleave),
            epilogue=Epilogue.GLU if spec.is_gated else Epilogue.STORE,
            activation=spec.activation,
        )
        self._add_product("down", inner, hidden, spec.has_mlp_bias, "mlp_out_norm")

    def _route(self) -> None:
        b, spec, shape, at = self.b, self.spec, self.shape, self.at
        gate_up = [
            Part(f"{at}.expert_{name}.{expert}", shape.hidden)
            for expert in range(shape.experts)
            for name in ("gate", "up")
        ]
        down = [Part(f"{at}.expert_down.{expert}", spec.width) for expert in range(shape.experts)]
        b.moe(
            self.x,
            router=b.matrix(f"{at}.router", spec.width, *self._parts("", ("router", shape.experts))),
            gate_up=b.matrix(f"{at}.experts_gate_up", spec.width, *gate_up, interleave=LANES),
            down=b.matrix(f"{at}.experts_down", shape.hidden, *down),
            top_k=spec.top_k,
            is_renormalised=spec.is_renormalised,
            add_to=self.x,
            **norm_of(b, f"{at}.mlp_norm"),
            norm=spec.norm,
            activation=spec.activation,
        )

    def _add_product(self, name: str, inner: int, k: int, has_bias: bool, out_norm: str) -> None:
        """Adds a product to the residual stream, through a norm of its own where the model has one."""
        b, spec, at = self.b, self.spec, self.at
        weight = b.matrix(f"{at}.{name}", k, *self._parts("", (name, spec.width)))
        bias = self._bias(has_bias, name, (name, spec.width))
        if not spec.has_output_norms:
            b.linear(f"{at}.{name}", inner, weight, bias=bias, epilogue=Epilogue.ADD, add_to=self.x)
            return
        out = b.linear(f"{at}.{name}", inner, weight, bias=bias)
        norms = norm_of(b, f"{at}.{out_norm}")
        b.norm(f"{at}.{out_norm}", out, **norms, norm=spec.norm, epilogue=Epilogue.ADD, add_to=self.x)
