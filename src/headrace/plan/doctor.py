"""What this machine is to Headrace: CPU, kernels, memory, bandwidth and limits; what is wrong, and what to do.

Only looks and measures; changes nothing. Each finding is judged here, printed by ``cli.doctor``.
"""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import statistics
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Final

import msgspec

from headrace.base.errors import MachineError
from headrace.base.machine import cpu_name
from headrace.base.units import GIB, MIB, format_bytes
from headrace.kernels import build
from headrace.kernels.machine import REMEDY, why_not

_ISAS: Final = ("scalar", "avx2", "avx512", "avx512bf16")
# What each asks of the CPU, by the names of ``kernels.vm.cpu_features``.
_NEEDS: Final[dict[str, tuple[str, ...]]] = {
    "avx2": ("avx2", "fma", "f16c"),
    "avx512": ("avx512", "avx512vnni"),
    "avx512bf16": ("avx512bf16",),
}
# Larger than any last-level cache share we know of, so that DRAM is read.
_PROBE_BYTES: Final = 512 * MIB
_NUM_PROBES: Final = 5
_PROBE_S: Final = 0.1
# All threads together reading less than this many times what one reads: they share one path to memory.
_SHARED_PATH_RATIO: Final = 1.3
# Probes that differ by more are two states of the machine, not noise.
_STEADY_RATIO: Final = 1.25
_FEW_FILES: Final = 4096
_LITTLE_MEMORY_BYTES: Final = 2 * GIB


class Severity(StrEnum):
    """How bad a problem is: ``bad`` keeps Headrace from working as it should, ``warning`` costs something."""

    BAD = "bad"
    WARNING = "warning"


class Problem(msgspec.Struct, frozen=True):
    """What is wrong, and what to do."""

    severity: Severity
    what: str
    remedy: str


class Cpu(msgspec.Struct, frozen=True):
    """The processor as this process may use it. ``quota`` is cores of time that a container grants, None for all."""

    model: str
    num_cores: int
    num_usable: int
    quota: float | None
    features: dict[str, bool]
    load: float


class Kernels(msgspec.Struct, frozen=True):
    """Which instruction set runs, why, and which kernel serves each opcode.

    Args:
        table: opcode → instruction set → the set its kernel was written in; None where there is none.
        missing: ``opcode (isa)`` of every scalar or absent kernel in a vector table.
    """

    in_use: str
    reason: str
    available: list[str]
    table: dict[str, dict[str, str | None]]
    missing: list[str]


class Bandwidth(msgspec.Struct, frozen=True):
    """Memory bandwidth, medians of several probes, in bytes per second.

    Args:
        mode: ``near`` when all threads share one path to memory, ``far`` when each has its own, ``single`` with one.
        low, high: extremes of the probes with all threads.
        barrier_s: one barrier of all threads.
    """

    one_thread: float
    all_threads: float
    low: float
    high: float
    mode: str
    barrier_s: float


class Memory(msgspec.Struct, frozen=True):
    """Bytes of this machine; ``limit`` is the container's, None without one."""

    total: int
    available: int
    limit: int | None


class Report(msgspec.Struct, frozen=True):
    """Everything that was found. ``kernels`` and ``bandwidth`` are None without the native library."""

    version: str
    python: str
    system: str
    cpu: Cpu
    memory: Memory
    open_files_limit: int
    kernels: Kernels | None
    bandwidth: Bandwidth | None
    problems: list[Problem]

    @property
    def is_good(self) -> bool:
        """Whether nothing is bad."""
        return all(problem.severity is not Severity.BAD for problem in self.problems)


