"""The quality gates: which configuration of the demo model is held to which figures, against what.

Fixed numbers, so that a change of kernel, layout or quantiser cannot quietly cost quality. ``golden`` is transformers
in fp32 (tests/golden); ``exact`` is our own exact path on the same file, once that has matched the golden.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.engine.quality import QualityReport


@dataclass(frozen=True, slots=True)
class Gate:
    """One configuration and its limits.

    Args:
        model: ``bf16`` is the derived safetensors folder, ``gguf`` the demo file as it is.
        reference: ``golden`` or ``exact``.
        min_top1_ratio, max_kl_mean: limits; a missing one is not held.
    """

    name: str
    model: str
    dtype: str
    quantization: str
    reference: str
    max_kl_mean: float
    min_top1_ratio: float = 0.0

    def faults(self, report: QualityReport) -> list[str]:
        """Returns which limits the report misses."""
        missed = []
        if not report.kl_mean <= self.max_kl_mean:
            missed.append(f"mean KL is {report.kl_mean:.6f}, the limit is {self.max_kl_mean}")
        if not report.top1_ratio >= self.min_top1_ratio:
            missed.append(f"top-1 is {report.top1_ratio:.4f}, the limit is {self.min_top1_ratio}")
        return missed


GREEDY_TOKENS = 64
"""The exact path gives all prompts of the golden this many tokens, every one of them transformers' own."""

GATES = (
    # float32 sums in another order move a logit by 1e-4: a KL of 1e-8. The golden's rounding adds as much.
    Gate("exact", "bf16", "fp32", "none", "golden", max_kl_mean=1e-6, min_top1_ratio=0.999),
    Gate("bf16", "bf16", "bf16", "none", "golden", max_kl_mean=0.001, min_top1_ratio=0.985),
    Gate("int8", "bf16", "bf16", "int8", "exact", max_kl_mean=0.012),
    Gate("int4", "bf16", "bf16", "int4", "exact", max_kl_mean=0.012),
    Gate("gguf exact", "gguf", "fp32", "none", "golden", max_kl_mean=1e-6, min_top1_ratio=0.999),
    Gate("gguf q4_1", "gguf", "bf16", "none", "exact", max_kl_mean=0.006),
)
