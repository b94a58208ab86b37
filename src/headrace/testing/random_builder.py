"""Random programs that no family has: every instruction, every field, drawn. Seeded: same seed, same program.

``random_programs`` makes weights and batches for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.program.builder import Builder
from headrace.program.ir import NONE, Part, Program
from headrace.program.model import Architecture, LayerSpec, ModelSpec, RopeKind, RopeSpec
from headrace.program.opcodes import LANES, Activation, Domain, Epilogue, Norm, Pooling

CONTEXT_TOKENS = 2048
TOKEN_TYPES = 3


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is not left to chance; None is."""

    head_size: int | None = None
    has_experts: bool | None = None
    layers: int = 2
    is_encoder: bool = False
    """Sequences stand in the step whole, rows see each other both ways, and end in one row each."""


def random_program(random: np.random.Generator, wanted: Wanted | None = None) -> Program:
    """Returns a program with unlike layers: norms, activations, rotary tables, windows, caps, experts, as drawn."""
    return _Draw(random, wanted or Wanted()).program()


class _Draw:
    def __init__(self, random: np.random.Generator, wanted: Wanted) -> None:
        self.random = random
        self.wanted = wanted
        self.b = Builder(self._spec())
        self.ropes = (
            [self._rope(f"rope.{index}") for index in range(min(2, self.wanted.layers))] if self.chance(0.9) else [NONE]
        )

    def chance(self, share: float) -> bool:
        return bool(self.random.random() < share)

    def pick(self, *items: int) -> int:
        return int(items[int(self.random.integers(len(items)))])

    def _spec(self) -> ModelSpec:
        kv_heads = self.pick(1, 2, 3)
        head_size = self.wanted.head_size or self.pick(32, 64, 96)
        heads = kv_heads * self.pick(1, 2, 3)
        hidden = 32 * self.pick(1, 2, 3)
        windows = [self.pick(0, 1, 7, 33, 80) for _ in range(self.wanted.layers)]
        return ModelSpec(
            family="drawn",
            architecture=Architecture.ENCODER_ONLY if self.wanted.is_encoder else Architecture.DECODER_ONLY,
            layers=self.wanted.layers,
            width=32 * self.pick(1, 2, 3),
            heads=heads,
            kv_heads=kv_heads,
            head_size=head_size,
            hidden=hidden,
            vocab_size=int(self.random.integers(17, 200)),
            context_tokens=CONTEXT_TOKENS,
            norm_eps=1e-5,
            rope=None,
            is_tied=False,
            attention_scale=None if self.chance(0.5) else 0.21,
            per_layer=tuple(LayerSpec(heads, kv_heads, head_size, hidden, window) for window in windows),
        )

    def _rope(self, name: str) -> int:
        size = self.b.spec.head_size
        rotary = self.pick(size, size, size // 2, size - 16, 6)
        spec = RopeSpec(float(self.pick(100, 10_000)), RopeKind.LINEAR, factor=float(self.pick(1, 8)))
        return self.b.rope(name, CONTEXT_TOKENS, rotary, spec)

    def norm(self, name: str, width: int, *, is_needed: bool = False) -> dict[str, Any]:
        """Returns the arguments of a norm, perhaps none."""
        kind = self.pick(*([Norm.RMS, Norm.LAYER] if is_needed else [Norm.NONE, Norm.RMS, Norm.LAYER]))
        has_weight, has_bias = kind != Norm.NONE and self.chance(0.8), kind == Norm.LAYER and self.chance(0.7)
        return {
            "norm": Norm(kind),
            "norm_weight": self.b.vector(f"{name}.norm", Part(f"{name}.norm", width)) if has_weight else NONE,
            "norm_bias": self.b.vector(f"{name}.norm_bias", Part(f"{name}.norm_bias", width)) if has_bias else NONE,
        }

    def matrix(self, name: str, n: int, k: int) -> int:
        return self.b.matrix(name, k, Part(name, n))

    def bias(self, name: str, n: int) -> int:
        return self.b.vector(f"{name}.bias", Part(f"{name}.bias", n)) if self.chance(0.4) else NONE

    def activation(self) -> Activation:
        return Activation(self.pick(*Activation))

    def program(self) -> Program:
        b, spec = self.b, self.b.spec
        offset = self.pick(0, 2)
        positions = self.matrix("positions", CONTEXT_TOKENS + offset, spec.width) if self.chance(0.5) else NONE
        has_types = self.wanted.is_encoder and self.chance(0.7)
        x = b.embed(
            "x",
            self.matrix("embed", spec.vocab_size, spec.width),
            scale=1.0 if self.chance(0.5) else 3.3,
            positions=positions,
            position_offset=offset if positions != NONE else 0,
            types=self.matrix("types", TOKEN_TYPES, spec.width) if has_types else NONE,
        )
        if self.chance(0.4):
            x = b.norm("embed_normed", x, **self.norm("embed_normed", spec.width, is_needed=True))
        for layer in range(spec.layers):
            self._attention(f"layers.{layer}", layer, x)
            has_experts = self.wanted.has_experts
            if self.chance(0.3) if has_experts is None else has_experts:
                self._experts(f"layers.{layer}", x)
            else:
                self._mlp(f"layers.{layer}", x)
            if self.chance(0.3):  # post-norm blocks
                x = b.norm(f"layers.{layer}.x", x, **self.norm(f"layers.{layer}.x", spec.width, is_needed=True))
        if self.wanted.is_encoder:
            self._pool(x)
            return b.program()
        b.head(
            x,
            self.matrix("head", spec.vocab_size, spec.width),
            scale=1.0 if self.chance(0.5) else 0.7,
            softcap=0.0 if self.chance(0.5) else 2.5,
            **self.norm("final", spec.width),
        )
        return b.program()

    def _pool(self, x: int) -> None:
        """One row of each sequence, and perhaps a dense layer on it."""
        b, width = self.b, self.b.spec.width
        pooling, is_normalised = Pooling(self.pick(*Pooling)), self.chance(0.5)
        pooled = b.pool("pooled", x, pooling=pooling, is_normalised=is_normalised, **self.norm("pooled", width))
        if self.chance(0.5):
            weight, bias = self.matrix("dense", width, width), self.bias("dense", width)
            dense = b.linear("dense", pooled, weight, bias=bias, activation=Activation.TANH, domain=Domain.SEQUENCES)
            b.norm("last", dense, domain=Domain.SEQUENCES, **self.norm("last", width, is_needed=True))

    def _attention(self, at: str, layer: int, x: int) -> None:
        b, spec, shape = self.b, self.b.spec, self.b.spec.layer(layer)
        sizes = (("q", shape.heads), ("k", shape.kv_heads), ("v", shape.kv_heads))

        def parts(end: str) -> list[Part]:
            return [Part(f"{at}.{name}{end}", heads * shape.head_size) for name, heads in sizes]

        def head_norm(name: str) -> int:
            if self.chance(0.5):
                return NONE
            return b.vector(f"{at}.{name}", Part(f"{at}.{name}", shape.head_size))

        q = b.qkv(
            f"{at}.q",
            x,
            b.matrix(f"{at}.qkv", spec.width, *parts("")),
            layer=layer,
            rope=self.ropes[layer % len(self.ropes)],
            bias=b.vector(f"{at}.qkv.bias", *parts(".bias")) if self.chance(0.4) else NONE,
            q_norm=head_norm("q_norm"),
            k_norm=head_norm("k_norm"),
            **self.norm(f"{at}.qkv", spec.width),
        )
        mixed = b.attention(f"{at}.mixed", q, layer=layer, softcap=0.0 if self.chance(0.5) else 1.7)
        o = self.matrix(f"{at}.o", spec.width, shape.heads * shape.head_size)
        self._join(f"{at}.o", mixed, o, x)

    def _join(self, name: str, source: int, weight: int, x: int) -> None:
        """Adds the product of ``source`` to the residual, or its norm."""
        b, spec = self.b, self.b.spec
        bias, activation = self.bias(name, spec.width), self.activation()
        if self.chance(0.6):
            b.linear(name, source, weight, bias=bias, activation=activation, epilogue=Epilogue.ADD, add_to=x)
            return
        alone = b.linear(name, source, weight, bias=bias, activation=activation)
        norm = self.norm(f"{name}.sandwich", spec.width, is_needed=True)
        b.norm(name, alone, epilogue=Epilogue.ADD, add_to=x, **norm)

    def _mlp(self, at: str, x: int) -> None:
        b, spec, hidden = self.b, self.b.spec, self.b.spec.hidden
        norm = self.norm(f"{at}.mlp", spec.width)
        if self.chance(0.6):
            parts = [Part(f"{at}.gate", hidden), Part(f"{at}.up", hidden)]
            weight = b.matrix(f"{at}.gate_up", spec.width, *parts, interleave=LANES)
            inner = b.linear(
                f"{at}.inner",
                x,
                weight,
                epilogue=Epilogue.GLU,
                activation=self.activation(),
                **norm,
            )
        else:
            inner = b.linear(
                f"{at}.inner",
                x,
                self.matrix(f"{at}.up", hidden, spec.width),
                bias=self.bias(f"{at}.up", hidden),
                activation=self.activation(),
                **norm,
            )
        self._join(f"{at}.down", inner, self.matrix(f"{at}.down", spec.width, hidden), x)

    def _experts(self, at: str, x: int) -> None:
        b, spec = self.b, self.b.spec
        experts, hidden = self.pick(1, 3, 8, 19), 32 * self.pick(1, 2)
        parts = [Part(f"{at}.{e}.{name}", hidden) for e in range(experts) for name in ("gate", "up")]
        b.moe(
            x,
            router=self.matrix(f"{at}.router", experts, spec.width),
            gate_up=b.matrix(f"{at}.gate_up", spec.width, *parts, interleave=LANES),
            down=b.matrix(f"{at}.down", hidden, *[Part(f"{at}.{e}.down", spec.width) for e in range(experts)]),
            top_k=int(self.random.integers(1, min(experts, 8) + 1)),
            is_renormalised=self.chance(0.5),
            add_to=x,
            activation=self.activation(),
            **self.norm(f"{at}.moe", spec.width),
        )
