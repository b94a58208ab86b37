"""Drivers of load generators for `bench-accuracy`: run one, read its figures and what CPU it took.

Each has an environment of its own under build/judges, made when it is first needed (guidellm and vLLM bring torch: some
gigabytes). wrk is taken from the path: `apt-get install wrk`.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

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


@dataclass
class Reading:
    """What a tool says.

    Args:
        percentiles: (p50, p99) in seconds of `ttft`, `itl` and `e2e`, as far as it reports them.
        has_mean_itl: its ITL is one mean per request, not each gap.
        cpu_s: of all its processes, from start to end.
    """

    percentiles: dict[str, tuple[float, float]]
    cpu_s: float = 0.0
    has_mean_itl: bool = False
    note: str = ""


def percentile(values: Sequence[float], quantile: float) -> float:
    """Gives the nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(quantile * len(ordered)))]


def run(command: list[str], folder: Path, *, env: dict[str, str] | None = None) -> tuple[str, float]:
    """Runs a tool to its end; gives its output and the CPU seconds of its whole process tree."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=folder, env={**os.environ, **(env or {})}
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode != 0:
        sys.exit(f"{command[0]} failed ({done.returncode}):\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def headrace(url: str, load: Load, folder: Path, high: float = 0.99) -> Reading:
    """`headrace bench serve`; `high` takes the place of p99."""
    sample = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": load.tokens}
    (folder / "samples.jsonl").write_text((json.dumps(sample) + "\n") * 1000)
    command = [sys.executable, "-m", "headrace", "bench", "serve", "--server-url", url, "--model", "mock", "--json"]
    command += ["--test-file", str(folder / "samples.jsonl"), "--num-requests", str(load.num_requests)]
    command += ["--concurrency", "1"] if load.rate is None else ["--rate", str(load.rate), "--arrivals", "constant"]
    if load.processes is not None:
        command += ["--processes", str(load.processes)]
    said, cpu_s = run(command, folder)
    summary = json.loads(said)
    percentiles = {}
    for name in ("ttft", "itl", "e2e"):
        if name in summary["latency"]:
            by = {one["quantile"]: one["value_s"] for one in summary["latency"][name]["percentiles"]}
            percentiles[name] = (by[0.5], by[high])
    overhead = summary["overhead"]
    note = (
        f"{overhead['processes']} process, {100 * overhead['busiest_ratio']:.0f} % of a core; loop late by "
        f"{1e3 * overhead['loop_lag']['p50_s']:.2f} ms (p50), {1e3 * overhead['loop_lag']['p99_s']:.2f} ms (p99)"
    )
    return Reading(percentiles, cpu_s, note=note)


def guidellm(url: str, load: Load, folder: Path) -> Reading:
    """guidellm; its ITL is one mean per request."""
    profile = "kind=synchronous" if load.rate is None else f"kind=constant,rate={load.rate:g}"
    python = python_with("bench-guidellm", GUIDELLM)
    command = [str(python.with_name("guidellm")), "run", "--backend", f"kind=openai_http,target={url},model=mock"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={load.tokenizer}", "--profile", profile]
    command += ["--constraint", f"kind=max_requests,count={load.num_requests}"]
    command += ["--data", f"kind=synthetic_text,prompt_tokens=16,output_tokens={load.tokens}"]
    command += ["--output", f"kind=json,path={folder / 'guidellm.json'}", "--disable-progress"]
    _, cpu_s = run(command, folder, env={"HF_HUB_OFFLINE": "1"})
    metrics = json.loads((folder / "guidellm.json").read_text())["benchmarks"][0]["metrics"]
    names = {"ttft": ("time_to_first_token_ms", 1e-3), "itl": ("inter_token_latency_ms", 1e-3)}
    names["e2e"] = ("request_latency", 1.0)
    percentiles = {}
    for name, (theirs, unit) in names.items():
        found = metrics[theirs]["successful"]["percentiles"]
        percentiles[name] = (found["p50"] * unit, found["p99"] * unit)
    return Reading(percentiles, cpu_s, has_mean_itl=True)


def aiperf(url: str, load: Load, folder: Path) -> Reading:
    """aiperf; its ITL is one mean per request."""
    python = python_with("bench-aiperf", AIPERF)
    command = [str(python.with_name("aiperf")), "profile", "-m", "mock", "--url", url, "--endpoint-type", "chat"]
    command += ["--streaming", "--tokenizer", str(load.tokenizer), "--request-count", str(load.num_requests)]
    if load.rate is None:
        command += ["--concurrency", "1"]
    else:
        command += ["--request-rate", f"{load.rate:g}", "--request-rate-mode", "constant"]
    command += ["--isl", "16", "--osl", str(load.tokens), "--ui", "none", "--artifact-dir", str(folder / "aiperf")]
    _, cpu_s = run(command, folder)
    found = json.loads(next((folder / "aiperf").rglob("profile_export_aiperf.json")).read_text())
    names = {"ttft": "time_to_first_token", "itl": "inter_token_latency", "e2e": "request_latency"}
    percentiles = {name: (found[theirs]["p50"] / 1e3, found[theirs]["p99"] / 1e3) for name, theirs in names.items()}
    return Reading(percentiles, cpu_s, has_mean_itl=True)


def vllm(url: str, load: Load, folder: Path) -> Reading:
    """`vllm bench serve` from its source distribution; its ITL is each gap."""
    source = source_of("vllm", VLLM_VERSION, "vllm")
    command = [str(python_with("bench-vllm", VLLM)), "-c", VLLM_MAIN]
    command += ["--backend", "openai-chat", "--base-url", url, "--endpoint", "/v1/chat/completions", "--model", "mock"]
    command += ["--tokenizer", str(load.tokenizer), "--dataset-name", "random", "--random-input-len", "16"]
    command += ["--random-output-len", str(load.tokens), "--num-prompts", str(load.num_requests)]
    command += ["--request-rate", "inf", "--max-concurrency", "1"] if load.rate is None else []
    command += [] if load.rate is None else ["--request-rate", f"{load.rate:g}", "--burstiness", "1000000"]
    command += ["--percentile-metrics", "ttft,itl,e2el", "--metric-percentiles", "50,99", "--disable-tqdm"]
    command += ["--save-result", "--result-dir", str(folder), "--result-filename", "vllm.json"]
    _, cpu_s = run(command, folder, env={"PYTHONPATH": str(source.parent), "HF_HUB_OFFLINE": "1"})
    found = json.loads((folder / "vllm.json").read_text())
    names = {"ttft": "ttft", "itl": "itl", "e2e": "e2el"}
    percentiles = {
        name: (found[f"p50_{theirs}_ms"] / 1e3, found[f"p99_{theirs}_ms"] / 1e3) for name, theirs in names.items()
    }
    return Reading(percentiles, cpu_s, note="burstiness 1,000,000 stands for even spacing")


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
    said, cpu_s = run([*command, "-s", str(folder / "wrk.lua"), f"{url}/v1/chat/completions"], folder)
    units = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
    found = {
        share: float(value) * units[unit] for share, value, unit in re.findall(r"(50|99)%\s+([\d.]+)(us|ms|s)\b", said)
    }
    return Reading(
        {"e2e": (found["50"], found["99"])}, cpu_s, note=f"closed loop, {connections} connections, whole answers"
    )


DRIVERS: dict[str, Callable[[str, Load, Path], Reading]] = {
    "headrace": headrace,
    "guidellm": guidellm,
    "aiperf": aiperf,
    "vllm": vllm,
    "wrk": wrk,
}
