"""Client libraries, each with a script of tasks that it must do."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from judging.environment import npm_with, python_with, version_of
from judging.findings import Report
from judging.recorded import recordings_file
from judging.servers import Server

HERE = Path(__file__).with_name("clients")
_TIMEOUT_S = 900


@dataclass(frozen=True)
class Client:
    """A client library.

    Args:
        packages: what pip installs; empty for a project of npm.
        script: its tasks, in ``clients``; for npm a folder there with ``package-lock.json`` and ``client.mjs``.
        recorded: its tasks on recorded outputs, a script beside the other.
        shown: the package whose version the table shows.
        waived: a task and why its failure is none of ours.
        kind: which server it needs.
    """

    name: str
    packages: tuple[str, ...]
    script: str
    shown: str
    waived: Mapping[str, str] = field(default_factory=dict)
    kind: str = "chat"
    recorded: str | None = None


CLIENTS = (
    Client("openai", ("openai",), "openai_client.py", "openai", recorded="openai_recorded.py"),
    Client("openai-2", ("openai>=2,<3",), "openai_client.py", "openai", recorded="openai_recorded.py"),
    Client("anthropic", ("anthropic",), "anthropic_client.py", "anthropic", recorded="anthropic_recorded.py"),
    Client(
        "langchain",
        ("langchain-openai",),
        "langchain_client.py",
        "langchain-openai",
        recorded="langchain_recorded.py",
    ),
    Client("litellm", ("litellm",), "litellm_client.py", "litellm", recorded="litellm_recorded.py"),
    Client("instructor", ("instructor",), "instructor_client.py", "instructor", recorded="instructor_recorded.py"),
    Client(
        "pydantic-ai",
        ("pydantic-ai-slim[openai]",),
        "pydantic_ai_client.py",
        "pydantic-ai-slim",
        recorded="pydantic_ai_recorded.py",
    ),
    Client(
        "small-clients",
        ("huggingface-hub", "llama-index-llms-openai-like", "llm"),
        "small_clients.py",
        "llama-index-llms-openai-like",
        recorded="small_recorded.py",
    ),
    Client("cohere", ("cohere",), "cohere_client.py", "cohere", kind="vectors"),
    Client("aider", ("aider-chat",), "aider_client.py", "aider-chat", recorded="aider_recorded.py"),
    Client("npm-openai", (), "npm-openai", "openai", recorded="recorded.mjs"),
    Client("npm-ai-sdk", (), "npm-ai-sdk", "ai", recorded="recorded.mjs"),
)


def run(client: Client, servers: Mapping[str, Server]) -> Report:
    """Runs a client's tasks; each says how it went on a JSON line of its own."""
    return _run(client, client.name, client.script, servers[client.kind])


def run_recorded(client: Client, servers: Mapping[str, Server]) -> Report:
    """Runs a client's tasks on recorded outputs."""
    assert client.recorded is not None
    return _run(client, f"{client.name}-recorded", client.recorded, servers["recorded"])


def _run(client: Client, name: str, script: str, server: Server) -> Report:
    env = {**os.environ, "JUDGE_URL": server.url, "JUDGE_MODEL": server.model, "OPENAI_API_KEY": "none"}
    env["JUDGE_RECORDINGS"] = str(recordings_file())
    if client.packages:
        python = python_with(client.name, client.packages)
        version = version_of(python, client.shown)
        command = [str(python), str(HERE / script)]
        folder = HERE
    else:
        folder = npm_with(HERE / client.script, HERE / "npm")
        version = json.loads((folder / "node_modules" / client.shown / "package.json").read_text())["version"]
        command = [shutil.which("node") or "node", script if script.endswith(".mjs") else "client.mjs"]
    report = Report(name, version)
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    for line in done.stdout.splitlines():
        if line.startswith('{"check"'):
            said = json.loads(line)
            report.add(said["check"], said["ok"], said["why"], client.waived.get(said["check"]))
    if done.returncode != 0 or not report.findings:
        report.add("script", is_ok=False, why=done.stderr.strip()[-400:])
    return report
