"""Exit codes: what every command and process of Headrace says with its end.

0 to 3 are what scripts branch on. The others name the cause of a start that failed, so that a service manager can tell
a mistake that no restart cures (``is_permanent``) from an accident.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from headrace.base.errors import (
    AddressInUseError,
    AlreadyRunningError,
    ConfigError,
    HeadraceError,
    MachineError,
    ModelError,
    RequestError,
    SourceError,
)


class Exit(IntEnum):
    """Every exit code; ``MEANINGS`` says what each stands for."""

    GOOD = 0
    BAD = 1
    USAGE = 2
    UNDECIDED = 3
    ADDRESS_IN_USE = 10
    MODEL = 11
    MACHINE = 12
    SOURCE = 13
    ALREADY_RUNNING = 14
    WORK_CUT = 75


MEANINGS: Final[dict[Exit, str]] = {
    Exit.GOOD: "it worked, and the answer is yes",
    Exit.BAD: "it ran, and the answer is no: a check failed, a server ended badly",
    Exit.USAGE: "the command line, a setting or an input is wrong",
    Exit.UNDECIDED: "it ran, and there is not enough to say yes or no",
    Exit.ADDRESS_IN_USE: "another program listens on the port",
    Exit.MODEL: "the model cannot be used: malformed, altered, not supported or too large",
    Exit.MACHINE: "this machine lacks something: the native library, a CPU feature, disk space",
    Exit.SOURCE: "the model could not be found or fetched",
    Exit.ALREADY_RUNNING: "the same server runs already",
    Exit.WORK_CUT: "ended as asked, but requests that ran had to be cut",
}

# In this order: the first class that fits decides.
_CODES: Final[tuple[tuple[type[HeadraceError], Exit], ...]] = (
    (AddressInUseError, Exit.ADDRESS_IN_USE),
    (AlreadyRunningError, Exit.ALREADY_RUNNING),
    (ConfigError, Exit.USAGE),
    (RequestError, Exit.USAGE),
    (ModelError, Exit.MODEL),
    (MachineError, Exit.MACHINE),
    (SourceError, Exit.SOURCE),
)
_PERMANENT: Final = frozenset({Exit.USAGE, Exit.MODEL, Exit.MACHINE})


def exit_code_of(error: HeadraceError) -> Exit:
    """Gives the code with which a process ends that cannot go on because of ``error``."""
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code
    return Exit.BAD


def is_permanent(code: int) -> bool:
    """Whether starting the same thing again would fail the same way."""
    return code in _PERMANENT
