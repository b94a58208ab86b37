"""Which machines the kernels are written for; apart from ``vm``, because it must be askable where nothing is built."""

from __future__ import annotations

import platform

SUPPORTED = ("x86_64", "AMD64")


def why_not(machine: str | None = None, *, isa: str | None = None) -> str | None:
    """Returns why this machine is refused, None when it is not.

    Args:
        machine: as ``uname -m`` says it; None asks the system.
        isa: the instruction set that the settings ask for; ``scalar`` runs anywhere, for those who insist.
    """
    name = machine or platform.machine()
    if name in SUPPORTED or isa == "scalar":
        return None
    return (
        f"this machine is {name or 'of an unknown kind'}, and the kernels are written for x86-64 (AVX2, AVX-512): "
        "there are none for it yet, NEON included (docs/decisions/0011-no-neon-yet.md)"
    )


REMEDY = (
    "use an x86-64 machine, or put Headrace in front of another engine; inference_engine.isa: scalar runs the portable "
    "kernels, correct but many times slower"
)
