"""What a child process owes its parent: reading what it was told, and not outliving it."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def read_inherited(fd: int) -> bytes:
    """Reads an inherited descriptor to its end and closes it. Nothing in it: the parent has gone, and we go too.

    Raises:
        OSError: the descriptor is not open, or cannot be read.
    """
    with os.fdopen(fd, "rb") as stream:
        data = stream.read()
    if not data:
        os._exit(1)
    return data


def die_with_parent(parent_pid: int | None = None) -> None:
    """Asks the kernel to kill this process when the thread that started it ends.

    Args:
        parent_pid: who the parent should be, where known. Already gone: this process ends at once, because the
            kernel sends nothing for a death that came before the call.

    Raises:
        OSError: the kernel refused.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if parent_pid is not None and os.getppid() != parent_pid:
        os._exit(1)
