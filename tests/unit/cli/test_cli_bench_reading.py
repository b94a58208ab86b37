"""The commands that read runs: report, compare, history."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from headrace.bench.records import (
    Environment,
    Exchange,
    Lag,
    Overhead,
    RunStart,
    RunWriter,
    Settings,
    encode_exchange,
)
from headrace.cli.main import make_app


def write_run(
    folder: Path, *, slower: float = 1.0, seed: int = 0, num: int = 1000, started_at_s: float = 1.7e9
) -> Path:
    """A closed loop of four on a server whose answers take about 0.5 s."""
    folder.mkdir()
    random = np.random.default_rng(seed)
    start = RunStart(
        headrace_run=1,
        started_at_s=started_at_s,
        settings=Settings(url="http://127.0.0.1:1", model="demo", concurrency=4, data="file.jsonl"),
        environment=Environment(headrace="0.1", python="3", system="L", cpu="C", num_cpus=2, load_average=0.0),
    )
    free_s = np.zeros(4)
    exchanges = []
    for index in range(num):
        slot = int(np.argmin(free_s))
        at = float(free_s[slot])
        first = at + float(random.lognormal(-2, 0.3)) * slower
        chunks = tuple((first + np.arange(10) * 0.04 * slower * random.lognormal(0, 0.1)).tolist())
        free_s[slot] = chunks[-1]
        exchanges.append(
            Exchange(index=index, operation="chat", scheduled_s=at, sent_s=at, first_s=chunks[0], ended_s=chunks[-1],
                     chunk_s=chunks, output_tokens=10, prompt_tokens=5, status=200, finish_reason="stop")
        )  # fmt: skip
    exchanges.sort(key=lambda exchange: exchange.ended_s)
    with RunWriter(folder / "run.jsonl", start) as writer:
        writer.add(b"".join(map(encode_exchange, exchanges)), num)
        lag = Lag(p50_s=0.0, p99_s=0.0, max_s=0.0)
        writer.finish(
            duration_s=exchanges[-1].ended_s,
            measured_from_s=0.0,
            is_partial=False,
            overhead=Overhead(processes=1, loop_lag=lag, send_lag=lag, cpu_s=0.0, busiest_ratio=0.0),
        )
    return folder


def headrace(*arguments: str | Path) -> Result:
    return CliRunner().invoke(make_app(), ["bench", *map(str, arguments)])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    return {
        "a": write_run(folder / "a"),
        "equal": write_run(folder / "equal", seed=1, started_at_s=1.71e9),
        "slow": write_run(folder / "slow", seed=2, slower=1.15, started_at_s=1.72e9),
        "short": write_run(folder / "short", num=100),
    }


def test_a_recorded_run_is_reported_with_other_objectives_and_as_a_page(runs: dict[str, Path], tmp_path: Path) -> None:
    shown = headrace("report", runs["a"], "--slo", "ttft=150ms", "--output", tmp_path / "out")
    printed = headrace("report", runs["a"] / "run.jsonl", "--json")

    assert shown.exit_code == 0, shown.output
    assert "goodput/s (ttft ≤ 150 ms)" in shown.stdout
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["report.html", "report.json", "report.md"]
    assert json.loads(printed.stdout)["num_good"] == 1000


@pytest.mark.parametrize(
    ("a", "b", "code", "expected"),
    [("a", "equal", 0, "No difference"), ("a", "slow", 1, "is worse than"), ("slow", "a", 0, "is better than")],
)
def test_recorded_runs_are_compared(runs: dict[str, Path], a: str, b: str, code: int, expected: str) -> None:
    shown = headrace("compare", runs[a], runs[b])

    assert (shown.exit_code, expected in shown.stdout) == (code, True), shown.output


def test_a_comparison_is_written_in_every_form(runs: dict[str, Path], tmp_path: Path) -> None:
    shown = headrace("compare", runs["a"], runs["slow"], "--output", tmp_path, "--json")

    assert json.loads(shown.stdout)["verdict"] == "worse"
    assert json.loads((tmp_path / "comparison.json").read_bytes()) == json.loads(shown.stdout)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["comparison.html", "comparison.json", "comparison.md"]


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ("a", "http://127.0.0.1:1", "a server and a recorded run"),
        ("a", "short", "the run has 100 requests: a comparison takes 500 of each side"),
        ("a", "nowhere", "nowhere cannot be read"),
    ],
)
def test_what_cannot_be_compared_is_refused(runs: dict[str, Path], a: str, b: str, expected: str) -> None:
    shown = headrace("compare", runs[a], runs.get(b, b))

    assert expected in str(shown.exception)


def test_history_keeps_runs_and_flags_what_became_slower(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_STORE_URL", f"sqlite:///{tmp_path}/h.db")
    monkeypatch.chdir(tmp_path)
    series = "demo, file.jsonl, closed loop, 4 at once"

    added = [headrace("history", "add", runs[name], "--version", version).exit_code
             for name, version in (("a", "0.1"), ("equal", "0.2"))]  # fmt: skip
    good = headrace("history", "check", series)
    headrace("history", "add", runs["slow"], "--version", "0.3")
    dropped = headrace("history", "check", series, "--json")
    shown = headrace("history", "show", series, "--output", tmp_path / "h.html")
    listed = json.loads(headrace("history", "list", "--json").stdout)
    exported = headrace("history", "export").stdout.splitlines()
    removed = headrace("history", "remove", str(listed[-1]["id"]))

    assert added == [0, 0]
    assert (good.exit_code, "no real drop of 5% or more from 0.1 (1 runs) to 0.2" in good.stdout) == (0, True)
    assert dropped.exit_code == 1
    drops = [change["name"] for change in json.loads(dropped.stdout)["changes"] if change["is_drop"]]
    assert {"TPOT p50", "E2E p50", "output tokens/s"} <= set(drops)
    assert "DROP from 0.2" in (tmp_path / "h.html").read_text()
    assert "0.3" in shown.stdout
    assert [one["version"] for one in listed] == ["0.1", "0.2", "0.3"]
    assert len(json.loads(exported[0])["figures"]["E2E p50"]) == 20
    assert removed.exit_code == 0
    assert len(json.loads(headrace("history", "list", "--json").stdout)) == 2


def test_a_series_that_is_not_kept_is_named_with_the_nearest(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_STORE_URL", f"sqlite:///{tmp_path}/h.db")
    monkeypatch.chdir(tmp_path)
    headrace("history", "add", runs["a"], "--version", "0.1", "--series", "demo at 4")

    shown = headrace("history", "show", "demo at 5")

    assert "there is no series 'demo at 5'" in str(shown.exception)
    assert getattr(shown.exception, "hint", "") == "the nearest is 'demo at 4'"
