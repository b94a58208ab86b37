import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from headrace.base.errors import ConfigError
from headrace.bench.prompts import PromptMaker
from headrace.bench.sample import Sample
from headrace.bench.sources import MAX_LINE_BYTES, OnBad, open_samples


def read(path: Path, text: str | bytes, **options: object) -> tuple[list[Sample], list[tuple[int, str]]]:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    bad: list[tuple[int, str]] = []
    samples = open_samples(path, tell_bad=lambda line, reason: bad.append((line, reason)), **options)  # type: ignore[arg-type]
    return list(samples), bad


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize(
    ("line", "operation", "body"),
    [
        ({**CHAT, "model": "x", "stream": True, "max_tokens": 5}, "chat", {**CHAT, "max_tokens": 5}),
        ({"prompt": "Once", "temperature": 0}, "completions", {"prompt": "Once", "temperature": 0}),
        ({"input": ["a", "b"]}, "embeddings", {"input": ["a", "b"]}),
        ({"query": "q", "documents": ["a"]}, "rerank", {"query": "q", "documents": ["a"]}),
        ({"custom_id": "1", "url": "/v1/completions", "body": {"prompt": "p"}}, "completions", {"prompt": "p"}),
        ({"custom_id": "1", "body": CHAT}, "chat", CHAT),
    ],
    ids=["chat", "completions", "embeddings", "rerank", "batch", "batch without url"],
)  # fmt: skip
def test_openai_forms_are_seen_by_their_keys(
    tmp_path: Path, line: dict[str, object], operation: str, body: object
) -> None:
    (sample,), bad = read(tmp_path / "f.jsonl", json.dumps(line))

    assert (sample.operation, sample.body, sample.line, bad) == (operation, body, 1, [])


def test_share_gpt_becomes_a_conversation_as_lines_and_as_array(tmp_path: Path) -> None:
    dump = [
        {"id": "a", "conversations": [
            {"from": "system", "value": "Be kind."}, {"from": "human", "value": "One?"},
            {"from": "gpt", "value": "Two."}, {"from": "human", "value": "Three?"}]},
        {"id": "b", "conversations": [{"from": "human", "value": "Four?"}]},
    ]  # fmt: skip

    from_lines, _ = read(tmp_path / "l", "\n".join(json.dumps(line) for line in dump))
    from_array, bad = read(tmp_path / "a", json.dumps(dump, indent=1))

    assert [message["content"] for message in from_array[0].body["messages"]] == ["Be kind.", "One?"]  # type: ignore[attr-defined,index]
    assert from_array[0].follow_ups == (({"role": "user", "content": "Three?"},),)
    assert [sample.body for sample in from_array] == [sample.body for sample in from_lines]
    assert [sample.line for sample in from_array] == [2, 23]
    assert bad == []


def test_session_has_pauses_and_its_other_fields_go_into_the_body(tmp_path: Path) -> None:
    line = {"turns": ["a", {"content": "b", "pause_s": 1.5}], "system": "s", "max_tokens": 9, "at_s": 4}

    (sample,), _ = read(tmp_path / "f", json.dumps(line))

    assert sample.body == {
        "max_tokens": 9,
        "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}],
    }
    assert (sample.follow_ups, sample.pauses_s, sample.at_s) == ((({"role": "user", "content": "b"},),), (1.5,), 4.0)


def test_mooncake_trace_gives_arrivals_lengths_and_shared_blocks(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 0, "input_length": 1100, "output_length": 7, "hash_ids": [5, 6, 7]},
        {"timestamp": 2500, "input_length": 1100, "output_length": 8, "hash_ids": [5, 6, 9]},
        {"timestamp": 2500, "input_length": 1100, "output_length": 8, "hash_ids": [11, 6, 9]},
    ]
    maker = PromptMaker()

    samples, _ = read(tmp_path / "f", "\n".join(map(json.dumps, lines)))

    texts = [sample.body["messages"][0]["content"] for sample in samples]  # type: ignore[index]
    shared = [len(maker.block(identity, 512)) for identity in (5, 6)]
    assert [sample.at_s for sample in samples] == [0.0, 2.5, 2.5]
    assert [sample.body["max_tokens"] for sample in samples] == [7, 8, 8]
    assert texts[0][: sum(shared)] == texts[1][: sum(shared)]
    assert texts[0] != texts[1]
    assert texts[0][:40] != texts[2][:40]
    assert [abs(maker.count(text) - 1100) <= 2 for text in texts] == [True] * 3


@pytest.mark.parametrize(
    "text",
    [
        AZURE + "2023-11-16 18:15:46.6805900,40,10\n2023-11-16 18:15:50.9951690,30,5\n",
        AZURE + "2024-05-10 00:00:00.680590+00:00,40,10\n2024-05-10 00:00:04.995169+00:00,30,5\n",
        "Timestamp,Model,Request tokens,Response tokens,Log Type\n5,GPT-4,40,10,x\n9.314579,GPT-4,30,5,x\n",
    ],
    ids=["azure 2023", "azure 2024", "burst"],
)  # fmt: skip
def test_csv_traces_give_arrivals_and_lengths(tmp_path: Path, text: str) -> None:
    samples, bad = read(tmp_path / "trace.csv", text)

    assert [sample.at_s for sample in samples] == pytest.approx([0, 4.314579], abs=1e-5)
    assert [sample.body["max_tokens"] for sample in samples] == [10, 5]
    assert bad == []


