"""Packs matrices as AWQ and GPTQ do, and rewrites a safetensors folder that way: round to nearest, no calibration.

Written from the packers of AutoAWQ (``WQLinear_GEMM.from_linear``) and AutoGPTQ (``QuantLinear.pack``), word by word,
and not from the reader that it tests.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.program.lanes import bf16_values
from headrace.registry.formats.safetensors import open_safetensors
from headrace.registry.formats.tensor import TensorView
from headrace.testing.tiny_blocks import Encoded
from headrace.testing.tiny_files import safetensors_bytes

F32 = NDArray[np.float32]
_AWQ_COLUMNS = [0, 2, 4, 6, 1, 3, 5, 7]


@dataclass(frozen=True, slots=True)
class Packing:
    """How to pack.

    Args:
        method: ``awq`` or ``gptq``.
        group: inputs per scale.
        is_v2: GPTQ's second format, whose zero points are stored as they are.
        is_symmetric: every zero point is 8, as most GPTQ files have it and some engines demand.
        is_ordered: GPTQ's act-order: inputs are dealt to groups by chance, as if sorted by importance.
    """

    method: str
    group: int = 32
    is_v2: bool = False
    is_symmetric: bool = False
    is_ordered: bool = False

    def config(self) -> dict[str, Any]:
        """Returns the ``quantization_config`` of config.json."""
        if self.method == "awq":
            return {
                "quant_method": "awq",
                "bits": 4,
                "group_size": self.group,
                "version": "gemm",
                "zero_point": True,
                "modules_to_not_convert": None,
            }
        return {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": self.group,
            "desc_act": self.is_ordered,
            "sym": self.is_symmetric,
            "checkpoint_format": "gptq_v2" if self.is_v2 else "gptq",
        }


def pack_matrix(values: F32, packing: Packing, seed: int = 0) -> tuple[dict[str, Encoded], F32]:
    """Returns the tensors of a matrix [n, k] by suffix, and the values that they stand for."""
    n, k = values.shape
    of_input = np.arange(k) // packing.group
    if packing.is_ordered:
        of_input = np.random.default_rng(seed).permutation(of_input)
    groups = k // packing.group
    scales, zeros = np.empty((groups, n), np.float16), np.empty((groups, n), np.int64)
    integers = np.empty((k, n), np.int64)
    for group in range(groups):
        part = values[:, of_input == group].T
        low, high = np.minimum(part.min(0), 0), np.maximum(part.max(0), 0)
        span = np.maximum(-low / 8, high / 7) if packing.is_symmetric else (high - low) / 15
        scales[group] = np.maximum(span, 2.0**-14)
        step = scales[group].astype(np.float32)
        # A zero point of 0 has no honest form in GPTQ's first format.
        zeros[group] = np.rint(-low / step).clip(0 if packing.method == "awq" or packing.is_v2 else 1, 15)
        if packing.is_symmetric:
            zeros[group] = 8
        integers[of_input == group] = (np.rint(part / step) + zeros[group]).clip(0, 15)
    truth = (integers - zeros[of_input]).T.astype(np.float32) * scales[of_input].T.astype(np.float32)
    half = Encoded("F16", scales.shape, scales.tobytes())
    if packing.method == "awq":
        tensors = {
            "qweight": _words(integers, _AWQ_COLUMNS),
            "qzeros": _words(zeros, _AWQ_COLUMNS),
            "scales": half,
        }
        return tensors, truth
    by_input = _words(integers.T, range(8))  # [n, k/8]
    turned = np.frombuffer(by_input.data, "<i4").reshape(by_input.shape).T
    tensors = {
        "qweight": Encoded("I32", turned.shape, np.ascontiguousarray(turned).tobytes()),
        "qzeros": _words(zeros - (0 if packing.is_v2 else 1), range(8)),
        "scales": half,
        "g_idx": Encoded("I32", (k,), of_input.astype("<i4").tobytes()),
    }
    return tensors, truth


def _words(integers: NDArray[np.int64], columns: list[int] | range) -> Encoded:
    """Returns rows of integers as int32 words: nibble i of a word is column 8c + columns[i]."""
    rows, width = integers.shape
    words = np.zeros((rows, width // 8), np.uint32)
    for word in range(width // 8):
        for nibble, column in enumerate(columns):
            words[:, word] |= (integers[:, 8 * word + column].astype(np.uint32) & 15) << np.uint32(4 * nibble)
    return Encoded("I32", words.shape, words.tobytes())


def write_packed_folder(source: Path, target: Path, packing: Packing, *, truth: Path | None = None) -> Path:
    """Writes ``source`` (config.json, model.safetensors) with its layers' matrices packed; returns ``target``.

    Args:
        truth: a folder for the same model with the dequantised values as F32, if it is wanted.
    """
    tensors, plain = {}, {}
    for tensor in open_safetensors(source / "model.safetensors").values():
        whole = Encoded(tensor.dtype, tensor.shape, tensor.data.tobytes())
        if len(tensor.shape) != 2 or ".layers." not in tensor.name:
            tensors[tensor.name] = plain[tensor.name] = whole
            continue
        root = tensor.name.removesuffix(".weight")
        parts, values = pack_matrix(_values(tensor), packing, seed=len(tensors))
        tensors |= {f"{root}.{suffix}": part for suffix, part in parts.items()}
        plain[tensor.name] = Encoded("F32", values.shape, np.ascontiguousarray(values).tobytes())
    config = json.loads((source / "config.json").read_text())
    _write(source, target, tensors, {**config, "quantization_config": packing.config()})
    if truth is not None:
        _write(source, truth, plain, config)
    return target


def _write(source: Path, target: Path, tensors: dict[str, Encoded], config: dict[str, Any]) -> None:
    target.mkdir(parents=True, exist_ok=True)
    (target / "model.safetensors").write_bytes(safetensors_bytes(tensors, {"format": "pt"}))
    (target / "config.json").write_text(json.dumps(config, indent=1))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "special_tokens_map.json"):
        if (source / name).exists():
            (target / name).write_bytes((source / name).read_bytes())


def _values(tensor: TensorView) -> F32:
    match tensor.dtype:
        case "F32":
            values = tensor.data.view("<f4").astype(np.float32)
        case "F16":
            values = tensor.data.view("<f2").astype(np.float32)
        case "BF16":
            values = bf16_values(tensor.data.view("<u2"))
        case _:
            raise NotImplementedError(f"{tensor.name} is {tensor.dtype}")
    return values.reshape(tensor.shape)
