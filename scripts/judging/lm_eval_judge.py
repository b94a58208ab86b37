"""lm-eval on the exact path beside its own Hugging Face backend: equal within a thousandth a token.

Its own YAML tasks, with data cut from the prose that ships: multiple choice (loglikelihood), continuations
(generate_until) and perplexity (loglikelihood_rolling). On the served format what a text loses must be what
``bench quality`` states.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from judging.environment import FOLDER, python_with, version_of
from judging.findings import Report
from judging.model_folder import demo_folder
from judging.servers import Server

HERE = Path(__file__).with_name("lm_eval")
PACKAGES = ("lm-eval[api]==0.4.13", "transformers", "tokenizers", "torch==2.13.0", "accelerate")
TASKS = ("headrace_choice", "headrace_generate", "headrace_perplexity")
# Log-probabilities of two float32 implementations differ by rounding; this is the limit.
LIMIT_PER_TOKEN = 1e-3
MAX_TOKENS = 2048
TEXT_TASK = "headrace_text"
_TIMEOUT_S = 3600


def run(servers: Mapping[str, Server]) -> Report:
    """Runs all tasks on both backends and compares what each document was given; then the served format's loss."""
    python = python_with("lm-eval", PACKAGES)
    report = Report("lm-eval", version_of(python, "lm_eval"))
    model = demo_folder()
    folder = FOLDER / "lm-eval-run"
    shutil.rmtree(folder, ignore_errors=True)
    write_tasks(folder)
    theirs = f"pretrained={model},dtype=float32,max_length={MAX_TOKENS}"
    sides = [
        _samples_of(report, python, folder, name, backend, arguments, TASKS)
        for name, backend, arguments in (
            ("ours", "local-completions", _ours(servers["exact"], model)),
            ("theirs", "hf", theirs),
        )
    ]
    counts = _token_counts(python, model, sides[0])
    for task in TASKS:
        compare(report, task, sides[0][task], sides[1][task], counts)
    _compare_loss(report, python, folder, model, servers)
    return report


def _ours(server: Server, model: Path) -> str:
    return (
        f"model={server.model},base_url={server.url}/v1/completions,tokenized_requests=False,tokenizer={model},"
        f"tokenizer_backend=huggingface,num_concurrent=2,max_retries=1,max_length={MAX_TOKENS}"
    )