BAD_LINES = [
    (b"{", "is not JSON: Input data was truncated"),
    (b'{"prompt": "\xff"}', "is not JSON: Invalid UTF-8"),
    (b"[" * 100_000, "is not JSON"),
    (b"17", "is a number, not a JSON object"),
    (b'{"text": "x"}', "has none of messages, .*; keys: text"),
    (b'{"messages": []}', "messages is an empty list"),
    (b'{"messages": [{"content": "x"}]}', r"messages\[0\] is no object with a role"),
    (b'{"prompt": ""}', "prompt is an empty string"),
    (b'{"input": 7}', "input is a number"),
    (b'{"query": "q", "documents": []}', "documents"),
    (b'{"custom_id": "1", "url": "/v1/images", "body": {}}', "url is '/v1/images'"),
    (b'{"custom_id": "1", "url": "/v1/embeddings", "body": {"prompt": "x"}}', "goes to embeddings"),
    (b'{"conversations": [{"from": "gpt", "value": "x"}]}', "no turn is of a human"),
    (b'{"conversations": [{"from": "cat", "value": "x"}]}', r"conversations\[0\].from is 'cat'"),
    (b'{"turns": [7]}', r"turns\[0\]"),
    (b'{"input_length": 0, "output_length": 3}', "input_length is 0"),
    (b'{"input_length": 5, "output_length": 3, "hash_ids": [-1]}', "hash_ids"),
    (b'{"prompt": "x", "at_s": -1}', "at_s is -1"),
]


def test_bad_lines_are_named_by_number_and_reason_and_left_out(tmp_path: Path) -> None:
    good = json.dumps(CHAT).encode()
    text = b"\n".join([good, b"", *(line for line, _ in BAD_LINES), good])

    samples, bad = read(tmp_path / "f", text)

    assert [line for line, _ in bad] == list(range(3, 3 + len(BAD_LINES)))
    for (_, reason), (_, expected) in zip(bad, BAD_LINES, strict=True):
        assert pytest.raises(AssertionError, match=expected).matches(AssertionError(reason)), reason
    assert [sample.line for sample in samples] == [1, 3 + len(BAD_LINES)]


def test_a_line_without_end_is_left_out_without_being_held(tmp_path: Path) -> None:
    text = b'{"prompt": "' + b"x" * (MAX_LINE_BYTES + 5) + b'"}\n{"prompt": "y"}\n'

    (sample,), bad = read(tmp_path / "f", text)

    assert (sample.line, bad) == (2, [(1, "is longer than 16.0 MiB, the limit")])


def test_stop_ends_at_the_first_bad_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"f:2: is not JSON"):
        read(tmp_path / "f", '{"prompt": "a"}\n{\n', on_bad=OnBad.STOP)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "holds no request"),
        ("\n\n", "holds no request"),
        ('[{"prompt": "a"}\n{"prompt": "b"}]', "f:2: ',' is missing"),
        ('[{"prompt": "a"},\n', "f:2: the item that begins here is not JSON"),
        ('[{"prompt": "a"}', "f:1: the file ends inside the array"),
        ("TIMESTAMP,Tokens\n1,2\n", "the columns are TIMESTAMP, Tokens"),
    ],
)
def test_files_that_cannot_be_understood_are_refused(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        read(tmp_path / "f", text)


def test_csv_rows_that_are_wrong_are_told(tmp_path: Path) -> None:
    text = AZURE + "10,5,5\n9,5,5\nx,5,5\n11,0,5\n12,5\nnan,1,1\n13,5,5\n"

    samples, bad = read(tmp_path / "f", text)

    assert [sample.at_s for sample in samples] == [0.0, 3.0]
    assert [line for line, _ in bad] == [3, 4, 5, 6, 7]


def test_memory_stays_flat_over_a_long_file(tmp_path: Path) -> None:
    line = json.dumps({"prompt": "word " * 200}) + "\n"  # 1 KiB
    (tmp_path / "lines").write_text(line * 6_000)
    (tmp_path / "array").write_text("[" + ",".join([line] * 6_000) + "]")
    peaks = []

    for name in ("lines", "array"):
        tracemalloc.start()
        num = sum(1 for _ in open_samples(tmp_path / name))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert num == 6_000

    assert max(peaks) < 3 * 2**20  # of 6 MiB


class Letters:
    """A tokenizer with a token per three letters, so that lengths are hard to meet by words."""

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        return [0] * sum(-(-len(word) // 3) for word in text.split())


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 17, 500])
def test_prompts_have_exactly_the_wanted_tokens(num_tokens: int) -> None:
    maker = PromptMaker(tokenizer=Letters())
    random = np.random.default_rng(1)

    found = [maker.count(maker.prompt(num_tokens, random)) for _ in range(20)]

    assert max(abs(count - num_tokens) for count in found) <= (3 if num_tokens < 3 else 0)


def test_limit_ends_the_reading(tmp_path: Path) -> None:
    samples, _ = read(tmp_path / "f", '{"prompt": "a"}\n' * 5 + "{", limit=3)

    assert len(samples) == 3
