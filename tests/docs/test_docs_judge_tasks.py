"""The tasks that lm-eval runs on both backends: their documents say something, and a difference is seen."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

from judging.findings import Report  # noqa: E402
from judging.lm_eval_judge import compare, write_tasks  # noqa: E402


def rows_of(folder: Path, name: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def test_each_document_has_text_to_score(tmp_path: Path) -> None:
    folder = tmp_path / "tasks"

    write_tasks(folder)

    for name, least_chars in (("perplexity", 300), ("text", 500)):
        texts = [str(row["text"]) for row in rows_of(folder, name)]
        assert min(map(len, texts)) >= least_chars
        assert len(set(texts)) == len(texts)
    for row in rows_of(folder, "choice"):
        assert isinstance(row["choices"], list)
        assert len(set(row["choices"])) == 4
    # None is whole: behind its end the model may say nothing, which proves nothing.
    assert not [row for row in rows_of(folder, "generate") if str(row["text"])[-1] in ".!?"]


def sample(*answers: object, text: str = "two words") -> dict[str, object]:
    arguments = {f"gen_args_{index}": {"arg_0": "", "arg_1": text} for index in range(len(answers))}
    return {"arguments": arguments, "resps": [[answer] for answer in answers]}


CHOICES = sample(["-2.0", "False"], ["-3.0", "True"])


@pytest.mark.parametrize(
    ("task", "ours", "theirs", "is_ok"),
    [
        ("headrace_choice", CHOICES, sample(["-2.0", "False"], ["-3.001", "True"]), True),
        ("headrace_choice", CHOICES, sample(["-2.0", "False"], ["-3.003", "True"]), False),
        ("headrace_perplexity", sample("-5.0"), sample("-5.0019"), True),
        ("headrace_perplexity", sample("-5.0"), sample("-5.0021"), False),
        ("headrace_generate", sample(" and"), sample(" and"), True),
        ("headrace_generate", sample(" and"), sample(" or"), False),
        ("headrace_generate", sample(""), sample(""), False),
    ],
)  # fmt: skip
def test_backends_are_compared_by_the_token(
    task: str, ours: dict[str, object], theirs: dict[str, object], is_ok: bool
) -> None:
    report = Report("lm-eval", "?")

    compare(report, task, [ours], [theirs], {"two words": 2})

    assert [finding.is_ok for finding in report.findings] == [is_ok]
