"""Where a load comes from: machine, system, versions."""

from __future__ import annotations

import os
import platform

import headrace
from headrace.base.machine import cpu_name
from headrace.bench.records import Environment


def read_environment() -> Environment:
    """Gives what this machine is and how busy it has been."""
    return Environment(
        headrace=headrace.__version__,
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()}",
        cpu=cpu_name(),
        num_cpus=os.cpu_count() or 1,
        load_average=round(os.getloadavg()[0], 2),
    )
