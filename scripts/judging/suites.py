"""Other servers' own test suites, run against ours: where they come from, which files, and what is foreign in them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from judging.environment import FOLDER, python_with, source_of
from judging.findings import Report
from judging.foreign import Entry, read
from judging.model_folder import demo_folder
from judging.servers import Server

HERE = Path(__file__).parent
# A test may ask for as many tokens as the context holds, on a machine that does something else beside.
_TEST_TIMEOUT_S = 600
_TIMEOUT_S = 7200


@dataclass(frozen=True)
class Suite:
    """A suite.

    Args:
        source: package, version and the folder of its source distribution that holds the tests.
        files: test files by the kind of server that they need.
        chat: which server its ``chat`` tests need.
    """

    name: str
    source: tuple[str, str, str]
    packages: tuple[str, ...]
    files: dict[str, tuple[str, ...]]
    chat: str = "chat"

    def server_of(self, kind: str) -> str:
        return self.chat if kind == "chat" else kind

    @property
    def lists(self) -> Path:
        return HERE / self.name.replace(".", "_") / "foreign.txt"


LLAMA_CPP = Suite(
    "llama.cpp",
    ("llama-cpp-python", "0.3.36", "vendor/llama.cpp/tools/server/tests"),
    ("pytest~=8.3.3", "pytest-timeout", "filelock", "numpy", "openai~=2.14.0", "requests", "wget", "aiohttp"),
    {
        "alone": ("unit/test_basic.py",),
        "chat": (
            "unit/test_chat_completion.py",
            "unit/test_compat_anthropic.py",
            "unit/test_compat_oai_responses.py",
            "unit/test_completion.py",
            "unit/test_ignore_eos.py",
            "unit/test_metrics.py",
            "unit/test_security.py",
            "unit/test_template.py",
            "unit/test_tokenize.py",
            "unit/test_tool_call.py",
        ),
        "vectors": ("unit/test_embedding.py", "unit/test_rerank.py"),
    },
)
VLLM = Suite(
    "vllm",
    ("vllm", "0.33.0", "tests"),
    (
        "pytest", "pytest-asyncio", "pytest-timeout", "openai", "anthropic", "requests", "regex", "jsonschema",
        "numpy", "torch==2.13.0", "transformers", "httpx", "prometheus-client", "fastapi", "pybase64", "jinja2",
    ),
    {
        "chat": (
            "tests/entrypoints/anthropic/test_messages.py",
            "tests/entrypoints/openai/chat_completion/test_batched_chat_completions.py",
            "tests/entrypoints/openai/chat_completion/test_chat.py",
            "tests/entrypoints/openai/chat_completion/test_chat_completion.py",
            "tests/entrypoints/openai/chat_completion/test_chat_echo.py",
            "tests/entrypoints/openai/chat_completion/test_chat_logit_bias_validation.py",
            "tests/entrypoints/openai/chat_completion/test_completion_with_function_calling.py",
            "tests/entrypoints/openai/chat_completion/test_enable_force_include_usage.py",
            "tests/entrypoints/openai/chat_completion/test_include_reasoning.py",
            "tests/entrypoints/openai/chat_completion/test_logprob_token_ids.py",
            "tests/entrypoints/openai/chat_completion/test_root_path.py",
            "tests/entrypoints/openai/completion/test_completion.py",
            "tests/entrypoints/openai/completion/test_prompt_validation.py",
            "tests/entrypoints/openai/completion/test_token_in_token_out.py",
            "tests/entrypoints/openai/models/test_models.py",
            "tests/entrypoints/openai/test_chunked_prompt.py",
            "tests/entrypoints/openai/test_return_token_ids.py",
            "tests/entrypoints/openai/test_return_tokens_as_ids.py",
            "tests/entrypoints/serve/instrumentator/test_basic.py",
            "tests/entrypoints/serve/instrumentator/test_metrics.py",
            "tests/entrypoints/serve/tokenize/test_tokenization.py",
            "tests/tool_use/test_chat_completions.py",
            "tests/tool_use/test_parallel_tool_calls.py",
            "tests/tool_use/test_tool_calls.py",
        ),
        "vectors": (
            "tests/entrypoints/pooling/embed/test_online.py",
        ),
        "short-vectors": ("tests/entrypoints/pooling/scoring/test_bi_encoder_online.py",),
    },
    chat="long-chat",
)  # fmt: skip
SUITES = (LLAMA_CPP, VLLM)


def run(suite: Suite, servers: dict[str, Server]) -> Report:
    """Runs a suite against the servers; a listed test that fails is waived, an entry whose tests pass is a failure."""
    package, version, part = suite.source
    report = Report(suite.name, version)
    python = python_with(suite.name, suite.packages)
    tests = source_of(package, version, part).resolve()  # or pytest names files from another root
    entries = read(suite.lists)
    if suite is VLLM:  # its files are a package called tests
        home = FOLDER.resolve() / "sources" / "vllm-home"
        home.mkdir(exist_ok=True)
        if not (home / "tests").exists():
            (home / "tests").symlink_to(tests, target_is_directory=True)
        tests = home
    found: list[dict[str, str]] = []
    for kind, files in suite.files.items():
        whole = {entry.test for entry in entries if entry.is_file}
        found += _pytest(
            suite, python, tests, [file for file in files if file not in whole], kind, servers[suite.server_of(kind)]
        )
    for item in found:
        entry = next((entry for entry in entries if entry.covers(item["node"])), None)
        is_ok = item["outcome"] == "passed"
        report.add(item["node"], is_ok, item["why"], None if entry is None else entry.reason)
    for entry in entries:
        told = _stale(entry, found)
        if told:
            report.add(f"list: {entry.test}", is_ok=False, why=told)
    return report


def _stale(entry: Entry, found: list[dict[str, str]]) -> str:
    if not entry.is_run:
        return ""
    outcomes = {item["outcome"] for item in found if entry.covers(item["node"])}
    if not outcomes:
        return "no such test: take it off the list"
    # What a model says may also come out right by chance; the rest passes for a reason.
    is_chance = entry.reason.startswith(("text ", "model "))
    return "passes now: take it off the list" if outcomes == {"passed"} and not is_chance else ""


def _pytest(
    suite: Suite, python: Path, tests: Path, files: list[str], kind: str, server: Server
) -> list[dict[str, str]]:
    out = FOLDER / f"{suite.name}-found.jsonl"
    out.unlink(missing_ok=True)
    plugins = FOLDER / f"{suite.name}-plugins"
    shutil.rmtree(plugins, ignore_errors=True)
    plugins.mkdir()
    for file in (HERE / "foreign.py", *suite.lists.parent.glob("*.py")):
        shutil.copy(file, plugins / ("judge_" + file.name))
    names = [file.stem for file in sorted(plugins.glob("*.py"))]
    command = [
        str(python),
        "-m",
        "pytest",
        "-q",
        "--tb=short",
        "-p",
        "no:cacheprovider",
        "--timeout",
        f"{_TEST_TIMEOUT_S}",
    ]
    command += ["-c", os.devnull, "--rootdir", str(tests), "--continue-on-collection-errors", "-m", "not slow"]
    if suite is VLLM:
        command += ["-o", "asyncio_mode=auto", "--noconftest", "--import-mode=prepend"]
    env = {
        **os.environ,
        "PYTHONPATH": str(plugins),
        "FOREIGN_FOUND": str(out),
        "FOREIGN_LIST": str(suite.lists),
        "DEBUG_EXTERNAL": "1",
        "PORT": str(server.port),
        "JUDGE_URL": server.url,
        "JUDGE_TOKENIZER": str(server.model_path if "vectors" in kind else demo_folder()),
        "HF_HUB_OFFLINE": "1",
        "OPENAI_API_KEY": "none",
    }
    done = subprocess.run(
        [*command, *(f"-p{name}" for name in names), *files],
        cwd=tests, env=env, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False,
    )  # fmt: skip
    (FOLDER / f"{suite.name}-{kind}.log").write_text(done.stdout + done.stderr)
    lines = out.read_text().splitlines() if out.exists() else []
    found = [json.loads(line) for line in lines]
    if done.returncode not in (0, 1) or not found:
        found.append({"node": "pytest", "outcome": "failed", "why": (done.stdout + done.stderr).strip()[-400:]})
    return found
