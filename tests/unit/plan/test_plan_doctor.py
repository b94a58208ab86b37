import re
from pathlib import Path

import pytest

from headrace.kernels.machine import why_not
from headrace.plan.doctor import (
    Bandwidth,
    Cpu,
    Memory,
    Problem,
    Severity,
    _cpu_quota,
    _memory_limit,
    examine,
    find_problems,
    judge_kernels,
    judge_mode,
)

VECTOR = {"LINEAR": "avx2", "HEAD": "avx2"}
SCALAR = {"LINEAR": "scalar", "HEAD": "scalar"}
GIB = 2**30


def test_complete_tables_have_nothing_missing() -> None:
    problems: list[Problem] = []

    kernels = judge_kernels(["scalar", "avx2"], {"scalar": SCALAR, "avx2": VECTOR}, None, problems)

    assert (kernels.in_use, kernels.missing, problems) == ("avx2", [], [])


@pytest.mark.parametrize("name", ["scalar", None])
def test_scalar_or_absent_kernel_in_a_vector_table_is_missing(name: str | None) -> None:
    problems: list[Problem] = []
    tables = {"scalar": SCALAR, "avx2": VECTOR | {"HEAD": name}}

    kernels = judge_kernels(["scalar", "avx2"], tables, None, problems)

    assert kernels.missing == ["HEAD (avx2)"]
    assert [problem.severity for problem in problems] == [Severity.BAD]


def test_narrower_vector_kernel_in_a_wider_table_is_no_gap() -> None:
    kernels = judge_kernels(
        ["scalar", "avx2"], {"avx512": VECTOR, "avx512bf16": {"LINEAR": "avx512", "HEAD": "avx512"}}, None, []
    )

    assert kernels.missing == []


def test_setting_that_this_cpu_lacks_is_bad() -> None:
    problems: list[Problem] = []

    kernels = judge_kernels(["scalar", "avx2"], {"scalar": SCALAR, "avx2": VECTOR}, "avx512", problems)

    assert (kernels.in_use, kernels.reason) == ("avx2", "avx512 is not available")
    assert problems[0].severity is Severity.BAD


def test_scalar_in_use_is_warned_about() -> None:
    problems: list[Problem] = []

    judge_kernels(["scalar"], {"scalar": SCALAR}, None, problems)

    assert [problem.severity for problem in problems] == [Severity.WARNING]
    assert "AVX2" in problems[0].remedy


def find(**changes: object) -> list[str]:
    cpu = {"model": "x", "num_cores": 8, "num_usable": 8, "quota": None, "features": {}, "load": 0.1}
    memory = {"total": 64 * GIB, "available": 32 * GIB, "limit": None}
    bandwidth = {"one_thread": 4e10, "all_threads": 8e10, "low": 8e10, "high": 8e10, "mode": "far", "barrier_s": 1e-7}
    rest = {"open_files_limit": 65_536, "num_threads": 8}
    for name, value in changes.items():
        for group in (cpu, memory, bandwidth, rest):
            if name in group:
                group[name] = value  # type: ignore[assignment]
    problems: list[Problem] = []
    find_problems(
        Cpu(**cpu),  # type: ignore[arg-type]
        Memory(**memory),  # type: ignore[arg-type]
        int(rest["open_files_limit"]),
        Bandwidth(**bandwidth),  # type: ignore[arg-type]
        int(rest["num_threads"]),
        problems,
    )
    return [problem.what for problem in problems]


def test_good_machine_has_no_problem() -> None:
    assert find() == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_threads": 9}, "9 threads, but this process may use 8 cores"),
        ({"quota": 1.5}, "8 threads, but this process may use 1.5 cores"),
        ({"load": 9.5}, "the machine is busy"),
        ({"available": GIB}, "1.0 GiB of memory is free"),
        ({"limit": GIB}, "1.0 GiB of memory is free"),
        ({"open_files_limit": 1024}, "1024 files may be open"),
        ({"low": 4.4e10}, "not steady: 44 to 80 GB/s"),
    ],
)
def test_each_lack_is_named(changes: dict[str, object], words: str) -> None:
    (what,) = find(**changes)

    assert words in what


@pytest.mark.parametrize(
    ("one", "everyone", "threads", "mode"), [(41, 44, 2, "near"), (41, 80, 2, "far"), (41, 41, 1, "single")]
)
def test_mode_says_whether_threads_share_a_path_to_memory(one: float, everyone: float, threads: int, mode: str) -> None:
    assert judge_mode(one, everyone, threads) == mode


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2.0),
    ],
)
def test_cpu_quota_is_read_from_either_cgroup_version(
    tmp_path: Path, files: dict[str, str], quota: float | None
) -> None:
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)

    assert _cpu_quota(tmp_path) == quota


@pytest.mark.parametrize(
    ("name", "text", "limit"),
    [
        ("memory.max", "max", None),
        ("memory.max", "1000", 1000),
        ("memory/memory.limit_in_bytes", "9223372036854771712", None),
        ("memory/memory.limit_in_bytes", "1000", 1000),
        ("other", "", None),
    ],
)
def test_memory_limit_is_read_from_either_cgroup_version(
    tmp_path: Path, name: str, text: str, limit: int | None
) -> None:
    (tmp_path / "memory").mkdir()
    (tmp_path / name).write_text(text)

    assert _memory_limit(tmp_path, 10**9) == limit


def test_examining_this_machine_finds_every_kernel() -> None:
    report = examine(version="1", isa_setting=None, threads=1)

    assert report.kernels is not None
    assert report.kernels.missing == []
    assert report.bandwidth is not None
    assert report.bandwidth.mode == "single"


@pytest.mark.parametrize(
    ("available", "features", "tables", "reason"),
    [
        (["scalar", "avx2"], {"avx512": False}, ["scalar", "avx2"], "this CPU has: avx512 needs avx512, avx512vnni"),
        (["scalar", "avx2"], {"avx512": True, "avx512vnni": True}, ["scalar", "avx2"], "build, which was made without"),
        (["scalar", "avx2", "avx512", "avx512bf16"], {}, ["scalar", "avx2"], "the best there is"),
        (["scalar"], {"avx2": False, "fma": True, "f16c": True}, ["scalar", "avx2"], "avx2 needs avx2"),
    ],
)
def test_the_path_in_use_is_said_with_its_reason(
    available: list[str], features: dict[str, bool], tables: list[str], reason: str
) -> None:
    kernels = judge_kernels(available, dict.fromkeys(tables, VECTOR), None, [], features)

    assert kernels.in_use == available[-1]
    assert reason in kernels.reason


@pytest.mark.parametrize("machine", ["aarch64", "riscv64", "ppc64le"])
def test_other_machines_are_refused_with_the_reason(machine: str) -> None:
    reason = why_not(machine)

    assert reason is not None
    assert machine in reason
    assert "NEON" in reason
    assert why_not(machine, isa="scalar") is None


def test_x86_64_is_not_refused() -> None:
    assert why_not("x86_64") is None


def test_the_decision_that_the_refusal_names_exists() -> None:
    (named,) = re.findall(r"docs/\S+\.md", why_not("aarch64") or "")

    assert (Path(__file__).parents[3] / named).is_file()
