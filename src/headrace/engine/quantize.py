"""Which packed layout a weight gets, how many bytes that takes, and the conversions that packing itself does not do.

Rules: sources that are quantised keep their own values wherever a layout holds them (Q4_K, Q5_1, Q5_K and Q6_K nearly,
docs/decisions/0005); ``quantization`` only narrows (a Q4_1 file loaded with ``int8`` stays Q4M). F16 stays F16, other
floats become bf16. ``dtype: fp32`` is the exact path: every weight as f32. ``int4`` keeps some matrices at eight bits
(``keeps_eight_bits``, docs/decisions/0021).
"""

from __future__ import annotations

from collections.abc import Set

import numpy as np
from numpy.typing import NDArray

from headrace.base.errors import ConfigError
from headrace.program.opcodes import Layout

DTYPES = ("bf16", "fp32")
QUANTIZATIONS = ("none", "int8", "int4")

_NATURAL = {
    "F32": Layout.BF16,
    "F16": Layout.F16,
    "BF16": Layout.BF16,
    "Q8_0": Layout.Q8,
    "Q4_0": Layout.Q4,
    "Q4_1": Layout.Q4M,
    "Q5_0": Layout.Q8,
    "Q5_1": Layout.Q8,
    "Q4_K": Layout.Q4M,
    "Q5_K": Layout.Q8,
    "Q6_K": Layout.Q8,
    "AWQ": Layout.Q4M,
    "GPTQ": Layout.Q4M,
    "GPTQ act-order": Layout.Q8,
}
PACKABLE = tuple(_NATURAL)
"""Stored types of matrices: what ``kernels.vm.pack`` reads, and what ``engine.packed_linear`` turns into that."""
NARROW_WIDTH = 1024
"""Models of fewer elements a row suffer most from four bits: below it ``int4`` keeps ``down`` and ``o`` too."""
_VOCABULARY = frozenset({"embed", "head"})
_ATTENDING = frozenset({"q", "k", "v"})
_LEAVING = frozenset({"o", "down"})
_BITS = {Layout.F32: 32, Layout.BF16: 16, Layout.F16: 16, Layout.Q8: 8, Layout.Q4: 4, Layout.Q4M: 4}


def check_precision(dtype: str, quantization: str) -> None:
    """Checks the two settings alone and together.

    Raises:
        ConfigError: a value that the native engine does not have, or ``fp32`` with a quantization.
    """
    if dtype not in DTYPES:
        raise ConfigError(
            f"dtype is {dtype!r}; the native engine has {', '.join(DTYPES)} (fp16 runs with --engine vllm)"
        )
    if quantization not in QUANTIZATIONS:
        raise ConfigError(f"quantization is {quantization!r}; the native engine has {', '.join(QUANTIZATIONS)}")
    if dtype == "fp32" and quantization != "none":
        raise ConfigError(f"dtype fp32 is the exact path and quantization {quantization} contradicts it: drop one")


def keeps_eight_bits(roles: Set[str], width: int) -> bool:
    """Whether ``int4`` keeps a matrix at eight bits: what costs little memory for the divergence that it saves.

    Embedding and head, whose error reaches every logit, and q, k and v: about a tenth of the layers' weights and two
    fifths of the divergence. In narrow models what writes into the residual stream as well, ``o`` and ``down``.

    Args:
        roles: the names of its parts, without layer (``families.source.Role.name``).
        width: elements of the model's residual rows.
    """
    kept = _VOCABULARY | _ATTENDING
    return not roles.isdisjoint(kept | _LEAVING if width < NARROW_WIDTH else kept)


def choose_layout(stored: list[str], dtype: str, quantization: str, *, has_eight_bits: bool) -> Layout:
    """Returns the layout of a matrix whose parts are stored as ``stored`` (keys of ``PACKABLE``).

    Args:
        has_eight_bits: ``int4`` keeps it at eight bits.
    """
    if dtype == "fp32":
        return Layout.F32
    natural = _common({_NATURAL[kind] for kind in stored})
    if quantization == "none":
        return natural
    wanted = Layout.Q8 if quantization == "int8" or has_eight_bits else Layout.Q4M
    return natural if _BITS[natural] <= _BITS[wanted] else wanted


def _common(found: set[Layout]) -> Layout:
    """Returns the narrowest layout that holds parts of these ones without visible loss."""
    if len(found) == 1:
        return found.pop()
    if found == {Layout.Q4, Layout.Q4M}:
        return Layout.Q4M
    return Layout.Q8 if found <= {Layout.Q8, Layout.Q4, Layout.Q4M} else Layout.BF16


def to_f32(stored: str, raw: NDArray[np.uint8], k: int) -> NDArray[np.float32]:
    """Returns stored rows as values. raw: [n, row bytes] uint8. Returns: [n, k] f32."""
    rows = len(raw)
    match stored:
        case "F32":
            return raw.view("<f4").reshape(rows, k).astype(np.float32, copy=False)
        case "F16":
            return raw.view("<f2").reshape(rows, k).astype(np.float32)
        case "BF16":
            wide = raw.view("<u2").reshape(rows, k).astype(np.uint32)
            np.left_shift(wide, 16, out=wide)
            return wide.view(np.float32)
        case _:
            # Late: planning and memory estimates must work where the native library is not built.
            from headrace.kernels.vm import dequantise

            return dequantise(stored, raw, rows, k)
