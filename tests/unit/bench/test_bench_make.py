import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.base.errors import ConfigError, MachineError
from headrace.bench.make import LineMaker, Plan, make_file
from headrace.bench.prompts import PromptMaker
from headrace.bench.sources import OnBad, open_samples
from headrace.bench.spread import parse_spread
from headrace.testing.tiny import write_tiny_llama

TEN = parse_spread("10", "n")


def plan(**values: Any) -> Plan:
    return Plan(**{"num_lines": 600, "operation": "chat", "prompt_tokens": TEN, "output_tokens": TEN, **values})


@pytest.mark.parametrize("operation", ["chat", "completions", "embeddings", "rerank"])
def test_every_line_is_a_request_that_reads_back(tmp_path: Path, operation: str) -> None:
    make_file(plan(operation=operation), tmp_path / "f", processes=1)

    samples = list(open_samples(tmp_path / "f", on_bad=OnBad.STOP))

    assert len(samples) == 600
    assert {sample.operation for sample in samples} == {operation}


def test_the_file_is_the_same_however_many_processes_make_it(tmp_path: Path) -> None:
    wanted = plan(turns=parse_spread("uniform:1:3", "n"), shared_ratio=0.5, prefix_tokens=6, rate_per_s=9.0, seed=4)
    done: list[int] = []

    make_file(wanted, tmp_path / "one", processes=1)
    make_file(wanted, tmp_path / "two", processes=2, tell=done.append)

    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    assert done[-1] == 600
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]
    make_file(plan(seed=5), tmp_path / "one", processes=1)
    assert (tmp_path / "one").read_bytes() != (tmp_path / "two").read_bytes()


def test_conversations_and_arrivals_are_as_wanted(tmp_path: Path) -> None:
    wanted = plan(turns=parse_spread("uniform:1:3", "n"), pause_s=parse_spread("2", "n"), rate_per_s=10.0)

    make_file(wanted, tmp_path / "f", processes=1)

    samples = list(open_samples(tmp_path / "f"))
    arrivals = [sample.at_s for sample in samples]
    assert arrivals[0] == 0
    assert arrivals == sorted(arrivals)  # type: ignore[type-var]
    assert arrivals[-1] == pytest.approx(60, rel=0.15)  # 600 of 10 a second, four standard errors
    assert {len(sample.follow_ups) for sample in samples} == {0, 1, 2}
    assert {sample.pauses_s for sample in samples} == {(), (2.0,), (2.0, 2.0)}


def test_shared_beginnings_have_their_share_and_the_first_is_the_commonest(tmp_path: Path) -> None:
    wanted = plan(prompt_tokens=parse_spread("60", "n"), shared_ratio=0.4, prefix_tokens=30, num_prefixes=3)
    maker = PromptMaker()
    prefixes = [maker.block(which, 30) for which in (1, 2, 3)]

    lines = b"".join(LineMaker(wanted).piece(index) for index in range(3)).splitlines()

    texts = [msgspec.json.decode(line)["messages"][0]["content"] for line in lines]
    counts = [sum(text.startswith(prefix + " ") for text in texts) for prefix in prefixes]
    assert sum(counts) == pytest.approx(240, abs=48)  # four standard errors of 600 draws
    assert counts[0] > counts[1] > counts[2] > 0
    assert len(set(texts)) > 590


def test_a_tokenizer_makes_lengths_exact_also_behind_a_shared_beginning(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "model")
    words = "the cat sat on the mat and the dog ran"
    wanted = plan(
        num_lines=40, prompt_tokens=parse_spread("uniform:20:50", "n"), shared_ratio=0.5, prefix_tokens=12,
        text=f"{words} " * 10, tokenizer=folder,
    )  # fmt: skip
    maker = LineMaker(wanted)
    counter = maker._prompts

    texts = [json.loads(line)["messages"][0]["content"] for line in maker.piece(0).splitlines()]

    assert all(20 <= counter.count(text) <= 50 for text in texts)
    assert len({counter.count(text) for text in texts}) > 5


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"num_lines": 0}, "0 lines are asked for"),
        ({"shared_ratio": 1.5}, "the share of lines"),
        ({"rate_per_s": 0.0}, "the rate is 0.0"),
    ],
)
def test_plans_that_make_no_sense_are_refused(values: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        plan(**values)


def test_a_text_too_short_and_a_folder_without_tokenizer_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the text has 3 words"):
        make_file(plan(text="a b c"), tmp_path / "f", processes=2)
    with pytest.raises(ConfigError, match="tokenizer"):
        make_file(plan(tokenizer=tmp_path), tmp_path / "f", processes=2)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="cannot be written"):
        make_file(plan(), tmp_path / "none" / "f", processes=1)


def test_zipf_draws_small_numbers_most_and_has_its_mean() -> None:
    import random

    spread = parse_spread("zipf:100:1", "n")
    draws = [spread.draw(random.Random(7 + seed)) for seed in range(4000)]

    assert spread.mean == pytest.approx(100 / 5.18738, rel=1e-4)  # 100 ÷ the 100th harmonic number
    assert sum(draws) / len(draws) == pytest.approx(spread.mean, rel=0.1)
    assert min(draws) == 1
    assert max(draws) <= 100
    with pytest.raises(ConfigError, match="the highest number"):
        parse_spread("zipf:0:1", "n")
