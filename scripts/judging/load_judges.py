"""Load generators of others as judges: each runs through against our server, with its figures and without an error.

Their environments are those of `bench-accuracy`. Here only their counts are judged: that every request is answered,
that each figure is there, and that what they count with the model's own tokenizer is what our usage says.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench_tools import AIPERF, GUIDELLM, VLLM, VLLM_MAIN, VLLM_VERSION
from judging.environment import FOLDER, python_with, source_of, version_of
from judging.findings import Report
from judging.model_folder import demo_folder
from judging.servers import Server

NUM_REQUESTS = 24
CONCURRENCY = 2
PROMPT_TOKENS = 24
OUTPUT_TOKENS = 8
_TIMEOUT_S = 900


def guidellm(servers: Mapping[str, Server]) -> Report:
    """guidellm: two streams at once."""
    server = servers["chat"]
    python = python_with("bench-guidellm", GUIDELLM)
    report = Report("guidellm", version_of(python, "guidellm"))
    out = _folder("guidellm") / "report.json"
    command = [str(python.with_name("guidellm")), "run", "--backend"]
    command += [f"kind=openai_http,target={server.url},model={server.model}"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={demo_folder()}"]
    command += ["--profile", f"kind=concurrent,streams={CONCURRENCY}"]
    command += ["--constraint", f"kind=max_requests,count={NUM_REQUESTS}"]
    command += ["--data", f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}"]
    command += ["--output", f"kind=json,path={out}", "--disable-progress"]
    if not _runs(report, command, out.parent, HF_HUB_OFFLINE="1"):
        return report
    metrics = json.loads(out.read_text())["benchmarks"][0]["metrics"]
    totals = metrics["request_totals"]
    _equal(report, "requests answered", totals["successful"], NUM_REQUESTS)
    _equal(report, "errors", totals["errored"], 0)
    _equal(report, "cut short", totals["incomplete"], 0)
    for name in ("time_to_first_token_ms", "inter_token_latency_ms", "request_latency", "output_tokens_per_second"):
        _figure(report, name, metrics[name]["successful"]["mean"])
    counted = metrics["output_token_count"]["successful"]
    _equal(report, "output tokens of each", (counted["min"], counted["max"]), (OUTPUT_TOKENS, OUTPUT_TOKENS))
    return report


def aiperf(servers: Mapping[str, Server]) -> Report:
    """aiperf, on chat and on completions: it counts tokens itself and compares them with the usage that we say.

    What it counts of a chat is the text alone, so there the usage must say the template's tokens more, every time.
    """
    server = servers["chat"]
    python = python_with("bench-aiperf", AIPERF)
    report = Report("aiperf", version_of(python, "aiperf"))
    for kind in ("chat", "completions"):
        folder = _folder(f"aiperf-{kind}")
        command = [str(python.with_name("aiperf")), "profile", "-m", server.model, "--url", server.url]
        command += ["--endpoint-type", kind, "--streaming", "--tokenizer", str(demo_folder()), "--random-seed", "1"]
        command += ["--request-count", str(NUM_REQUESTS), "--concurrency", str(CONCURRENCY)]
        command += ["--isl", str(PROMPT_TOKENS), "--osl", str(OUTPUT_TOKENS), "--extra-inputs", "temperature:0"]
        command += ["--ui", "none", "--artifact-dir", str(folder)]
        # Its usage check forgives a tenth where it is not told otherwise.
        if not _runs(report, command, folder, kind, AIPERF_METRICS_USAGE_PCT_DIFF_THRESHOLD="0"):
            continue
        found = json.loads(next(folder.rglob("profile_export_aiperf.json")).read_text())
        _equal(report, f"{kind}: requests answered", found["request_count"]["avg"], NUM_REQUESTS)
        _equal(report, f"{kind}: errors", (found.get("error_request_count") or {"avg": 0})["avg"], 0)
        for name in ("time_to_first_token", "inter_token_latency", "request_latency", "output_token_throughput"):
            _figure(report, f"{kind}: {name}", found[name]["avg"])
        read = json.loads(next(folder.rglob("server_metrics_export.json")).read_text())["metrics"]
        report.add(f"{kind}: reads /metrics", "headrace_requests" in read, f"it found {list(read)[:5]}")
        _usage_check(report, server, kind, found, folder)
    return report


def _usage_check(report: Report, server: Server, kind: str, found: dict[str, Any], folder: Path) -> None:
    off = found["usage_completion_tokens_diff_pct"]["max"]
    _equal(report, f"{kind}: usage check, completion tokens off by", off, 0)
    if kind == "completions":
        _equal(report, "completions: usage check, requests off", found["usage_discrepancy_count"]["avg"], 0)
        return
    rows = map(json.loads, next(folder.rglob("profile_export.jsonl")).read_text().splitlines())
    metrics = [row["metrics"] for row in rows]
    more = {row["usage_prompt_tokens"]["value"] - row["input_sequence_length"]["value"] for row in metrics}
    _equal(report, "chat: usage check, prompt tokens beside the text", more, {_template_tokens(server)})


def _template_tokens(server: Server) -> int:
    """Gives the tokens that the chat template puts around one message."""
    body = json.dumps({"model": server.model, "messages": [{"role": "user", "content": ""}]}).encode()
    request = urllib.request.Request(server.url + "/tokenize", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return int(json.load(response)["count"])


def vllm_bench(servers: Mapping[str, Server]) -> Report:
    """`vllm bench serve`, from its source distribution."""
    server = servers["chat"]
    python = python_with("bench-vllm", VLLM)
    source = source_of("vllm", VLLM_VERSION, "vllm")
    report = Report("vllm-bench", VLLM_VERSION)
    folder = _folder("vllm-bench")
    command = [str(python), "-c", VLLM_MAIN, "--backend", "openai-chat", "--base-url", server.url]
    command += ["--endpoint", "/v1/chat/completions", "--model", server.model, "--tokenizer", str(demo_folder())]
    command += ["--dataset-name", "random", "--random-input-len", str(PROMPT_TOKENS)]
    command += ["--random-output-len", str(OUTPUT_TOKENS), "--num-prompts", str(NUM_REQUESTS), "--ignore-eos"]
    command += ["--max-concurrency", str(CONCURRENCY), "--percentile-metrics", "ttft,tpot,itl,e2el"]
    command += ["--disable-tqdm", "--save-result", "--result-dir", str(folder), "--result-filename", "report.json"]
    if not _runs(report, command, folder, PYTHONPATH=str(source.parent), HF_HUB_OFFLINE="1"):
        return report
    found = json.loads((folder / "report.json").read_text())
    _equal(report, "requests answered", found["completed"], NUM_REQUESTS)
    _equal(report, "errors", found["failed"], 0)
    _equal(report, "output tokens", found["total_output_tokens"], NUM_REQUESTS * OUTPUT_TOKENS)
    for name in ("mean_ttft_ms", "mean_tpot_ms", "mean_itl_ms", "mean_e2el_ms", "output_throughput"):
        _figure(report, name, found[name])
    return report


JUDGES = {"guidellm": guidellm, "aiperf": aiperf, "vllm-bench": vllm_bench}


def _folder(name: str) -> Path:
    folder = FOLDER / f"{name}-run"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _runs(report: Report, command: list[str], folder: Path, what: str = "", **env: str) -> bool:
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **env}, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )
    said = done.stdout + done.stderr
    (folder / "said.log").write_text(said)
    report.add(f"{what}: runs through" if what else "runs through", done.returncode == 0, said.strip()[-400:])
    return done.returncode == 0


def _equal(report: Report, check: str, got: object, wanted: object) -> None:
    report.add(check, got == wanted, f"{got}, not {wanted}")


def _figure(report: Report, name: str, value: float | None) -> None:
    report.add(name, value is not None and math.isfinite(value) and value > 0, f"is {value}")