def examine(*, version: str, isa_setting: str | None, threads: int | None) -> Report:
    """Looks at the machine; takes about two seconds, most of it probing memory.

    Args:
        isa_setting: the instruction set that the settings ask for, or None.
        threads: the threads that the settings ask for, or None.
    """
    problems: list[Problem] = []
    kernels: Kernels | None = None
    bandwidth: Bandwidth | None = None
    features: dict[str, bool] = {}
    num_threads = threads or len(os.sched_getaffinity(0))
    if (reason := why_not(isa=isa_setting)) is not None:
        problems.append(Problem(Severity.BAD, reason, REMEDY))
    try:
        from headrace.kernels import vm
    except MachineError as error:
        problems.append(Problem(Severity.BAD, error.message, "build it with scripts/setup, or reinstall headrace"))
    else:
        if (reason := build.why_stale()) is not None:
            problems.append(Problem(Severity.WARNING, reason, build.REMEDY))
        features = vm.cpu_features()
        tables: dict[str, dict[str, str | None]] = {}
        for isa in _ISAS:
            with contextlib.suppress(MachineError):  # this build does not hold it
                tables[isa] = {opcode.name: name for opcode, name in vm.kernel_names(isa).items()}
        kernels = judge_kernels(vm.available_isas(), tables, isa_setting, problems, features)
        bandwidth = _probe(num_threads)
    cpu = _cpu(features)
    memory = _memory()
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    find_problems(cpu, memory, soft, bandwidth, num_threads, problems)
    return Report(
        version=version,
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu=cpu,
        memory=memory,
        open_files_limit=soft,
        kernels=kernels,
        bandwidth=bandwidth,
        problems=problems,
    )


def judge_kernels(
    available: list[str],
    tables: Mapping[str, Mapping[str, str | None]],
    isa_setting: str | None,
    problems: list[Problem],
    features: Mapping[str, bool] | None = None,
) -> Kernels:
    """Gives which kernels run, and adds a problem for each that is missing.

    A scalar kernel in a vector table counts as missing; a narrower vector kernel in a wider table does not.
    """
    best = available[-1]
    in_use, reason = best, _why_best(available, features or {}, tables)
    if isa_setting is not None:
        in_use, reason = isa_setting, "set by inference_engine.isa"
        if isa_setting not in available:
            what = f"inference_engine.isa is {isa_setting}, but this CPU and build have {', '.join(available)}"
            problems.append(Problem(Severity.BAD, what, "unset it"))
            in_use, reason = best, f"{isa_setting} is not available"
    if in_use == "scalar":
        what = "the scalar kernels are in use: correct, but many times slower"
        remedy = "unset inference_engine.isa" if best != "scalar" else "use a CPU with AVX2 and FMA, or AVX-512"
        problems.append(Problem(Severity.WARNING, what, remedy))
    opcodes = sorted({opcode for table in tables.values() for opcode in table})
    missing = [
        f"{opcode} ({isa})"
        for isa, table in tables.items()
        for opcode in opcodes
        if isa != "scalar" and table.get(opcode) in (None, "scalar")
    ]
    if missing:
        what = f"kernels without a vector version: {', '.join(missing)}"
        problems.append(Problem(Severity.BAD, what, "this build is incomplete: rebuild with scripts/setup"))
    table = {opcode: {isa: tables[isa].get(opcode) for isa in tables} for opcode in opcodes}
    return Kernels(in_use, reason, available, table, missing)


def _why_best(
    available: Sequence[str], features: Mapping[str, bool], tables: Mapping[str, Mapping[str, str | None]]
) -> str:
    """Says why a set is the best one: what the next wider one wants, and who lacks it, the CPU or the build."""
    wider = _ISAS[_ISAS.index(available[-1]) + 1 :] if available[-1] in _ISAS else ()
    if not wider:
        return "the best there is"
    missing = [name for name in _NEEDS[wider[0]] if not features.get(name, False)]
    if features and missing:
        return f"the best that this CPU has: {wider[0]} needs {', '.join(missing)}"
    if wider[0] not in tables:
        return f"the best in this build, which was made without {wider[0]}"
    return "the best that this CPU and build have"


