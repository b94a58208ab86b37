"""`headrace bench serve` in front of `headrace mock`: two processes, as people run them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.bench.mock.truth import read_truths

COMMAND = [sys.executable, "-m", "headrace"]


def start_mock(*arguments: str) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen(
        [*COMMAND, "mock", "--port", "0", "--json", *arguments], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    said = ""
    while not said.rstrip().endswith("}"):
        line = process.stdout.readline()
        assert line, "the mock did not start"
        said += line
    return process, json.loads(said)["url"]


@pytest.fixture(scope="module")
def mock_url() -> Iterator[str]:
    process, url = start_mock("--ttft-ms", "20", "--itl-ms", "2", "--tokens", "5")
    yield url
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0
    assert process.stdout is not None
    process.stdout.close()


def bench(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return run("serve", *arguments, env=env)


def run(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, "bench", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, **(env or {})},
    )


def test_a_file_is_sent_once_its_bad_line_named_and_the_report_written(mock_url: str, tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "hello"}]}
    lines = [json.dumps(chat)] * 6
    lines[3] = '{"messages": 3}'
    (tmp_path / "chats.jsonl").write_text("\n".join(lines) + "\n")

    done = bench(
        "--server-url", f"{mock_url}/v1", "--test-file", str(tmp_path / "chats.jsonl"), "--concurrency", "2",
        "--output", str(tmp_path / "report"), "--json",
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert "chats.jsonl, line 4: " in done.stderr
    summary = json.loads(done.stdout)
    assert summary["settings"]["model"] == "mock"
    assert summary["num_failed"] == 0
    p50 = next(one for one in summary["latency"]["ttft"]["percentiles"] if one["quantile"] == 0.5)
    assert 0.020 <= p50["value_s"] < 0.5
    written = sorted(path.name for path in (tmp_path / "report").iterdir())
    assert written == ["report.html", "report.json", "report.md", "run.jsonl"]


def test_failed_requests_make_exit_code_1_and_allowed_ones_do_not(mock_url: str) -> None:
    arguments = ["--server-url", mock_url, "--num-requests", "4", "--timeout", "0.01"]

    strict, lenient = bench(*arguments), bench(*arguments, "--max-error-ratio", "1")

    assert (strict.returncode, lenient.returncode) == (1, 0)
    assert "timeout" in strict.stdout


def test_a_mock_that_crashes_is_gone_and_its_clients_are_cut_off(tmp_path: Path) -> None:
    process, url = start_mock("--fault", "crash:1:1", "--truth", str(tmp_path / "truth"))

    done = bench("--server-url", url, "--model", "m", "--num-requests", "2", "--json")

    assert process.wait(10) == 70
    assert process.stdout is not None
    process.stdout.close()
    kinds = {error["kind"]: error["num"] for error in json.loads(done.stdout)["errors"]}
    # The kernel may close the connection before the listening socket: the second is refused, or reset as well.
    assert kinds in ({"reset": 1, "connect": 1}, {"reset": 2})
    assert done.returncode == 1
    (truth,) = read_truths(tmp_path / "truth")
    assert (truth.fault, truth.tokens, len(truth.write_s)) == ("crash", 1, 1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--server-url", "http://127.0.0.1:9"], "nothing answers there"),
        (["--server-url", "ftp://x"], "--server-url is 'ftp://x'"),
        (["--server-url", "http://h", "--model", "m", "--rate", "1", "--concurrency", "2"], "--concurrency and --rate"),
        (["--server-url", "http://h", "--model", "m", "--test-file", "/nowhere.jsonl"], "nowhere.jsonl"),
        (["--server-url", "http://h", "--model", "m", "--arrivals", "trace"], "from a --test-file"),
    ],
    ids=["nobody there", "no server", "both loops", "no file", "no trace"],
)
def test_wrong_use_is_one_line_and_exit_code_2(arguments: list[str], said: str) -> None:
    done = bench(*arguments)

    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_prints_what_there_is_with_exit_code_3(mock_url: str, tmp_path: Path, number: signal.Signals) -> None:
    record = tmp_path / "report" / "run.jsonl"
    command = [*COMMAND, "bench", "serve", "--server-url", mock_url, "--concurrency", "4", "--duration", "60"]
    process = subprocess.Popen(
        [*command, "--output", str(record.parent), "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    limit_s = time.monotonic() + 30
    while time.monotonic() < limit_s and not (record.exists() and record.stat().st_size > 10_000):
        time.sleep(0.05)
    process.send_signal(number)
    said, errors = process.communicate(timeout=30)

    assert process.returncode == 3, errors
    summary = json.loads(said)
    assert summary["is_partial"]
    assert summary["latency"]["e2e"]["num"] > 0
    assert (record.parent / "report.html").exists()


@pytest.mark.parametrize(
    ("kind", "path"), [("completions", "/v1/completions"), ("embeddings", "/v1/embeddings"), ("rerank", "/v1/rerank")]
)
def test_sweep_and_compare_send_what_operation_says(tmp_path: Path, kind: str, path: str) -> None:
    process, url = start_mock("--ttft-ms", "1", "--itl-ms", "1", "--tokens", "2", "--truth", str(tmp_path / "truth"))

    swept = run("sweep", "--server-url", url, "--loads", "1", "--point-requests", "4", "--operation", kind)
    compared = run("compare", url, url, "--rounds", "10", "--round-requests", "1", "--operation", kind, "--ignore-eos")

    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0
    assert process.stdout is not None
    process.stdout.close()
    assert swept.returncode == 0, swept.stderr
    assert compared.returncode in (0, 1, 3), compared.stderr
    asked = [truth.path for truth in read_truths(tmp_path / "truth") if truth.path != "/v1/models"]
    assert len(asked) >= 4 + 2 * 10
    assert set(asked) == {path}