def _samples_of(
    report: Report, python: Path, folder: Path, name: str, backend: str, arguments: str, tasks: tuple[str, ...]
) -> dict[str, list[dict[str, object]]]:
    """Runs tasks on one backend; gives each task's samples.

    Raises:
        RuntimeError: it failed; its words are in ``NAME.log`` of the folder.
    """
    out = folder / name
    command = [str(python), "-m", "lm_eval", "run", "--model", backend, "--model_args", arguments, "--tasks", *tasks]
    command += ["--include_path", str(folder), "--log_samples", "--output_path", str(out), "--device", "cpu"]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OPENAI_API_KEY": "none"}
    # One thread: beside other work two that wait for each other take seconds a step.
    env |= {"HF_HOME": str(folder / "cache"), "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    with (folder / f"{name}.log").open("w") as log:
        done = subprocess.run(
            command, cwd=folder, env=env, stdout=log, stderr=subprocess.STDOUT, timeout=_TIMEOUT_S, check=False
        )
    if done.returncode != 0:
        raise RuntimeError(f"{backend} failed: {(folder / f'{name}.log').read_text().strip()[-300:]}")
    report.add(f"{name}: runs", is_ok=True)
    return {task: _samples(out, task) for task in tasks}


def _compare_loss(report: Report, python: Path, folder: Path, model: Path, servers: Mapping[str, Server]) -> None:
    """What a text loses by the served format: as lm-eval sees it over HTTP, and as ``bench quality`` states it.

    Both sides read the same tokens: lm-eval puts the model's opening token in front of a text, so it stands in the
    file.
    """
    logs = []
    for name, kind in (("exact-file", "exact-file"), ("served", "chat")):
        arguments = _ours(servers[kind], model)
        found = _samples_of(report, python, folder, name, "local-completions", arguments, (TEXT_TASK,))
        (row,) = found[TEXT_TASK]
        logs.append(float(str(_values(row)[0])))
    text = _scored(row)[0]
    opening = json.loads((model / "tokenizer_config.json").read_text())["bos_token"]
    (folder / "text.txt").write_text(opening + text)
    command = [sys.executable, "-m", "headrace", "bench", "quality", "demo", "--quantization", "none", "--json"]
    done = subprocess.run([*command, "--text", str(folder / "text.txt")], capture_output=True, text=True, check=False)
    stated = json.loads(done.stdout)
    count = stated["positions"]
    loss = (logs[0] - logs[1]) / count
    told = math.log(stated["measured"][0]["report"]["perplexity"] / stated["reference_perplexity"])
    check = f"served format: {loss:+.5f} nats a token over {count}, bench quality states {told:+.5f}"
    report.add(check, abs(loss - told) <= LIMIT_PER_TOKEN, f"apart by more than {LIMIT_PER_TOKEN}")
    report.notes.append(check)


def write_tasks(folder: Path) -> None:
    """Writes the tasks and their documents to a folder that is made."""
    from headrace.text.prose import shipped_text

    shutil.copytree(HERE, folder)
    sentences = [part.strip() for part in shipped_text().replace("\n", " ").split(". ") if 60 < len(part.strip()) < 300]
    choice = []
    for index in range(10):
        words = sentences[index].split(" ")
        half = len(words) // 2
        ends = [
            " " + " ".join(sentences[other].split(" ")[-half:][:6])
            for other in (index, index + 1, index + 7, index + 13)
        ]
        choice.append({"text": " ".join(words[:half]), "choices": ends, "answer": 0})
    # The beginning of a sentence: behind a whole one the model may end at once, and two empty answers are equal.
    generate = [{"text": " ".join(sentence.split(" ")[:5]), "target": ""} for sentence in sentences[40:46]]
    perplexity = [{"text": _joined(sentences, start, 5)} for start in (60, 65)]
    text = [{"text": _joined(sentences, 23, 8)}]
    for name, rows in (("choice", choice), ("generate", generate), ("perplexity", perplexity), ("text", text)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _joined(sentences: list[str], start: int, count: int) -> str:
    chosen = sentences[start : start + count]
    if len(chosen) < count:  # a slice past the end is no error in Python, and an empty text proves nothing
        raise ValueError(f"the shipped text has {len(sentences)} sentences, not {start + count}")
    return ". ".join(chosen) + "."


def _samples(out: Path, task: str) -> list[dict[str, object]]:
    (file,) = out.rglob(f"samples_{task}_*.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return sorted(rows, key=lambda row: row["doc_id"])


def _token_counts(python: Path, model: Path, side: dict[str, list[dict[str, object]]]) -> dict[str, int]:
    """Counts the tokens of all scored texts with the tokenizer itself."""
    texts = sorted({text for rows in side.values() for row in rows for text in _scored(row)})
    script = (
        "import json,sys; from tokenizers import Tokenizer; t=Tokenizer.from_file(sys.argv[1]);"
        "print(json.dumps([len(t.encode(x).ids) for x in json.load(sys.stdin)]))"
    )
    done = subprocess.run(
        [str(python), "-c", script, str(model / "tokenizer.json")],
        input=json.dumps(texts), capture_output=True, text=True, check=True,
    )  # fmt: skip
    return dict(zip(texts, json.loads(done.stdout), strict=True))


def _scored(row: dict[str, object]) -> list[str]:
    """Gives the texts whose tokens were scored, one for each response."""
    arguments = row["arguments"]
    assert isinstance(arguments, dict)
    return [str(item.get("arg_1", item.get("arg_0"))) for item in arguments.values()]


def compare(
    report: Report, task: str, ours: list[dict[str, object]], theirs: list[dict[str, object]], counts: dict[str, int]
) -> None:
    """Adds what two backends made of a task's documents; each row is a sample as lm-eval logs it.

    Args:
        counts: tokens of each scored text.
    """
    worst = 0.0
    num_equal = 0
    for mine, other in zip(ours, theirs, strict=True):
        answers = list(zip(_values(mine), _values(other), strict=True))
        if task == "headrace_generate":
            num_equal += all(a == b != "" for a, b in answers)
            continue
        for text, (a, b) in zip(_scored(mine), answers, strict=True):
            worst = max(worst, abs(float(str(a)) - float(str(b))) / max(1, counts[text]))
    if task == "headrace_generate":
        check, is_ok, why = f"{num_equal} of {len(ours)} equal", num_equal == len(ours), "they differ, or are empty"
    else:
        check, is_ok, why = f"{worst:.1e} a token apart", worst <= LIMIT_PER_TOKEN, f"over {LIMIT_PER_TOKEN}"
    report.add(f"{task}: {check}", is_ok, why)
    report.notes.append(f"{task}: {check}")


def _values(row: dict[str, object]) -> list[object]:
    responses = row["resps"]
    assert isinstance(responses, list)
    return [_first(response) for response in responses]


def _first(value: object) -> object:
    while isinstance(value, list):
        value = value[0]
    return value
