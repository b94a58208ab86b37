"""AWQ and GPTQ headers: what does not fit together, or is another variant, is refused by name."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.base.errors import ModelFormatError, ModelUnsupportedError
from headrace.registry.formats.packed_linear import PackedConfig, fold_linears, read_packed_config
from headrace.registry.formats.tensor import TensorView
from headrace.testing.packed_models import Packing, pack_matrix

WHERE = Path("model")
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}


def tensors(packing: Packing, n: int = 32, k: int = 128) -> dict[str, TensorView]:
    values = np.random.default_rng(1).standard_normal((n, k), dtype=np.float32)
    parts, _ = pack_matrix(values, packing)
    return {
        f"a.{suffix}": TensorView(f"a.{suffix}", part.dtype, part.shape, memoryview(part.data))
        for suffix, part in parts.items()
    }


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        (AWQ, PackedConfig("awq", 128, 0)),
        ({**AWQ, "version": "GEMM", "group_size": 64}, PackedConfig("awq", 64, 0)),
        ({"w_bit": 4, "q_group_size": 32, "version": "GEMM", "zero_point": True}, PackedConfig("awq", 32, 0)),
        (GPTQ, PackedConfig("gptq", 128, 1)),
        ({**GPTQ, "checkpoint_format": "gptq_v2"}, PackedConfig("gptq", 128, 0)),
        ({"bits": 4, "group_size": -1, "desc_act": True}, PackedConfig("gptq", None, 1)),
    ],
)
def test_settings_are_read(settings: dict[str, Any], wanted: PackedConfig) -> None:
    assert read_packed_config(settings, WHERE) == wanted


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({**AWQ, "quant_method": "fp8"}, "quant_method is 'fp8'; the native engine reads awq and gptq"),
        ({"quant_method": None, "bits": 4}, "quant_method is 'None'"),
        ({**AWQ, "bits": 3}, "bits is 3"),
        ({**GPTQ, "bits": 8}, "bits is 8"),
        ({**GPTQ, "group_size": 16}, "group_size is 16; the native engine has"),
        ({**GPTQ, "group_size": 0}, "group_size is 0"),
        ({**AWQ, "version": "gemv"}, "version of the quantization is 'gemv', the native engine reads gemm"),
        ({**AWQ, "zero_point": False}, "zero_point of the quantization is 'False'"),
        ({**AWQ, "zero_point": 1}, "zero_point of the quantization is '1'"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format of the quantization is 'marlin'"),
        ({**GPTQ, "is_marlin_format": True}, "is_marlin_format"),
        ({**GPTQ, "pack_dtype": "int16"}, "pack_dtype"),
        ({**GPTQ, "dynamic": {"+:x": {"bits": 8}}}, "dynamic gives layers different settings"),
    ],
)
def test_other_variants_are_refused_with_the_way_out(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelUnsupportedError, match=words) as caught:
        read_packed_config(settings, WHERE)

    assert "--engine vllm" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["awq"], "should be an object, found list"),
        ({**AWQ, "bits": "4"}, "bits of the quantization is '4', it should be a whole number"),
        ({**AWQ, "bits": True}, "bits of the quantization is 'True'"),
        ({"quant_method": "gptq", "bits": 4}, "group_size of the quantization is 'None'"),
    ],
)
def test_settings_of_the_wrong_type_are_named(settings: Any, words: str) -> None:
    with pytest.raises(ModelFormatError, match=words):
        read_packed_config(settings, WHERE)


@pytest.mark.parametrize("packing", [Packing("awq"), Packing("gptq"), Packing("gptq", group=128)], ids=str)
def test_a_matrix_becomes_one_tensor_again(packing: Packing) -> None:
    stored = tensors(packing)

    folded = fold_linears(stored, read_packed_config(packing.config(), WHERE), WHERE)

    assert list(folded) == ["a.weight"]
    assert (folded["a.weight"].dtype, folded["a.weight"].shape) == (packing.method.upper(), (32, 128))


def test_act_order_is_known_by_the_data() -> None:
    packing = Packing("gptq", is_ordered=True)

    folded = fold_linears(tensors(packing), read_packed_config({**GPTQ, "group_size": 32}, WHERE), WHERE)

    assert folded["a.weight"].dtype == "GPTQ act-order"


def changed(tensor: TensorView, **changes: Any) -> TensorView:
    kept = {"name": tensor.name, "dtype": tensor.dtype, "shape": tensor.shape, "raw": tensor.raw}
    return TensorView(**{**kept, **changes})


@pytest.mark.parametrize(
    ("method", "part", "changes", "words"),
    [
        ("awq", "qzeros", None, r"'a\.qzeros' is missing beside its qweight"),
        ("gptq", "scales", None, r"'a\.scales' is missing beside its qweight"),
        ("awq", "qweight", None, r"'a\.qzeros' is there without its qweight"),
        ("awq", "qzeros", {"shape": (4, 3)}, r"'a\.qzeros' is I32 \[4, 3\], expected I32 \[4, 4\]"),
        ("gptq", "scales", {"shape": (2, 32)}, r"'a\.scales' is F16 \[2, 32\], expected F16 or BF16 or F32 \[4, 32\]"),
        ("gptq", "qweight", {"dtype": "F32"}, r"'a\.qweight' is F32 \[16, 32\], expected I32 \[16, 32\]"),
        ("awq", "qweight", {"shape": (512,)}, "expected two dimensions"),
        ("awq", "qweight", {"shape": (100, 4)}, "must divide into groups of 32"),
        ("gptq", "qweight", {"shape": (16, 33)}, "outputs into words of 8"),
        ("gptq", "g_idx", {"shape": (64,)}, r"'a\.g_idx' is I32 \[64\]"),
        ("gptq", "g_idx", {"raw": memoryview(struct.pack("<i", 4) * 128)}, "names groups from 4 to 4, there are 4"),
        ("gptq", "g_idx", {"raw": memoryview(struct.pack("<i", -1) * 128)}, "names groups from -1 to -1"),
    ],
)
def test_parts_that_do_not_fit_are_named(method: str, part: str, changes: dict[str, Any] | None, words: str) -> None:
    packing = Packing(method)
    stored = tensors(packing)
    name = f"a.{part}"
    if changes is None:
        del stored[name]
    else:
        stored[name] = changed(stored[name], **changes)

    with pytest.raises(ModelFormatError, match=words):
        fold_linears(stored, read_packed_config(packing.config(), WHERE), WHERE)


def test_packed_matrices_without_settings_are_refused() -> None:
    with pytest.raises(ModelFormatError, match=r"'a' is packed, but neither quantization_config"):
        fold_linears(tensors(Packing("awq")), None, WHERE)


def test_a_matrix_that_is_there_twice_is_refused() -> None:
    stored = tensors(Packing("awq"))
    stored["a.weight"] = stored["a.scales"]

    with pytest.raises(ModelFormatError, match="both weight and qweight"):
        fold_linears(stored, read_packed_config(AWQ | {"group_size": 32}, WHERE), WHERE)
