"""Matches a model's stored tensors with a program's weight table, by header alone: nothing is read, nothing allocated.

What comes out is complete and checked (names, shapes, types), so loading cannot fail half-way on a lying file, and its
size is known before the first byte is taken.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from headrace.base.errors import ModelFormatError, ModelUnsupportedError
from headrace.engine.quantize import PACKABLE, check_precision, choose_layout, keeps_eight_bits
from headrace.program.cost import layout_bytes
from headrace.program.families.registry import family_of
from headrace.program.families.source import Role, Source
from headrace.program.ir import Program, WeightSpec
from headrace.program.model import Architecture
from headrace.program.opcodes import GROUP, Layout
from headrace.registry.files import shown
from headrace.registry.formats.tensor import TensorView
from headrace.registry.model import ModelFiles

_VECTOR_TYPES = ("F32", "F16", "BF16")
# Stored by some writers, never used: rotary frequencies are computed from the configuration (or read by the spec), and
# GPT-2's attn.bias is the causal mask. Vision towers belong to architectures whose language model alone runs here.
_IGNORED = re.compile(
    r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq|rope_(freqs|factors_long|factors_short)\.weight"
    r"|(transformer\.)?h\.\d+\.attn\.(masked_)?bias"
    r"|(model\.)?(vision_tower|multi_modal_projector)\..+"
)
# An encoder's file often has the head that it was trained with, and BERT's own pooler: none makes a vector.
_IGNORED_IN_ENCODERS = re.compile(
    r"((albert|bert|roberta|distilbert)\.)?(pooler\.(dense\.)?(weight|bias)|embeddings\.position_ids)"
    r"|(cls|lm_head|predictions|head|decoder)\..*|vocab_(transform|layer_norm|projector)\.(weight|bias)"
)
_MAX_LISTED = 8
_MAX_BIAS_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class SourcePart:
    """Rows of one stored tensor that a weight takes.

    Args:
        n: how many, from ``source.start`` on.
        head_size: of the layer, where ``source.is_interleaved``; else 0.
    """

    tensor: TensorView
    source: Source
    n: int
    head_size: int


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """How one entry of the weight table is made. ``n`` differs from the spec's for rope tables only."""

    spec: WeightSpec
    layout: Layout
    n: int
    parts: tuple[SourcePart, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes when packed."""
        return layout_bytes(self.layout, self.n, self.spec.k)


def plan_weights(
    files: ModelFiles, program: Program, *, dtype: str, quantization: str, rope_positions: int | None = None
) -> list[WeightPlan]:
    """Returns the plan of every weight, in the order of the table.

    Args:
        rope_positions: positions of the rope table; None takes the model's whole context.

    Raises:
        ConfigError: ``dtype`` and ``quantization`` are not what the native engine has.
        ModelFormatError: tensors are missing, unexpected, or of another shape; all are listed.
        ModelUnsupportedError: a tensor's stored type has no kernel.
    """
    check_precision(dtype, quantization)
    family, kind = family_of(program.spec), "gguf" if files.kind == "gguf" else "hf"
    faults: list[str] = []
    unsupported: list[str] = []
    used: set[str] = set()
    plans: list[WeightPlan] = []
    for spec in program.weights:
        if spec.kind == "rope":
            positions = spec.n if rope_positions is None else min(rope_positions, spec.n)
            plans.append(WeightPlan(spec, Layout.ROPE_F32, positions, ()))
            continue
        parts: list[SourcePart] = []
        for part in spec.parts:
            places = family.sources(program.spec, part.role, kind)
            source = next((place for place in places if place.name in files.tensors), places[0])
            name = source.name
            used.add(name)
            tensor = files.tensors.get(name)
            expected = _stored_shape(source, part.n, spec)
            if tensor is None:
                faults.append(f"{name} is missing (expected {list(expected)})")
                continue
            if tensor.shape != expected:
                faults.append(f"{name} has shape {list(tensor.shape)}, expected {list(expected)}")
                continue
            is_whole_rows = spec.kind == "matrix" and not source.is_transposed
            if tensor.dtype not in (PACKABLE if is_whole_rows else _VECTOR_TYPES):
                unsupported.append(f"{name} is stored as {tensor.dtype}")
                continue
            head_size = program.spec.layer(Role.of(part.role).layer).head_size if source.is_interleaved else 0
            parts.append(SourcePart(tensor, source, part.n, head_size))
        if len(parts) == len(spec.parts):
            plans.append(
                WeightPlan(spec, _layout(spec, parts, dtype, quantization, program.spec.width), spec.n, tuple(parts))
            )
    _refuse(files, list(dict.fromkeys(faults)), list(dict.fromkeys(unsupported)), _unexpected(files, program, used))
    return plans


def with_positions(plans: Iterable[WeightPlan], rope_positions: int) -> list[WeightPlan]:
    """Returns the plans with rope tables of so many positions, or as many as the model's whole context has."""
    return [replace(plan, n=min(rope_positions, plan.spec.n)) if plan.spec.kind == "rope" else plan for plan in plans]


def weight_bytes(files: ModelFiles, program: Program, dtype: str, quantization: str) -> int:
    """Returns the bytes that the packed weights will take, rope tables at full context included; headers only."""
    return sum(plan.size_bytes for plan in plan_weights(files, program, dtype=dtype, quantization=quantization))


def _layout(spec: WeightSpec, parts: list[SourcePart], dtype: str, quantization: str, width: int) -> Layout:
    if spec.kind == "vector":
        return Layout.VECTOR_F32
    assert spec.k % GROUP == 0, f"{spec.name}: k = {spec.k}"
    roles = {Role.of(part.role).name for part in spec.parts}
    stored = [part.tensor.dtype for part in parts]
    if "router" in roles:
        # A share of a percent of the weights, and a wrong choice of experts changes the row altogether.
        return choose_layout(stored, dtype, "none", has_eight_bits=False)
    return choose_layout(stored, dtype, quantization, has_eight_bits=keeps_eight_bits(roles, width))


def _stored_shape(source: Source, n: int, spec: WeightSpec) -> tuple[int, ...]:
    rows = n if source.rows is None else source.rows
    if spec.kind == "vector":
        return (rows,)
    if source.is_transposed:
        return (spec.k, rows)
    return (source.experts, rows, spec.k) if source.experts else (rows, spec.k)


def _unexpected(files: ModelFiles, program: Program, used: set[str]) -> list[str]:
    # A tied model may still store its head: the same matrix once more.
    heads = family_of(program.spec).sources(program.spec, "head", "hf") if program.spec.is_tied else ()
    tied = {source.name for source in heads}
    names = [name for name in files.tensors.keys() - used - tied if not _IGNORED.fullmatch(name)]
    if program.spec.architecture is Architecture.ENCODER_ONLY:
        names = [name for name in names if not _IGNORED_IN_ENCODERS.fullmatch(name)]
    return sorted(name for name in names if not _is_zero_bias(files.tensors[name]))


def _is_zero_bias(tensor: TensorView) -> bool:
    """Whether it is a bias that changes nothing: GPTQ's writers store one of zeros for every matrix."""
    return tensor.name.endswith(".bias") and tensor.data.nbytes <= _MAX_BIAS_BYTES and not tensor.data.any()


def _refuse(files: ModelFiles, faults: list[str], unsupported: list[str], unexpected: list[str]) -> None:
    where = files.weights[0] if len(files.weights) == 1 else files.folder
    if faults or unexpected:
        extra = [f"{shown(name)} is not part of this architecture" for name in unexpected]
        raise ModelFormatError(f"{where}: the tensors do not fit the configuration: {_some(faults + extra)}")
    if unsupported:
        known = ", ".join(PACKABLE)
        raise ModelUnsupportedError(
            f"{where}: {_some(unsupported)}; matrices may be {known}, vectors F32, F16 or BF16",
            hint="--engine vllm may run this model",
        )


def _some(lines: list[str]) -> str:
    more = f"; and {len(lines) - _MAX_LISTED} more" if len(lines) > _MAX_LISTED else ""
    return "; ".join(lines[:_MAX_LISTED]) + more
