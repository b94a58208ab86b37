"""The official openai client asks a real server with a tiny BERT for vectors."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from headrace.testing.tiny_bert import POSITIONS, WIDTH, WORDS, tiny_bert_vector, write_tiny_bert

from .conftest import Server, serve

pytestmark = pytest.mark.timeout(180)
TEXT = "the sea is blue and deep and old"
IDS = [2, *(WORDS.index(word) for word in TEXT.split()), 3]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = tmp_path_factory.mktemp("tiny_bert")
    write_tiny_bert(model)
    with serve(model, tmp_path_factory.mktemp("encoder"), "--served-name", "tests/bert") as running:
        yield running


def embed(server: Server, given: Any, **more: Any) -> Any:
    return server.client.embeddings.create(model=server.model, input=given, **more)


def test_base64_floats_and_token_ids_give_the_same_vector(encoder: Server) -> None:
    expected = tiny_bert_vector(IDS)

    by_default = embed(encoder, TEXT)
    answers = [by_default, embed(encoder, TEXT, encoding_format="float"), embed(encoder, IDS), embed(encoder, [IDS])]

    # Nine tokens: the tokenizer file's own truncation to six and its padding are not followed.
    assert by_default.usage.prompt_tokens == by_default.usage.total_tokens == len(IDS) == 10
    for answer in answers:
        vector = np.array(answer.data[0].embedding)
        assert vector @ expected > 0.9999
        assert np.array_equal(vector, np.array(by_default.data[0].embedding))


def test_texts_in_objects_and_between_ids_give_the_same_vector(encoder: Server) -> None:
    first, rest = TEXT.split(" ", 1)
    whole = embed(encoder, TEXT).data[0].embedding
    body = {
        "model": encoder.model,
        "input": [
            {"prompt_string": TEXT},
            {"content": [{"type": "text", "text": first + " "}, {"type": "text", "text": rest}]},
            [IDS[0], first, *IDS[2:]],
        ],
    }

    answer = encoder.post("/v1/embeddings", body).json()

    assert [item["embedding"] == pytest.approx(whole) for item in answer["data"]] == [True] * 3
    assert answer["usage"]["prompt_tokens"] == 3 * len(IDS)


def test_many_inputs_come_back_in_order(encoder: Server) -> None:
    texts = [
        " ".join(WORDS[4 + index % 13] for index in range(number, number + 1 + number % 20)) for number in range(300)
    ]

    answer = embed(encoder, texts)

    assert [item.index for item in answer.data] == list(range(300))
    alone = embed(encoder, texts[217]).data[0].embedding
    assert answer.data[217].embedding == alone


def test_dimensions_are_cut_and_normalised(encoder: Server) -> None:
    whole = np.array(embed(encoder, TEXT).data[0].embedding)

    short = np.array(embed(encoder, TEXT, dimensions=16).data[0].embedding)

    assert short == pytest.approx(whole[:16] / np.linalg.norm(whole[:16]), abs=1e-6)


@pytest.mark.parametrize(
    ("given", "more", "word"),
    [
        ("", {}, "empty"),
        ([], {}, "not empty"),
        (["sea", ""], {}, r"input\[1\]"),
        ("sea " * POSITIONS, {}, f"maximum context length is {POSITIONS}"),
        ([1] * (POSITIONS + 1), {}, f"maximum context length is {POSITIONS}"),
        ([len(WORDS)], {}, "out of vocabulary"),
        ("sea", {"extra_body": {"truncate_prompt_tokens": POSITIONS + 1}}, "smaller truncation size"),
        ("sea", {"dimensions": WIDTH + 1}, "dimensions"),
        ("sea", {"encoding_format": "float16"}, "encoding_format"),
    ],
)
def test_wrong_inputs_are_refused_with_the_reason(encoder: Server, given: Any, more: dict[str, Any], word: str) -> None:
    with pytest.raises(openai.BadRequestError, match=word):
        embed(encoder, given, **more)


def test_whitespace_is_a_text_and_long_ones_can_be_cut(encoder: Server) -> None:
    assert embed(encoder, "  ").usage.prompt_tokens == 2
    cut = embed(encoder, "sea " * 200, extra_body={"truncate_prompt_tokens": -1})
    assert cut.usage.prompt_tokens == POSITIONS
    expected = tiny_bert_vector([2, *[WORDS.index("sea")] * 3, 3])
    short = embed(encoder, "sea " * 200, extra_body={"truncate_prompt_tokens": 5})
    assert np.array(short.data[0].embedding) @ expected > 0.9999


def test_a_model_that_makes_vectors_generates_nothing_and_the_other_way_round(encoder: Server, server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match="no text"):
        encoder.client.completions.create(model=encoder.model, prompt="sea")
    with pytest.raises(openai.BadRequestError, match="no text"):
        encoder.client.chat.completions.create(model=encoder.model, messages=[{"role": "user", "content": "sea"}])
    with pytest.raises(openai.BadRequestError, match="makes no vectors"):
        embed(server, "sea")


def test_a_killed_worker_delays_a_batch_and_fails_nothing(encoder: Server) -> None:
    pid = encoder.worker_pid()
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while True:
        try:
            answer = embed(encoder, [TEXT] * 50)
            break
        except openai.InternalServerError:
            assert time.monotonic() < deadline
            time.sleep(0.1)

    assert len(answer.data) == 50
    assert encoder.worker_pid() != pid


def test_the_metrics_count_requests_and_tokens(encoder: Server) -> None:
    before = encoder.metric("headrace_prompt_tokens_total")

    embed(encoder, [TEXT] * 3)

    assert encoder.metric("headrace_prompt_tokens_total") == before + 3 * len(IDS)


def test_the_model_list_names_it(encoder: Server, tmp_path: Path) -> None:
    (model,) = encoder.client.models.list().data
    assert model.id == "tests/bert"


def test_a_batch_across_sigterm_is_answered_whole(tmp_path: Path) -> None:
    write_tiny_bert(tmp_path / "tiny")
    folder = tmp_path / "server"
    folder.mkdir()
    texts = [" ".join(WORDS[4 + (number + at) % 13] for at in range(30)) for number in range(3000)]
    with serve(tmp_path / "tiny", folder, "--served-name", "tests/bert") as server:
        supervisor = int(Path(f"/proc/{server.worker_pid()}/stat").read_text().rpartition(")")[2].split()[1])
        with ThreadPoolExecutor(1) as pool:
            batch = pool.submit(embed, server, texts)
            deadline = time.monotonic() + 30
            while server.metric("headrace_requests_running") == 0:
                assert time.monotonic() < deadline
            os.kill(supervisor, signal.SIGTERM)
            answer = batch.result()

    log = (folder / "log").read_text()
    (drain,) = [json.loads(line) for line in log.splitlines() if '"drain_started"' in line and "open_requests" in line]
    assert drain["open_requests"] == 1, "the batch was over before the signal came: send more"
    assert [item.index for item in answer.data] == list(range(len(texts)))
    assert answer.data[13].embedding == answer.data[0].embedding  # the texts repeat after 13
