"""Ranges of what a description may say, and the refusals that all families share."""

from __future__ import annotations

from dataclasses import replace

from headrace.base.errors import ModelFormatError, ModelUnsupportedError
from headrace.program.keys import Keys, show
from headrace.program.model import ModelSpec

# (low, high). Upper limits are several times the largest published model (Llama 3.1 405B: 126 layers, width 16384,
# 128 heads, MLP 53248, context 131072; vocabulary 262144 is Gemma's), small enough that no product of two of them
# leaves 64 bits and no table is made before the numbers have been seen.
LIMITS: dict[str, tuple[int, int]] = {
    "layers": (1, 1024),
    "width": (32, 2**16),
    "heads": (1, 1024),
    "head_size": (32, 512),
    "hidden": (32, 2**18),
    "vocab_size": (2, 2**20),
    "context_tokens": (2, 2**24),
    "window": (1, 2**24),
    "experts": (1, 1024),  # DeepSeek-V3 has 256, Qwen3-MoE 128
}
EPS = (1e-13, 0.1)  # BERT's 1e-12 is a little less in f32
THETA = (1.0 + 1e-3, 1e12)
FACTOR = (1.0, 1e4)
_MULTIPLE = 32  # of k (activation groups) and of head sizes (KV pages)
HINT = "--engine vllm may run this model"


def unsupported(keys: Keys, key: str, value: object, supported: str) -> ModelUnsupportedError:
    """Returns the error for a well-formed value that this engine has no program for."""
    return ModelUnsupportedError(
        f"{keys.source}: {keys.prefix}{key} is {show(value)}, this engine runs only {supported} for this family",
        hint=HINT,
    )


def checked(source: str, spec: ModelSpec) -> ModelSpec:
    """Returns the spec when its numbers fit each other; a window as long as the context is none.

    Raises:
        ModelFormatError: they contradict each other.
        ModelUnsupportedError: a size that the kernels do not take.
    """

    def refuse(what: str, value: int, must: str) -> ModelFormatError:
        return ModelFormatError(f"{source}: {what} is {value}, {must}")

    if spec.heads % spec.kv_heads:
        raise refuse("number of attention heads", spec.heads, f"must be a multiple of the {spec.kv_heads} KV heads")
    low, high = LIMITS["head_size"]
    if not low <= spec.head_size <= high:
        raise refuse("head size (width ÷ heads)", spec.head_size, f"must be in {low}..{high}")
    sizes = [("width", spec.width), ("head size", spec.head_size)]
    hidden = dict.fromkeys(spec.layer(index).hidden for index in range(spec.layers))
    for what, value in (*sizes, *(("MLP width", value) for value in hidden)):
        if value % _MULTIPLE:
            raise ModelUnsupportedError(
                f"{source}: {what} is {value}, this engine needs a multiple of {_MULTIPLE}", hint=HINT
            )
    if spec.experts and not 1 <= spec.top_k <= spec.experts:
        raise refuse("number of experts per token", spec.top_k, f"must be in 1..{spec.experts}")
    rotary_size = spec.rotary_size or spec.head_size
    if rotary_size > spec.head_size or rotary_size % 2:
        raise refuse("number of rotary dimensions", rotary_size, f"must be even and at most {spec.head_size}")
    for rope in dict.fromkeys(spec.layer(index).rope for index in range(spec.layers)):
        for factors in () if rope is None else (rope.factors, rope.long_factors):
            if factors and len(factors) != rotary_size // 2:
                raise refuse("number of rotary factors", len(factors), f"must be {rotary_size // 2}")
    window = spec.window if spec.window < spec.context_tokens else 0
    return spec if window == spec.window else replace(spec, window=window)
