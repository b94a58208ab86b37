"""Two real models in one real server: found by name, sharing the machine, each with a fate of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.testing.tiny import write_tiny_llama
from headrace.testing.tiny_bert import WORDS, tiny_bert_vector, write_tiny_bert

from .conftest import PATIENCE_S, Server, serve

pytestmark = pytest.mark.timeout(180)
TEXT = "the sea is blue"
IDS = [2, *(WORDS.index(word) for word in TEXT.split()), 3]


def write_config(folder: Path, **more: Any) -> Path:
    """Writes both models and the settings that serve them."""
    write_tiny_llama(folder / "llama", is_tied=False, context_tokens=2048)
    write_tiny_bert(folder / "bert")
    models = {
        "tests/talk": {
            "inference_engine": {"model_path": str(folder / "llama"), "served_name": "talk", "thread_share": 2},
            "kernel_config": {"max_sequence_length": 512},
        },
        "tests/vectors": {
            "inference_engine": {"model_path": str(folder / "bert")},
            "server": {"max_concurrent_requests": 4},
        },
    }
    file = folder / "headrace.yaml"
    file.write_text(json.dumps({"models": models, **more}))  # JSON is YAML
    return file


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    file = write_config(tmp_path_factory.mktemp("models"))
    with serve(None, tmp_path_factory.mktemp("both"), "--config", str(file)) as running:
        yield running


def children(server: Server) -> dict[str, Any]:
    command = [sys.executable, "-m", "headrace", "status", "--json"]
    output = subprocess.run(command, env=server.env, capture_output=True, timeout=PATIENCE_S, check=False).stdout
    (status,) = json.loads(output)["servers"]
    return {child["name"]: child for child in status["children"]}


def talk(server: Server, model: str = "tests/talk") -> str:
    answer = server.client.completions.create(model=model, prompt="hi", max_tokens=12, temperature=0)
    return str(answer.choices[0].text)


def test_both_answer_under_their_names(both: Server) -> None:
    vector = both.client.embeddings.create(model="tests/vectors", input=TEXT).data[0].embedding

    assert np.array(vector) @ tiny_bert_vector(IDS) > 0.9999
    assert talk(both) == talk(both, "talk") != ""


def test_they_are_listed_with_kind_and_state(both: Server) -> None:
    cards = {card["id"]: card for card in both.get("/v1/models").json()["data"]}

    assert {name: (card["kind"], card["state"]) for name, card in cards.items()} == {
        "tests/talk": ("generate", "ready"),
        "talk": ("generate", "ready"),
        "tests/vectors": ("embed", "ready"),
    }
    assert cards["talk"]["max_model_len"] == 512
    assert [child["model"] for child in children(both).values() if child["role"] == "worker"] == [
        "tests/talk",
        "tests/vectors",
    ]


def test_an_unknown_name_is_told_the_known_ones(both: Server) -> None:
    answer = both.post("/v1/completions", {"model": "gone", "prompt": "hi"})

    assert answer.status == 404
    assert "tests/talk (generates text), tests/vectors (makes vectors)" in answer.json()["error"]["message"]


def test_a_killed_worker_takes_its_own_model_only(both: Server) -> None:
    before = children(both)
    expected = talk(both)

    os.kill(before["worker-1"]["pid"], signal.SIGKILL)
    assert talk(both) == expected
    deadline = time.monotonic() + PATIENCE_S
    while both.get("/health?model=tests/vectors").status != 200 or children(both)["worker-1"]["restarts"] == 0:
        assert time.monotonic() < deadline
        assert both.get("/health").status == 200  # the other one serves
        time.sleep(0.1)
    vector = both.client.embeddings.create(model="tests/vectors", input=TEXT).data[0].embedding

    after = children(both)
    assert np.array(vector) @ tiny_bert_vector(IDS) > 0.9999
    assert after["worker-0"]["pid"] == before["worker-0"]["pid"]
    assert after["front-0"]["pid"] == before["front-0"]["pid"]


def test_settings_are_shown_and_checked_with_the_parts_of_the_machine(tmp_path: Path) -> None:
    file = write_config(tmp_path)

    def run(*arguments: str) -> Any:
        command = [sys.executable, "-m", "headrace", *arguments, "--config", str(file), "--json"]
        done = subprocess.run(command, capture_output=True, timeout=PATIENCE_S, check=arguments[0] == "config")
        return json.loads(done.stdout)

    shown, checked = run("config", "show"), run("config", "check")
    examined = run("doctor")

    own = shown["models"]["tests/talk"]
    assert own["inference_engine.thread_share"] == {"value": 2.0, "origin": f"{file}:1"}
    assert set(own) == {
        "inference_engine.model_path",
        "inference_engine.served_name",
        "inference_engine.thread_share",
        "kernel_config.max_sequence_length",
    }
    assert [model["names"] for model in checked["models"]] == [["tests/talk", "talk"], ["tests/vectors"]]
    assert all(model["memory_bytes"] > 64 * 2**20 for model in checked["models"])
    assert checked["is_model_checked"]
    assert [model["names"] for model in examined["models"]] == [["tests/talk", "talk"], ["tests/vectors"]]
    assert [model["thread_share"] for model in examined["models"]] == [2, 1]


def test_under_mixed_load_each_has_its_share_and_answers_as_alone() -> None:
    script = Path(__file__).parents[2] / "scripts" / "two-models"
    command = [sys.executable, str(script), "--tiny", "--minutes", "0.1", "--alone-seconds", "1", "--shares", "2:1"]

    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)

    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "kept: answers, shares, memory, processes" in done.stdout
