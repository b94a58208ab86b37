"""Sizes and durations as people write and read them. A quantity inside the program is a bare number in base units."""

from __future__ import annotations

import re
from typing import Final

KIB: Final = 2**10
MIB: Final = 2**20
GIB: Final = 2**30

_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kKMGT]?i?B?)\s*$")
_FACTORS: Final = {
    "": 1,
    "B": 1,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}


def parse_size(text: str) -> int:
    """Gives the bytes that ``text`` (``4 MiB``, ``512``, ``1.5GB``) stands for.

    Raises:
        ValueError: ``text`` is not a number with an optional unit.
    """
    match = _SIZE.match(text)
    factor = _FACTORS.get(match.group(2)) if match else None
    if match is None or factor is None:
        raise ValueError(f"{text!r} is not a size: write for example 512, 4 MiB or 1.5 GB")
    return round(float(match.group(1)) * factor)


def format_bytes(size_bytes: float) -> str:
    """Gives a size with three digits and a binary unit: ``13.4 MiB``."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def format_duration(duration_s: float) -> str:
    """Gives a duration in the unit that suits it: ``850 µs``, ``12.5 ms``, ``4 min 05 s``, ``2 h 03 min``."""
    if duration_s < 1e-3:
        return f"{duration_s * 1e6:.0f} µs"
    if duration_s < 1:
        return f"{duration_s * 1e3:.1f} ms"
    if duration_s < 60:
        return f"{duration_s:.1f} s"
    minutes, seconds = divmod(round(duration_s), 60)
    if minutes < 60:
        return f"{minutes} min {seconds:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"
