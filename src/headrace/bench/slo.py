"""Service level objectives: what a request must keep to count as good, written ``ttft=500ms,itl=50ms``."""

from __future__ import annotations

import math
import re
from typing import Final, Literal

import msgspec

from headrace.base.errors import ConfigError

Metric = Literal["ttft", "itl", "gap", "tpot", "e2e"]
MEANINGS: Final[dict[Metric, str]] = {
    "ttft": "time to first token, from the scheduled moment",
    "itl": "mean gap between a request's chunks",
    "gap": "longest gap between a request's chunks",
    "tpot": "time per output token after the first",
    "e2e": "whole answer, from the scheduled moment",
}
_PART: Final = re.compile(r"\s*(\w+)\s*(?:=|<=|≤)\s*([0-9.]+(?:e-?\d+)?)\s*(ms|s|us|µs)\s*")
_UNITS: Final = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}


class Limit(msgspec.Struct, frozen=True):
    """One objective: a request's ``metric`` is at most ``limit_s``."""

    metric: Metric
    limit_s: float

    def __str__(self) -> str:
        return (
            f"{self.metric} ≤ {self.limit_s * 1e3:g} ms" if self.limit_s < 1 else f"{self.metric} ≤ {self.limit_s:g} s"
        )


def parse_slo(text: str) -> tuple[Limit, ...]:
    """Reads objectives; every one must be kept by a good request.

    Raises:
        ConfigError: a part is malformed, unknown or named twice.
    """
    limits: dict[Metric, Limit] = {}
    for part in text.split(","):
        match = _PART.fullmatch(part)
        if match is None:
            raise ConfigError(f"--slo has {part.strip()!r}: write METRIC=DURATION with a unit, for example ttft=500ms")
        name = next((metric for metric in MEANINGS if metric == match.group(1).lower()), None)
        if name is None:
            raise ConfigError(f"--slo names {match.group(1)!r}; known are {', '.join(MEANINGS)}")
        if name in limits:
            raise ConfigError(f"--slo names {name} twice")
        try:
            limit_s = float(match.group(2)) * _UNITS[match.group(3)]
        except ValueError:
            limit_s = math.nan
        if not 0 < limit_s < math.inf:
            raise ConfigError(f"--slo has {part.strip()!r}: the duration must be over 0")
        limits[name] = Limit(name, limit_s)
    return tuple(limits.values())
