"""The program of a decoder: pre-norm blocks of attention and MLP over one residual stream, as the spec says.

Families differ in what they put into the spec and in where their files keep the weights; this is what they share.
"""

from __future__ import annotations

from headrace.program.builder import Builder
from headrace.program.ir import NONE, Part, Program
from headrace.program.model import ModelSpec
from headrace.program.opcodes import LANES, Activation, Epilogue


def build(spec: ModelSpec) -> Program:
    """Returns the program of one step: 5 instructions per layer between the embedding and the head."""
    b = Builder(spec)
    table = b.matrix("embed", spec.width, Part("embed", spec.vocab_size))
    rope = NONE if spec.rope is None else b.rope("rope", spec.context_tokens, spec.head_size, spec.rope)
    x = b.embed("x", table)
    for index in range(spec.layers):
        _layer(b, index, x, rope)
    norm = b.vector("final_norm", Part("final_norm", spec.width))
    head = table if spec.is_tied else b.matrix("head", spec.width, Part("head", spec.vocab_size))
    b.head(x, head, norm_weight=norm)
    return b.program()


def _layer(b: Builder, index: int, x: int, rope: int) -> None:
    """Adds one block; ``x`` is updated in place."""
    spec, shape, at = b.spec, b.spec.layer(index), f"layers.{index}"
    q_size, kv_size = shape.heads * shape.head_size, shape.kv_heads * shape.head_size

    def parts(suffix: str, *sizes: tuple[str, int]) -> list[Part]:
        return [Part(f"{at}.{name}{suffix}", n) for name, n in sizes]

    qkv = (("q", q_size), ("k", kv_size), ("v", kv_size))
    gate_up = (("gate", shape.hidden), ("up", shape.hidden))
    q = b.qkv(
        f"{at}.q",
        x,
        b.matrix(f"{at}.qkv", spec.width, *parts("", *qkv)),
        layer=index,
        rope=rope,
        norm_weight=b.vector(f"{at}.attention_norm", *parts("", ("attention_norm", spec.width))),
        bias=b.vector(f"{at}.qkv_bias", *parts("_bias", *qkv)) if spec.has_attention_bias else NONE,
    )
    mixed = b.attention(f"{at}.attention", q, layer=index)
    b.linear(
        f"{at}.o",
        mixed,
        b.matrix(f"{at}.o", q_size, *parts("", ("o", spec.width))),
        bias=b.vector(f"{at}.o_bias", *parts("_bias", ("o", spec.width))) if spec.has_output_bias else NONE,
        epilogue=Epilogue.ADD,
        add_to=x,
    )
    gated = b.linear(
        f"{at}.gated",
        x,
        b.matrix(f"{at}.gate_up", spec.width, *parts("", *gate_up), interleave=LANES),
        norm_weight=b.vector(f"{at}.mlp_norm", *parts("", ("mlp_norm", spec.width))),
        bias=b.vector(f"{at}.gate_up_bias", *parts("_bias", *gate_up), interleave=LANES) if spec.has_mlp_bias else NONE,
        epilogue=Epilogue.GLU,
        activation=Activation.SILU,
    )
    b.linear(
        f"{at}.down",
        gated,
        b.matrix(f"{at}.down", shape.hidden, *parts("", ("down", spec.width))),
        bias=b.vector(f"{at}.down_bias", *parts("_bias", ("down", spec.width))) if spec.has_mlp_bias else NONE,
        epilogue=Epilogue.ADD,
        add_to=x,
    )
