"""What a judge found, and the table's row for it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Finding:
    """One check. ``waived`` is the reason why its failure is none of ours; None where there is no such reason."""

    check: str
    is_ok: bool
    why: str = ""
    waived: str | None = None


@dataclass(slots=True)
class Report:
    """All that one judge found. ``notes`` are lines of what it did, for the table."""

    judge: str
    version: str
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, check: str, is_ok: bool, why: str = "", waived: str | None = None) -> None:
        self.findings.append(Finding(check, is_ok, why, waived))

    @property
    def failed(self) -> list[Finding]:
        return [finding for finding in self.findings if not finding.is_ok and finding.waived is None]

    @property
    def waived(self) -> list[Finding]:
        return [finding for finding in self.findings if not finding.is_ok and finding.waived is not None]

    @property
    def num_passed(self) -> int:
        return sum(finding.is_ok for finding in self.findings)


HEADER = f"{'judge':20} {'version':12} {'passed':>6} {'failed':>6} {'waived':>6}"


def row(report: Report, *, is_long: bool) -> str:
    """Gives a report's line, below it its notes, failures and waivers: by reason, or one by one where ``is_long``."""
    counts = f"{report.num_passed:6} {len(report.failed):6} {len(report.waived):6}"
    lines = [f"{report.judge:20} {report.version:12} {counts}"]
    lines += [f"    {note}" for note in report.notes]
    lines += [f"    FAILED {finding.check}: {finding.why}" for finding in report.failed]
    if is_long:
        lines += [f"    waived {finding.check}: {finding.waived}" for finding in report.waived]
    else:
        reasons: dict[str, int] = {}
        for finding in report.waived:
            reasons[finding.waived or ""] = reasons.get(finding.waived or "", 0) + 1
        lines += [f"    waived {count} × {reason}" for reason, count in sorted(reasons.items(), key=lambda x: -x[1])]
    return "\n".join(lines)
