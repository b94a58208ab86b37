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
from judging.servers import Server

HERE = Path(__file__).with_name("clients")
_TIMEOUT_S = 900


@dataclass(frozen=True)
class Client:
    """A client library.

    Args:
        packages: what pip installs; empty for a project of npm.
        script: its tasks, in ``clients``; for npm a folder there with ``package-lock.json`` and ``client.mjs``.
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


CLIENTS = (
    Client("openai", ("openai",), "openai_client.py", "openai"),
    Client("openai-2", ("openai>=2,<3",), "openai_client.py", "openai"),
    Client("anthropic", ("anthropic",), "anthropic_client.py", "anthropic"),
    Client("langchain", ("langchain-openai",), "langchain_client.py", "langchain-openai"),
    Client("litellm", ("litellm",), "litellm_client.py", "litellm"),
    Client("instructor", ("instructor",), "instructor_client.py", "instructor"),
    Client("pydantic-ai", ("pydantic-ai-slim[openai]",), "pydantic_ai_client.py", "pydantic-ai-slim"),
    Client(
        "small-clients",
        ("huggingface-hub", "llama-index-llms-openai-like", "llm"),
        "small_clients.py",
        "llama-index-llms-openai-like",
    ),
    Client("cohere", ("cohere",), "cohere_client.py", "cohere", kind="vectors"),
    Client("aider", ("aider-chat",), "aider_client.py", "aider-chat"),
    Client("npm-openai", (), "npm-openai", "openai"),
    Client("npm-ai-sdk", (), "npm-ai-sdk", "ai"),
)


def run(client: Client, servers: Mapping[str, Server]) -> Report:
    """Runs a client's tasks; each says how it went on a JSON line of its own."""
    server = servers[client.kind]
    if client.packages:
        python = python_with(client.name, client.packages)
        version = version_of(python, client.shown)
        command = [str(python), str(HERE / client.script)]
        folder = HERE
    else:
        folder = npm_with(HERE / client.script)
        version = json.loads((folder / "node_modules" / client.shown / "package.json").read_text())["version"]
        command = [shutil.which("node") or "node", "client.mjs"]
    report = Report(client.name, version)
    env = {**os.environ, "JUDGE_URL": server.url, "JUDGE_MODEL": server.model, "OPENAI_API_KEY": "none"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    for line in done.stdout.splitlines():
        if line.startswith('{"check"'):
            said = json.loads(line)
            report.add(said["check"], said["ok"], said["why"], client.waived.get(said["check"]))
    if done.returncode != 0 or not report.findings:
        report.add("script", is_ok=False, why=done.stderr.strip()[-400:])
    return report
