"""Drivers of load generators for `bench-accuracy`: run one, read what it noted of every request and what CPU it took.

Each has an environment of its own under build/judges, made when it is first needed (guidellm and vLLM bring torch: some
gigabytes). wrk is taken from the path: `apt-get install wrk`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import psutil
from judging.environment import python_with, source_of

GUIDELLM = ("torch==2.13.0", "guidellm==0.8.1")
AIPERF = ("aiperf==0.13.0",)
VLLM_VERSION = "0.33.0"
# What its bench imports, of vLLM's own list; torch and transformers as guidellm brings them.
VLLM = (
    *GUIDELLM, "aiohttp", "anthropic", "blake3", "cachetools", "cbor2", "cloudpickle", "compressed-tensors", "depyf",
    "diskcache", "einops", "fastapi", "gguf", "ijson", "lark", "llguidance", "mcp", "mistral_common", "msgspec",
    "openai", "openai-harmony", "outlines_core", "pandas", "partial-json-parser", "pillow", "prometheus_client",
    "prometheus-fastapi-instrumentator", "py-cpuinfo", "pybase64", "python-json-logger", "pyzmq", "regex",
    "sentencepiece", "setproctitle", "six", "tiktoken", "watchfiles", "xgrammar",
)  # fmt: skip
VLLM_MAIN = (
    "import argparse; from vllm.benchmarks.serve import add_cli_args, main; "
    "parser = argparse.ArgumentParser(); add_cli_args(parser); main(parser.parse_args())"
)
PROMPT = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
WATCH_S = 0.2
Moment = tuple[float, float]
"""A moment of time.monotonic and the CPU seconds used up to it."""


@dataclass(frozen=True)
class Load:
    """What a tool shall send.

    Args:
        rate: requests a second, evenly spaced; None keeps one request under way.
        tokens: of each answer, one per chunk.
        processes: of headrace; None chooses.
    """

    rate: float | None
    tokens: int
    num_requests: int
    tokenizer: Path | None
    processes: int | None


@dataclass(frozen=True)
class Noted:
    """What a tool noted of one request, in seconds.

    Args:
        started: on the tool's own clock; it orders the requests.
        gaps: between chunks, or one mean of them, as the tool keeps them.
        waited: how long after ``started`` it was sent, where a tool counts from the schedule.
    """

    started: float
    ttft: float
    e2e: float
    gaps: tuple[float, ...]
    waited: float = 0.0

    @property
    def from_sending(self) -> Noted:
        """The same with latencies from the sending, as tools have them that keep no schedule."""
        return Noted(self.started + self.waited, self.ttft - self.waited, self.e2e - self.waited, self.gaps)


@dataclass
class Reading:
    """What a tool says.

    Args:
        requests: as they started; empty where it notes none.
        printed: (p50, p99) in seconds of `ttft`, `itl` and `e2e`, as far as it prints them.
        cpu: (moment, CPU seconds of all its processes so far), by time.monotonic.
        has_mean_itl: its gaps are one mean per request.
    """

    requests: list[Noted]
    printed: dict[str, tuple[float, float]] = field(default_factory=dict)
    cpu: list[Moment] = field(default_factory=list)
    has_mean_itl: bool = False
    note: str = ""


class Watch:
    """Reads the CPU time of a process and of all that it starts, until it ends."""

    def __init__(self, pid: int) -> None:
        self.readings: list[Moment] = []
        self._process = psutil.Process(pid)
        self._used_s: dict[int, float] = {}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def end(self) -> list[Moment]:
        """Stops; gives what was read."""
        self._is_over.set()
        self._thread.join()
        return self.readings

    def _run(self) -> None:
        while not self._is_over.wait(WATCH_S):
            try:
                processes = [self._process, *self._process.children(recursive=True)]
            except psutil.NoSuchProcess:
                continue
            for process in processes:
                try:
                    times = process.cpu_times()
                except psutil.Error:
                    continue  # it has just ended: what was read last stands
                self._used_s[process.pid] = times.user + times.system
            self.readings.append((time.monotonic(), sum(self._used_s.values())))


def run(command: list[str], folder: Path, *, env: dict[str, str] | None = None) -> tuple[str, list[Moment]]:
    """Runs a tool to its end; gives its output and the CPU time of its process tree as it went on."""
    out, errors = folder / "stdout.txt", folder / "stderr.txt"
    with out.open("w") as out_file, errors.open("w") as errors_file:
        process = subprocess.Popen(
            command, stdout=out_file, stderr=errors_file, cwd=folder, env={**os.environ, **(env or {})}
        )
        watch = Watch(process.pid)
        try:
            process.wait()
        finally:
            readings = watch.end()
    if process.returncode != 0:
        sys.exit(f"{command[0]} failed ({process.returncode}):\n{(out.read_text() + errors.read_text())[-3000:]}")
    return out.read_text(), readings


def headrace(url: str, load: Load, folder: Path) -> Reading:
    """`headrace bench serve`: its records, with latencies from the schedule as it reports them."""
    sample = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": load.tokens}
    (folder / "samples.jsonl").write_text((json.dumps(sample) + "\n") * 1000)
    command = [sys.executable, "-m", "headrace", "bench", "serve", "--server-url", url, "--model", "mock", "--json"]
    command += ["--test-file", str(folder / "samples.jsonl"), "--num-requests", str(load.num_requests)]
    command += ["--concurrency", "1"] if load.rate is None else ["--rate", str(load.rate), "--arrivals", "constant"]
    command += ["--output", str(folder / "report")]
    if load.processes is not None:
        command += ["--processes", str(load.processes)]
    said, cpu = run(command, folder)
    summary = json.loads(said)
    printed = {}
    for name in ("ttft", "itl", "e2e"):
        if name in summary["latency"]:
            by = {one["quantile"]: one["value_s"] for one in summary["latency"][name]["percentiles"]}
            printed[name] = (by[0.5], by[0.99])
    requests = []
    for line in (folder / "report" / "run.jsonl").read_text().splitlines():
        one = json.loads(line)
        if "index" in one and not one.get("error"):
            chunks = one.get("chunk_s", [])
            gaps = tuple(after - before for before, after in pairwise(chunks))
            start_s = one["scheduled_s"]
            waited_s = one["sent_s"] - start_s
            requests.append(Noted(start_s, one["first_s"] - start_s, one["ended_s"] - start_s, gaps, waited_s))
    overhead = summary["overhead"]
    note = (
        f"{overhead['processes']} process, {100 * overhead['busiest_ratio']:.0f} % of a core; loop late by "
        f"{1e3 * overhead['loop_lag']['p50_s']:.2f} ms (p50), {1e3 * overhead['loop_lag']['p99_s']:.2f} ms (p99)"
    )
    return Reading(requests, printed, cpu, note=note)


def guidellm(url: str, load: Load, folder: Path) -> Reading:
    """guidellm; it keeps one mean gap per request."""
    profile = "kind=synchronous" if load.rate is None else f"kind=constant,rate={load.rate:g}"
    python = python_with("bench-guidellm", GUIDELLM)
    command = [str(python.with_name("guidellm")), "run", "--backend", f"kind=openai_http,target={url},model=mock"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={load.tokenizer}", "--profile", profile]
    command += ["--constraint", f"kind=max_requests,count={load.num_requests}"]
    command += ["--data", f"kind=synthetic_text,prompt_tokens=16,output_tokens={load.tokens}"]
    command += ["--output", f"kind=json,path={folder / 'guidellm.json'}", "--disable-progress"]
    _, cpu = run(command, folder, env={"HF_HUB_OFFLINE": "1"})
    found = json.loads((folder / "guidellm.json").read_text())["benchmarks"][0]
    names = {"ttft": ("time_to_first_token_ms", 1e-3), "itl": ("inter_token_latency_ms", 1e-3)}
    names["e2e"] = ("request_latency", 1.0)
    printed = {}
    for name, (theirs, unit) in names.items():
        values = found["metrics"][theirs]["successful"]["percentiles"]
        printed[name] = (values["p50"] * unit, values["p99"] * unit)
    requests = [
        Noted(
            one["request_start_time"],
            one["time_to_first_token_ms"] / 1e3,
            one["request_latency"],
            (one["inter_token_latency_ms"] / 1e3,),
        )
        for one in found["requests"]["successful"]
    ]
    return Reading(requests, printed, cpu, has_mean_itl=True)


def aiperf(url: str, load: Load, folder: Path) -> Reading:
    """aiperf; it keeps one mean gap per request."""
    python = python_with("bench-aiperf", AIPERF)
    command = [str(python.with_name("aiperf")), "profile", "-m", "mock", "--url", url, "--endpoint-type", "chat"]
    command += ["--streaming", "--tokenizer", str(load.tokenizer), "--request-count", str(load.num_requests)]
    if load.rate is None:
        command += ["--concurrency", "1"]
    else:
        command += ["--request-rate", f"{load.rate:g}", "--request-rate-mode", "constant"]
    command += ["--isl", "16", "--osl", str(load.tokens), "--ui", "none", "--artifact-dir", str(folder / "aiperf")]
    # Its services wait 30 s for each other, which a busy machine does not keep.
    _, cpu = run(command, folder, env={"AIPERF_SERVICE_REGISTRATION_TIMEOUT": "120"})
    found = json.loads(next((folder / "aiperf").rglob("profile_export_aiperf.json")).read_text())
    names = {"ttft": "time_to_first_token", "itl": "inter_token_latency", "e2e": "request_latency"}
    printed = {name: (found[theirs]["p50"] / 1e3, found[theirs]["p99"] / 1e3) for name, theirs in names.items()}
    requests = []
    for line in next((folder / "aiperf").rglob("profile_export.jsonl")).read_text().splitlines():
        one = json.loads(line)
        ttft, itl, e2e = (one["metrics"][names[name]]["value"] / 1e3 for name in ("ttft", "itl", "e2e"))
        requests.append(Noted(one["metadata"]["request_start_ns"] / 1e9, ttft, e2e, (itl,)))
    return Reading(requests, printed, cpu, has_mean_itl=True)


def vllm(url: str, load: Load, folder: Path) -> Reading:
    """`vllm bench serve` from its source distribution."""
    source = source_of("vllm", VLLM_VERSION, "vllm")
    command = [str(python_with("bench-vllm", VLLM)), "-c", VLLM_MAIN]
    command += ["--backend", "openai-chat", "--base-url", url, "--endpoint", "/v1/chat/completions", "--model", "mock"]
    command += ["--tokenizer", str(load.tokenizer), "--dataset-name", "random", "--random-input-len", "16"]
    command += ["--random-output-len", str(load.tokens), "--num-prompts", str(load.num_requests)]
    command += ["--request-rate", "inf", "--max-concurrency", "1"] if load.rate is None else []
    command += [] if load.rate is None else ["--request-rate", f"{load.rate:g}", "--burstiness", "1000000"]
    command += ["--percentile-metrics", "ttft,itl,e2el", "--metric-percentiles", "50,99", "--disable-tqdm"]
    command += ["--save-result", "--save-detailed", "--result-dir", str(folder), "--result-filename", "vllm.json"]
    _, cpu = run(command, folder, env={"PYTHONPATH": str(source.parent), "HF_HUB_OFFLINE": "1"})
    found = json.loads((folder / "vllm.json").read_text())
    names = {"ttft": "ttft", "itl": "itl", "e2e": "e2el"}
    printed = {
        name: (found[f"p50_{theirs}_ms"] / 1e3, found[f"p99_{theirs}_ms"] / 1e3) for name, theirs in names.items()
    }
    # It counts the whole time of a request as its first token and all gaps after.
    requests = [
        Noted(start, ttft, ttft + sum(gaps), tuple(gaps))
        for start, ttft, gaps, error in zip(
            found["start_times"], found["ttfts"], found["itls"], found["errors"], strict=True
        )
        if not error
    ]
    return Reading(requests, printed, cpu, note="burstiness 1,000,000 stands for even spacing")


def wrk(url: str, load: Load, folder: Path) -> Reading:
    """wrk: whole answers alone, in a closed loop with as many connections as the load would have under way."""
    body = json.dumps({"messages": [{"role": "user", "content": PROMPT}], "max_tokens": load.tokens})
    (folder / "wrk.lua").write_text(
        f"wrk.method = 'POST'\nwrk.body = [[{body}]]\nwrk.headers['Content-Type'] = 'application/json'\n"
    )
    answer_s = 0.06 + 0.01 * load.tokens
    connections = max(1, round((load.rate or 1 / answer_s) * answer_s))
    seconds = max(2, round(load.num_requests / (load.rate or 1 / answer_s)))
    if shutil.which("wrk") is None:
        sys.exit("wrk is not installed: apt-get install wrk")
    command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "--latency"]
    said, cpu = run([*command, "-s", str(folder / "wrk.lua"), f"{url}/v1/chat/completions"], folder)
    units = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
    found = {
        share: float(value) * units[unit] for share, value, unit in re.findall(r"(50|99)%\s+([\d.]+)(us|ms|s)\b", said)
    }
    printed = {"e2e": (found["50"], found["99"])}
    return Reading([], printed, cpu, note=f"closed loop, {connections} connections, whole answers; its own percentiles")


DRIVERS: dict[str, Callable[[str, Load, Path], Reading]] = {
    "headrace": headrace,
    "guidellm": guidellm,
    "aiperf": aiperf,
    "vllm": vllm,
    "wrk": wrk,
}
