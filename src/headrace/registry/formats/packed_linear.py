"""AWQ and GPTQ: finds the tensors that make up each 4-bit matrix and checks that they fit together.

A matrix ``X.weight`` [n, k] of such a model is stored as ``X.qweight`` (int32 words of eight integers), ``X.qzeros``,
``X.scales`` and, for GPTQ, ``X.g_idx``. After ``fold_linears`` it is one tensor again, and nobody else need know. What
the words mean is in ``engine.packed_linear``.

Sources: AutoAWQ's GEMM format; AutoGPTQ's and GPTQModel's ``gptq`` (zero points stored less one) and ``gptq_v2``.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from headrace.base.errors import ModelFormatError, ModelUnsupportedError
from headrace.registry.files import shown
from headrace.registry.formats.tensor import PackedLinear, TensorView

LEGACY_CONFIGS = ("quantize_config.json", "quant_config.json")
"""Where GPTQ and AWQ models say how they are packed when config.json does not."""
_BITS = 4
_PER_WORD = 8
_LEAST_GROUP = 32
_PARTS = ("qweight", "qzeros", "scales", "g_idx")
_SCALE_TYPES = ("F16", "BF16", "F32")
_NATIVE = "the native engine reads awq and gptq of 4 bits"
_HINT = "--engine vllm may run this model"


@dataclass(frozen=True, slots=True)
class PackedConfig:
    """How a model's matrices are packed.

    Args:
        method: ``awq`` or ``gptq``.
        group: inputs that share a scale; None for all of a row.
        zero_offset: what must be added to stored zero points.
    """

    method: str
    group: int | None
    zero_offset: int


def read_packed_config(settings: Any, path: Path) -> PackedConfig:
    """Returns what ``quantization_config`` (of config.json) or a file of ``LEGACY_CONFIGS`` says.

    Raises:
        ModelFormatError: a value has the wrong type or range; the message names the field.
        ModelUnsupportedError: another method, width or variant.
    """
    if not isinstance(settings, dict):
        raise ModelFormatError(f"{path}: quantization_config should be an object, found {type(settings).__name__}")
    is_old_awq = "w_bit" in settings
    method = settings.get("quant_method", "awq" if is_old_awq else "gptq")
    if method not in ("awq", "gptq"):
        raise ModelUnsupportedError(f"{path}: quant_method is {_value(method)}; {_NATIVE}", hint=_HINT)
    bits = _whole(settings, "w_bit" if is_old_awq else "bits", path)
    if bits != _BITS:
        raise ModelUnsupportedError(f"{path}: bits is {bits}; {_NATIVE}", hint=_HINT)
    group = _whole(settings, "q_group_size" if is_old_awq else "group_size", path)
    if group != -1 and (group < _LEAST_GROUP or group % _LEAST_GROUP):
        raise ModelUnsupportedError(
            f"{path}: group_size is {group}; the native engine has −1 and multiples of {_LEAST_GROUP}", hint=_HINT
        )
    if method == "awq":
        _expect(settings, "version", ("gemm",), "gemm", path)
        _expect(settings, "zero_point", (True,), True, path)
        return PackedConfig("awq", None if group == -1 else group, 0)
    _expect(settings, "is_marlin_format", (False,), False, path)
    _expect(settings, "pack_dtype", ("int32",), "int32", path)
    if settings.get("dynamic"):
        raise ModelUnsupportedError(f"{path}: dynamic gives layers different settings, which is not read", hint=_HINT)
    layout = _expect(settings, "checkpoint_format", ("gptq", "gptq_v2"), "gptq", path)
    return PackedConfig("gptq", None if group == -1 else group, 1 if layout == "gptq" else 0)


def fold_linears(tensors: Mapping[str, TensorView], config: PackedConfig | None, where: Path) -> dict[str, TensorView]:
    """Returns the tensors with every ``X.qweight`` and its companions as one ``X.weight``.

    Raises:
        ModelFormatError: companions are missing, have other shapes or types, or point outside; ``config`` is missing.
    """
    roots = [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]
    if config is None:
        if roots:
            raise ModelFormatError(
                f"{where}: {shown(roots[0])} is packed, but neither quantization_config in config.json nor "
                f"{' nor '.join(LEGACY_CONFIGS)} says how"
            )
        return dict(tensors)
    taken = {f"{root}.{part}" for root in roots for part in _PARTS}
    folded = {name: tensor for name, tensor in tensors.items() if name not in taken}
    for root in roots:
        name = f"{root}.weight"
        if name in folded:
            raise ModelFormatError(f"{where}: {shown(root)} has both weight and qweight")
        folded[name] = _fold(root, tensors, config, where)
    orphans = sorted(name for name in folded if name.endswith((".qzeros", ".g_idx")))
    if orphans:
        raise ModelFormatError(f"{where}: {shown(orphans[0])} is there without its qweight")
    return folded


def _fold(root: str, tensors: Mapping[str, TensorView], config: PackedConfig, where: Path) -> TensorView:
    parts: dict[str, TensorView] = {}
    for part in _PARTS:
        tensor = tensors.get(f"{root}.{part}")
        if tensor is not None:
            parts[part] = tensor
        elif part != "g_idx":
            raise ModelFormatError(f"{where}: {shown(f'{root}.{part}')} is missing beside its qweight")
    words = parts["qweight"]
    if len(words.shape) != 2 or not all(words.shape):
        raise ModelFormatError(f"{where}: {shown(words.name)} has shape {list(words.shape)}, expected two dimensions")
    # AWQ packs eight columns of a row of inputs, GPTQ eight inputs of a column.
    k, n = words.shape
    if config.method == "awq":
        n *= _PER_WORD
    else:
        k *= _PER_WORD
    group = config.group or k
    if k % group or k % _LEAST_GROUP or n % _PER_WORD:
        raise ModelFormatError(
            f"{where}: {shown(words.name)} is a matrix of {n} × {k}: its inputs must divide into groups of {group} and "
            f"{_LEAST_GROUP}, and its outputs into words of {_PER_WORD}"
        )
    groups = k // group
    expected = {"qweight": words.shape, "qzeros": (groups, n // _PER_WORD), "scales": (groups, n), "g_idx": (k,)}
    for part, tensor in parts.items():
        types = _SCALE_TYPES if part == "scales" else ("I32",)
        if tensor.shape != expected[part] or tensor.dtype not in types:
            raise ModelFormatError(
                f"{where}: {shown(tensor.name)} is {tensor.dtype} {list(tensor.shape)}, expected {' or '.join(types)} "
                f"{list(expected[part])}"
            )
    order = _order(parts.get("g_idx"), k, groups, where) if config.method == "gptq" else None
    dtype = "AWQ" if config.method == "awq" else "GPTQ" if order is None else "GPTQ act-order"
    packed = PackedLinear(parts["qzeros"], parts["scales"], order, config.zero_offset)
    return TensorView(f"{root}.weight", dtype, (n, k), words.raw, packed)


def _order(tensor: TensorView | None, k: int, groups: int, where: Path) -> TensorView | None:
    """Returns ``g_idx`` where it says more than "run after run": the data decides, not what desc_act says."""
    if tensor is None:
        return None
    order = tensor.raw.tobytes()
    if order == _runs(k, groups):
        return None
    indices = struct.unpack(f"<{k}i", order)
    if min(indices) < 0 or max(indices) >= groups:
        raise ModelFormatError(
            f"{where}: {shown(tensor.name)} names groups from {min(indices)} to {max(indices)}, there are {groups}"
        )
    return tensor


@lru_cache(8)  # a model's matrices have two or three widths
def _runs(k: int, groups: int) -> bytes:
    """Returns the ``g_idx`` of ``groups`` runs of inputs, one after the other."""
    run = k // groups
    return b"".join(struct.pack("<i", index) * run for index in range(groups))


def _whole(settings: Mapping[str, Any], name: str, path: Path) -> int:
    value = settings.get(name)
    if type(value) is not int:
        raise ModelFormatError(f"{path}: {name} of the quantization is {_value(value)}, it should be a whole number")
    return value


def _expect(settings: Mapping[str, Any], name: str, known: tuple[Any, ...], default: Any, path: Path) -> Any:
    value = settings.get(name, default)
    value = value.lower() if isinstance(value, str) else value
    if not any(type(value) is type(one) and value == one for one in known):
        raise ModelUnsupportedError(
            f"{path}: {name} of the quantization is {_value(value)}, the native engine reads "
            f"{' and '.join(str(one) for one in known)}",
            hint=_HINT,
        )
    return value


def _value(value: Any) -> str:
    return shown(value if isinstance(value, str) else repr(value), 40)
