"""Where a load comes from: machine, system, versions."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import headrace
from headrace.bench.records import Environment


def read_environment() -> Environment:
    """Gives what this machine is and how busy it has been."""
    return Environment(
        headrace=headrace.__version__,
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()}",
        cpu=_cpu_name(),
        num_cpus=os.cpu_count() or 1,
        load_average=round(os.getloadavg()[0], 2),
    )


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
