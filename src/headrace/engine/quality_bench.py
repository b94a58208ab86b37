"""``headrace bench quality``: what each quantisation of a model costs, on a text that ships with it or a given one.

The reference is the exact path on the same files: f32 weights, activations and KV. So ``none`` shows what the served
form of the file costs (bf16 or 8-bit activations, bf16 KV), ``int8`` and ``int4`` what quantising at load adds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headrace.base.errors import ConfigError, ModelTooLargeError, ModelUnsupportedError
from headrace.base.units import format_bytes
from headrace.engine.memory import read_available_bytes
from headrace.engine.quality import Distributions, QualityReport, Subject, compare
from headrace.engine.quantize import QUANTIZATIONS, check_precision
from headrace.engine.weight_plan import WeightPlan, plan_weights, weight_bytes
from headrace.program.ir import Program
from headrace.program.model import Architecture
from headrace.program.spec import build_program, spec_from_files
from headrace.registry.model import ModelFiles, open_model
from headrace.text.tokenizer import Tokenizer

MAX_KL = 0.02
"""Mean KL in nats that a quantisation may cost; perplexity rises by about as much, 2 %."""
_WINDOW_TOKENS = 512
"""The text is read in pieces of this length, each with the model's opening token in front."""
_LEAST_POSITIONS = 16
_SPARE_BYTES = 512 * 2**20
"""Activations, KV pages, the reference's 256 most likely tokens per position, and one weight in the making."""

Progress = Callable[[str, int, int], None]
"""Called with what runs, positions done and in all."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One quantisation of the model.

    Args:
        quantization: the setting.
        layouts: bytes of packed matrices by layout.
        weight_bytes: of all weights.
        layer_bits: bits that a weight of the layers' matrices takes, scales included; ``bits`` of all matrices.
        same_as: the setting that gives the very same weights and was measured in its place, or None.
    """

    quantization: str
    layouts: dict[str, int]
    weight_bytes: int
    layer_bits: float
    bits: float
    report: QualityReport
    same_as: str | None

    def is_within(self, max_kl: float) -> bool:
        """Whether the mean divergence keeps the limit."""
        return self.report.kl_mean <= max_kl


@dataclass(frozen=True, slots=True)
class QualityBench:
    """The table. ``reference_perplexity`` is the exact path's."""

    model: str
    model_digest: str
    isa: str
    text: str
    positions: int
    reference_perplexity: float
    max_kl: float
    is_within: bool
    measured: tuple[Measured, ...]


def run_quality(
    path: Path,
    text: str,
    *,
    text_name: str,
    quantizations: Sequence[str] = QUANTIZATIONS,
    positions: int = 2048,
    max_kl: float = MAX_KL,
    threads: int = 2,
    isa: str | None = None,
    available_bytes: int | None = None,
    progress: Progress = lambda what, done, total: None,
) -> QualityBench:
    """Measures the model at ``path`` in each quantisation against its exact path.

    Args:
        text_name: what the report calls the text.
        positions: next tokens that are predicted, at most; the text may be shorter.
        max_kl: limit of the mean divergence, nats.
        available_bytes: memory that may be taken; None measures it.

    Raises:
        ConfigError: an unknown quantisation, or a text too short to say anything.
        ModelUnsupportedError: not a decoder-only model.
        ModelTooLargeError: its exact path does not fit.
        ModelError, MachineError: as loading a model.

    Cost: loads the model once per distinct quantisation and once in f32 (four bytes a weight); on two cores of 2020
    about a minute for 135 M parameters and 2048 positions.
    """
    from headrace.kernels.vm import best_isa

    for quantization in quantizations:
        check_precision("bf16", quantization)
    files = open_model(path)
    spec = spec_from_files(files)
    if spec.architecture is not Architecture.DECODER_ONLY:
        raise ModelUnsupportedError(f"{path}: is {spec.architecture.value}; only models that predict next tokens do")
    free_bytes = read_available_bytes() if available_bytes is None else available_bytes
    _check_fits(files, build_program(spec), path, free_bytes)
    texts = text_windows(files, text, min(_WINDOW_TOKENS, spec.context_tokens), positions)
    total = sum(len(window) - 1 for window in texts)
    used_isa = isa or best_isa()

    def ask(what: str, dtype: str, quantization: str) -> Distributions:
        progress(what, 0, total)
        subject = Subject(path, dtype=dtype, quantization=quantization, isa=used_isa, threads=threads, sequences=1)
        parts = []
        for window in texts:
            parts.append(subject.distributions([window]))
            progress(what, sum(len(part.ids) for part in parts), total)
        return _concatenate(parts)

    exact = ask("exact path", "fp32", "none")
    measured: list[Measured] = []
    plans: dict[str, object] = {}
    for quantization in dict.fromkeys(quantizations):
        plan = plan_weights(files, build_program(spec), dtype="bf16", quantization=quantization)
        layouts = [item.layout for item in plan]
        twin = next((name for name, other in plans.items() if other == layouts), None)
        plans[quantization] = layouts
        report = (
            compare(exact, ask(quantization, "bf16", quantization))
            if twin is None
            else next(row.report for row in measured if row.quantization == twin)
        )
        sizes: dict[str, int] = {}
        for item in plan:
            if item.spec.kind == "matrix":
                sizes[item.layout.name] = sizes.get(item.layout.name, 0) + item.size_bytes
        matrices = [item for item in plan if item.spec.kind == "matrix"]
        measured.append(
            Measured(
                quantization,
                sizes,
                sum(item.size_bytes for item in plan),
                _bits([item for item in matrices if item.spec.parts[0].role.startswith("layers.")]),
                _bits(matrices),
                report,
                twin,
            )
        )
    return QualityBench(
        model=str(path),
        model_digest=files.digest,
        isa=used_isa,
        text=text_name,
        positions=total,
        reference_perplexity=measured[0].report.reference_perplexity,
        max_kl=max_kl,
        is_within=all(row.is_within(max_kl) for row in measured),
        measured=tuple(measured),
    )


