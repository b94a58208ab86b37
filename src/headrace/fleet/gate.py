"""The gate before the threads that several models share: what the supervisor opens for it and hands down.

How workers pass it is ``engine.gate``'s business; who passes first is ``policy.turns``'s.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack

from headrace.base.errors import ConfigError
from headrace.protocol.launch import GATE_MEMORY_BYTES, MAX_GATE_WORKERS, GateLaunch


def open_gate(
    threads: Sequence[int], shares: Sequence[float], num_cpus: int, held: ExitStack
) -> list[GateLaunch | None]:
    """Opens the gate and gives each worker's place at it; None for all where each has cores of its own.

    Args:
        threads: of each worker.
        shares: weight of each worker's steps.
        held: closes the descriptors.

    Raises:
        ConfigError: more models than a gate has places.
    """
    if len(threads) < 2 or sum(threads) <= num_cpus:
        return [None] * len(threads)
    if len(threads) > MAX_GATE_WORKERS:
        raise ConfigError(f"models holds {len(threads)}, on one machine {MAX_GATE_WORKERS} can share the threads")
    memory_fd = os.memfd_create("headrace-gate")
    held.callback(os.close, memory_fd)
    os.ftruncate(memory_fd, GATE_MEMORY_BYTES)
    wake_fds = [os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in threads]
    for fd in wake_fds:
        held.callback(os.close, fd)
    return [GateLaunch(memory_fd, wake_fds, index, share, sum(shares)) for index, share in enumerate(shares)]
