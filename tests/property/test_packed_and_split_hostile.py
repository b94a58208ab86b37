"""Lying AWQ, GPTQ and split GGUF files: every combination loads or raises a model error that a terminal survives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.base.errors import ModelError
from headrace.engine.packed_linear import packed_rows
from headrace.program.opcodes import Layout
from headrace.registry.formats.gguf import GgufFile
from headrace.registry.formats.gguf_split import join_parts, part_names
from headrace.registry.formats.packed_linear import fold_linears, read_packed_config
from headrace.registry.formats.tensor import STORED, TensorView, size_bytes
from headrace.testing.packed_models import Packing

PATH = Path("model")
EDGES = (-(2**63), -1, 0, 1, 3, 4, 8, 32, 64, 128, 2**31, 2**63)
hostile = settings(max_examples=150, deadline=None)


def check_message(message: str) -> None:
    assert message.isprintable()
    assert len(message) < 2000


json_values = st.recursive(
    st.none() | st.booleans() | st.sampled_from(EDGES) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
known_values = st.sampled_from(
    ["awq", "gptq", "gptq_v2", "gemm", "GEMM", "gemv", "int32", "fp8", "\x1b[2J", True, False]
)
fields = st.sampled_from(
    ["quant_method", "bits", "w_bit", "group_size", "q_group_size", "version", "zero_point", "checkpoint_format",
     "desc_act", "sym", "dynamic", "pack_dtype", "is_marlin_format"]
)  # fmt: skip
honest = st.sampled_from([Packing("awq"), Packing("gptq"), Packing("gptq", group=64, is_v2=True)])


@hostile
@given(start=honest, edits=st.dictionaries(fields, known_values | json_values, max_size=3))
def test_packing_settings_never_escape_the_error_tree(start: Packing, edits: dict[str, Any]) -> None:
    try:
        config = read_packed_config({**start.config(), **edits}, PATH)
    except ModelError as error:
        check_message(error.message)
    else:
        assert config.method in ("awq", "gptq")
        assert config.group is None or config.group % 32 == 0


@hostile
@given(value=json_values)
def test_settings_of_any_kind_never_escape_the_error_tree(value: Any) -> None:
    try:
        read_packed_config(value, PATH)
    except ModelError as error:
        check_message(error.message)


@st.composite
def packed_tensors(draw: st.DrawFn) -> dict[str, TensorView]:
    """A matrix's four tensors, a few of them with other shapes, types or bytes, or missing."""
    n, k, group = draw(st.sampled_from([8, 16, 24, 20])), draw(st.sampled_from([32, 64, 96, 40])), 32
    is_awq = draw(st.booleans())
    shapes: dict[str, tuple[int, ...]] = {
        "qweight": (k, n // 8) if is_awq else (k // 8, n),
        "qzeros": (k // group, n // 8),
        "scales": (k // group, n),
        "g_idx": (k,),
    }
    found: dict[str, TensorView] = {}
    for suffix, honest_shape in shapes.items():
        if draw(st.integers(0, 11)) == 0:
            continue
        is_odd = draw(st.integers(0, 5)) == 0
        shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 8, 33, 64]), max_size=3))) if is_odd else honest_shape
        types = ["F16", "I32", "F32", "BF16", "U8", "I64"]
        dtype = draw(st.sampled_from(types)) if is_odd else "F16" if suffix == "scales" else "I32"
        size = size_bytes(dtype, shape)
        fill = draw(st.sampled_from(["zeros", "ones", "random", "ramp"]))
        data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
        if fill in ("zeros", "ones"):
            data[:] = 0 if fill == "zeros" else 255
        if fill == "ramp" and dtype == "I32":
            data = (np.arange(size // 4, dtype="<i4") // group).view(np.uint8)
        # Files hold tensors at any byte.
        shifted = np.empty(size + 1, np.uint8)
        shifted[1:] = data
        found[f"a.{suffix}"] = TensorView(f"a.{suffix}", dtype, shape, memoryview(shifted)[1:])
    return found


@hostile
@given(tensors=packed_tensors(), start=honest)
def test_lying_packed_matrices_never_escape_the_error_tree(tensors: dict[str, TensorView], start: Packing) -> None:
    try:
        folded = fold_linears(tensors, read_packed_config(start.config(), PATH), PATH)
        for tensor in folded.values():
            if tensor.packed is None:
                continue
            n, k = tensor.shape
            for layout in (Layout.Q4M, Layout.F32):
                kind, rows = packed_rows(tensor, layout)
                stored = STORED[kind]
                assert rows.shape == (n, k // stored.block_values * stored.block_bytes)
    except ModelError as error:
        check_message(error.message)


split_keys = st.dictionaries(
    st.sampled_from(["split.no", "split.count", "split.tensors.count", "general.architecture"]),
    st.sampled_from([0, 1, 2, 3, 2**31, -1, True, "1", [1], 1.0, "llama"]),
)


@hostile
@given(parts=st.lists(st.tuples(split_keys, st.sets(st.sampled_from("abcd"))), min_size=1, max_size=3))
def test_lying_parts_never_escape_the_error_tree(parts: list[tuple[dict[str, Any], set[str]]]) -> None:
    empty = memoryview(b"")
    files = {
        Path(f"m-{index}"): GgufFile(keys, {name: TensorView(name, "F32", (0,), empty) for name in names})
        for index, (keys, names) in enumerate(parts)
    }

    try:
        _, tensors = join_parts(files)
    except ModelError as error:
        check_message(error.message)
    else:
        assert len(tensors) == sum(len(names) for _, names in parts)


@hostile
@given(name=st.from_regex(r"[a-z-]{0,3}-[0-9]{5}-of-[0-9]{5}\.gguf", fullmatch=True) | st.text(max_size=30))
def test_names_of_parts_are_few_and_hold_the_name_itself(name: str) -> None:
    try:
        names = part_names(name)
    except ModelError as error:
        check_message(error.message)
    else:
        assert name in names
        assert len(names) <= 1024