def _bits(plans: Sequence[WeightPlan]) -> float:
    """Returns the bits of a weight of these matrices."""
    return 8 * sum(plan.size_bytes for plan in plans) / sum(plan.n * plan.spec.k for plan in plans)


def _check_fits(files: ModelFiles, program: Program, path: Path, available_bytes: int) -> None:
    needed = weight_bytes(files, program, "fp32", "none") + _SPARE_BYTES
    if needed > available_bytes:
        raise ModelTooLargeError(
            f"{path}: the exact path takes {format_bytes(needed)} (four bytes a weight, {format_bytes(_SPARE_BYTES)} "
            f"beside them), {format_bytes(available_bytes)} of memory are free: measure on a larger machine"
        )


def text_windows(files: ModelFiles, text: str, size: int, positions: int) -> list[list[int]]:
    """Returns the text's tokens in windows of at most ``size``, together ``positions`` next tokens at most."""
    is_gguf = files.kind == "gguf"
    tokenizer = Tokenizer.from_gguf(files.metadata) if is_gguf else Tokenizer.from_files(files.tokenizer_files)
    plain, opened = (tokenizer.encode("Alice", add_special=special) for special in (False, True))
    # What the model wants in front of every text; without it some models predict nothing sensible.
    opening = opened[: len(opened) - len(plain)] if opened[-len(plain) :] == plain else []
    ids = tokenizer.encode(text, add_special=False)
    step = size - len(opening)
    windows: list[list[int]] = []
    left = positions
    for start in range(0, len(ids), step):
        window = (opening + ids[start : start + step])[: left + 1]
        if len(window) > 1:
            windows.append(window)
            left -= len(window) - 1
        if left <= 0:
            break
    found = positions - left
    if found < min(_LEAST_POSITIONS, positions):
        raise ConfigError(f"the text gives {found} positions to compare, at least {_LEAST_POSITIONS} are needed")
    return windows


def _concatenate(parts: Sequence[Distributions]) -> Distributions:
    targets = [part.targets for part in parts if part.targets is not None]
    return Distributions(
        np.concatenate([part.ids for part in parts]),
        np.concatenate([part.logprobs for part in parts]),
        np.concatenate(targets),
    )


def quality_table(bench: QualityBench) -> tuple[list[str], list[list[str]]]:
    """Returns columns and rows for people."""
    columns = [
        "quantization",
        "weights",
        "bits: layers, all",
        "layouts",
        "perplexity",
        "mean KL",
        "max KL",
        "top-1",
        "limit",
    ]
    rows = [["exact path", "", "", "", f"{bench.reference_perplexity:.3f}", "", "", "", ""]]
    for row in bench.measured:
        report = row.report
        rows.append(
            [
                row.quantization,
                f"{row.weight_bytes / 1e6:.1f} MB",
                f"{row.layer_bits:.2f}, {row.bits:.2f}",
                " ".join(f"{name} {size / 1e6:.1f}" for name, size in sorted(row.layouts.items())),
                f"{report.perplexity:.3f}",
                f"{report.kl_mean:.5f}",
                f"{report.kl_max:.3f}",
                f"{report.top1_ratio:.2%}",
                f"same as {row.same_as}"
                if row.same_as
                else ("within " if row.is_within(bench.max_kl) else "OVER ") + f"{bench.max_kl:g}",
            ]
        )
    return columns, rows