def find_problems(
    cpu: Cpu,
    memory: Memory,
    open_files_limit: int,
    bandwidth: Bandwidth | None,
    num_threads: int,
    problems: list[Problem],
) -> None:
    """Adds what is wrong with the machine."""
    usable = min(cpu.num_usable, cpu.quota or cpu.num_usable)
    if num_threads > usable:
        what = f"{num_threads} threads, but this process may use {usable:g} cores"
        problems.append(Problem(Severity.WARNING, what, f"set inference_engine.threads to {max(1, int(usable))}"))
    if cpu.load > cpu.num_usable:
        what = f"the machine is busy: load {cpu.load:.1f} on {cpu.num_usable} cores"
        problems.append(Problem(Severity.WARNING, what, "measure again when it is quiet"))
    room = min(memory.available, memory.limit or memory.available)
    if room < _LITTLE_MEMORY_BYTES:
        what = f"{format_bytes(room)} of memory is free"
        problems.append(Problem(Severity.WARNING, what, "end other programs, or choose a small or quantised model"))
    if 0 <= open_files_limit < _FEW_FILES:
        what = f"{open_files_limit} files may be open; each client takes one"
        problems.append(
            Problem(Severity.WARNING, what, f"raise it: ulimit -n {_FEW_FILES}, or LimitNOFILE= in systemd")
        )
    if bandwidth is not None and bandwidth.high > _STEADY_RATIO * bandwidth.low:
        low, high = bandwidth.low / 1e9, bandwidth.high / 1e9
        what = f"memory bandwidth is not steady: {low:.0f} to {high:.0f} GB/s in {_NUM_PROBES} probes"
        problems.append(Problem(Severity.WARNING, what, "state the bandwidth beside every speed measured here"))


def judge_mode(one_thread: float, all_threads: float, num_threads: int) -> str:
    """Gives the bandwidth mode: whether the threads share one path to memory."""
    if num_threads == 1:
        return "single"
    return "near" if all_threads < _SHARED_PATH_RATIO * one_thread else "far"


def _probe(num_threads: int) -> Bandwidth:
    from headrace.kernels import vm

    alone = [vm.probe_bandwidth(_PROBE_BYTES, 1, _PROBE_S) for _ in range(_NUM_PROBES)]
    together = [vm.probe_bandwidth(_PROBE_BYTES, num_threads, _PROBE_S) for _ in range(_NUM_PROBES)]
    one, everyone = statistics.median(alone), statistics.median(together)
    return Bandwidth(
        one_thread=one,
        all_threads=everyone,
        low=min(together),
        high=max(together),
        mode=judge_mode(one, everyone, num_threads),
        barrier_s=vm.probe_barrier(num_threads),
    )


def _cpu(features: dict[str, bool]) -> Cpu:
    return Cpu(
        model=cpu_name(),
        num_cores=os.cpu_count() or 1,
        num_usable=len(os.sched_getaffinity(0)),
        quota=_cpu_quota(Path("/sys/fs/cgroup")),
        features=features,
        load=os.getloadavg()[0],
    )


def _cpu_quota(root: Path) -> float | None:
    """Gives the cores of CPU time that the container grants, None without a limit (cgroup v2, then v1)."""
    quota, period = None, None
    if (root / "cpu.max").is_file():
        quota, _, period = (root / "cpu.max").read_text().strip().partition(" ")
    elif (root / "cpu" / "cpu.cfs_quota_us").is_file():
        quota = (root / "cpu" / "cpu.cfs_quota_us").read_text().strip()
        period = (root / "cpu" / "cpu.cfs_period_us").read_text().strip()
    if quota is None or period is None or not quota.isdigit() or not period.isdigit():
        return None
    return int(quota) / int(period)


def _memory() -> Memory:
    import psutil

    found = psutil.virtual_memory()
    return Memory(int(found.total), int(found.available), _memory_limit(Path("/sys/fs/cgroup"), int(found.total)))


def _memory_limit(root: Path, total: int) -> int | None:
    for file in (root / "memory.max", root / "memory" / "memory.limit_in_bytes"):
        if file.is_file():
            text = file.read_text().strip()
            # v1 says "no limit" with a number near 2**63.
            return int(text) if text.isdigit() and int(text) < total else None
    return None
