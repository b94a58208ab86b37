"""What the machine says of itself."""

from __future__ import annotations

import platform
from pathlib import Path


def cpu_name() -> str:
    """Gives the processor's name as the system knows it, its architecture where it has none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()
