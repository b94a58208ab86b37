"""What a run sends, and how its tokens are counted."""

from __future__ import annotations

import http.server
import itertools
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.base.errors import ConfigError
from headrace.bench.counting import TokenCounter
from headrace.bench.probe import find_model
from headrace.bench.prompts import PromptMaker
from headrace.bench.records import Operation
from headrace.bench.spread import Spread
from headrace.bench.workload import FileWorkload, MadeUpWorkload
from headrace.testing.tiny_vocabulary import tokenizer_config, tokenizer_json

CHAT = json.dumps({"messages": [{"role": "user", "content": "a"}]})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer_json(320)))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(64)))
    return tmp_path


def made_up(operation: Operation = "chat", **values: object) -> MadeUpWorkload:
    known: dict[str, object] = {"prompts": PromptMaker(), "seed": 3}
    return MadeUpWorkload(operation, Spread("uniform", 20, 60), Spread("constant", 9), **{**known, **values})  # type: ignore[arg-type]


def test_a_file_is_sent_once_or_over_and_over_and_its_bad_lines_are_told_once(tmp_path: Path) -> None:
    (tmp_path / "f.jsonl").write_text(f"{CHAT}\nnonsense\n{CHAT}\n")
    told: list[int] = []
    once = FileWorkload(tmp_path / "f.jsonl", is_repeated=False)
    again = FileWorkload(tmp_path / "f.jsonl", is_repeated=True, tell_bad=lambda line, _: told.append(line))

    assert [sample.line for sample in once.open()] == [1, 3]
    assert [sample.line for sample in itertools.islice(again.open(), 5)] == [1, 3, 1, 3, 1]
    assert (again.rounds, told) == (3, [2])


def test_a_file_without_a_request_is_refused_and_not_read_for_ever(tmp_path: Path) -> None:
    (tmp_path / "f.jsonl").write_text("nonsense\n")

    with pytest.raises(ConfigError, match="holds no request"):
        next(FileWorkload(tmp_path / "f.jsonl", is_repeated=True).open())


def test_made_up_prompts_repeat_with_their_seed_and_differ_among_themselves() -> None:
    first, again = (list(itertools.islice(made_up().open(), 20)) for _ in range(2))

    assert first == again
    assert len({json.dumps(sample.body) for sample in first}) == 20
    assert all(sample.body["max_tokens"] == 9 for sample in first)


def test_made_up_prompts_have_the_wanted_lengths_by_the_tokenizer_and_begin_alike(folder: Path) -> None:
    counter = TokenCounter(folder)
    workload = made_up(prompts=PromptMaker(None, counter.tokenizer), prefix_tokens=10)

    samples = list(itertools.islice(workload.open(), 10))

    counts = [counter.count_prompt(sample.body) for sample in samples]
    assert all(20 <= count <= 61 for count in counts)
    texts = [sample.body["messages"][0]["content"] for sample in samples]  # type: ignore[index]
    prefix = workload.prompts.block(3, 10)
    assert all(text.startswith(prefix) for text in texts)


@pytest.mark.parametrize(
    ("operation", "fields"),
    [
        ("chat", {"messages", "max_tokens", "ignore_eos"}),
        ("completions", {"prompt", "max_tokens", "ignore_eos"}),
        ("embeddings", {"input"}),
        ("rerank", {"query", "documents"}),
    ],
)
def test_each_operation_has_its_fields(operation: Operation, fields: set[str]) -> None:
    assert next(made_up(operation, must_fill=True).open()).body.keys() == fields


@pytest.mark.parametrize(
    ("body", "count_of"),
    [
        ({"prompt": "ab cd"}, "ab cd"),
        ({"prompt": [5, 6, 7]}, 3),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "ab"}]}]}, "ab"),
        ({"query": "q", "documents": ["ab", {"text": "cd"}]}, ("q", "ab", "cd")),
        ({"input": [["x"], [1, 2]]}, ("x", 2)),
    ],
)
def test_prompts_are_counted_wherever_their_text_stands(
    folder: Path, body: dict[str, object], count_of: str | int | tuple[str | int, ...]
) -> None:
    counter = TokenCounter(folder)

    parts = count_of if isinstance(count_of, tuple) else (count_of,)
    assert counter.count_prompt(body) == sum(part if isinstance(part, int) else counter.count(part) for part in parts)


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--tokenizer .*no tokenizer\.json"):
        TokenCounter(tmp_path)
    with pytest.raises(ConfigError, match="cannot be read"):
        TokenCounter(tmp_path / "nowhere")


class _Answers(http.server.BaseHTTPRequestHandler):
    status, body = 200, b""

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(self.body if self.path == "/v1/models" else b"")

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    server = http.server.HTTPServer(("127.0.0.1", 0), _Answers)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (401, b'{"error": "no key"}', "/v1/models says 401"),
        (200, b'{"data": []}', "lists no model"),
        (200, b"<html>", "not OpenAI's list"),
    ],
)
def test_a_server_that_names_no_model_is_told_of(
    monkeypatch: pytest.MonkeyPatch, url: str, status: int, body: bytes, said: str
) -> None:
    monkeypatch.setattr(_Answers, "status", status)
    monkeypatch.setattr(_Answers, "body", body)

    with pytest.raises(ConfigError, match=said):
        find_model(url, {})


def test_the_first_model_is_taken(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setattr(_Answers, "body", b'{"object": "list", "data": [{"id": "a"}, {"id": "b"}]}')

    assert find_model(f"{url}/v1", {}) == "a"
