"""The server of recorded outputs on which clients are judged: each model says its recording, read as it is meant."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "judging" / "recorded_server.py"
# What each form is known by, under the names of the templates that judges use.
SHOWN = {
    "Qwen-Qwen3-0.6B.jinja": "<tool_call> </think>",
    "meta-llama-Llama-3.1-8B-Instruct.jinja": "<|python_tag|>",
    "mistralai-Ministral-3-14B-Reasoning-2512.jinja": "[TOOL_CALLS] [/THINK]",
    "google-gemma-4-31B-it.jinja": "<|tool_call> <channel|>",
    "microsoft-Phi-3.5-mini-instruct.jinja": "",
}
TURNS = "{% for message in messages %}{{ message.content }}{% endfor %}{{ tools }}"


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Where the server is, and what it plays."""
    templates = tmp_path_factory.mktemp("templates")
    for name, shown in SHOWN.items():
        (templates / name).write_text(f"{TURNS}{{# {shown} #}}")
    models = tmp_path_factory.mktemp("m")
    command = [sys.executable, str(SCRIPT), str(models), str(templates)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield json.loads(process.stdout.readline())
    finally:
        process.stdin.close()
        code = process.wait(60)
        process.stdout.close()
    assert code == 0


def test_every_recording_is_read_as_it_is_meant(played: dict[str, Any]) -> None:
    read, meant = {}, {}
    for recording in played["recordings"]:
        body = {"model": recording["model"], "messages": [{"role": "user", "content": "Hi"}]}
        body |= {"tools": recording["tools"], "max_tokens": 4000}
        request = urllib.request.Request(
            played["url"] + "/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            message = json.load(response)["choices"][0]["message"]
        calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls") or []]
        thought = message.get("reasoning_content") or ""
        read[recording["model"]] = (message["content"] or "", thought, calls)
        meant[recording["model"]] = (recording["text"], recording["thought"], recording["calls"])

    assert read == meant


def test_every_form_that_has_a_template_is_played(played: dict[str, Any]) -> None:
    forms = {recording["form"] for recording in played["recordings"]}

    assert forms == {"hermes", "llama3", "mistral", "gemma4", "generic"}
