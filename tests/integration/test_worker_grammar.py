"""Grammars in the real worker process over a tiny random model: a model that knows nothing still keeps to them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from tests.integration.test_worker_process import PROMPT, Process, end, start, tokens_of

from headrace.protocol.frames import Abort, Failed, Finished, FinishReason, Grammar, GrammarKind, Sampling, Submit
from headrace.protocol.launch import WorkerLaunch
from headrace.testing.tiny import write_tiny_gguf, write_tiny_llama
from headrace.testing.tiny_vocabulary import byte_alphabet, vocabulary

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["lock", "weir"]}, "gates": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["kind", "gates"],
    "additionalProperties": False,
}
# 2^60 letters, and as many ways to count them: too much work for a step.
DOUBLING = "start: x0\n" + "".join(f"x{i}: x{i + 1} x{i + 1}\n" for i in range(60)) + 'x60: "a"\n'
JSON = Grammar(GrammarKind.JSON, json.dumps(SCHEMA))


@pytest.fixture(scope="module", params=["safetensors", "gguf"])
def worker(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Process]:
    folder = tmp_path_factory.mktemp("grammar")
    if request.param == "gguf":
        model = write_tiny_gguf(folder / "tiny.gguf", is_tied=False)
    else:
        model = write_tiny_llama(folder / "tiny", is_tied=False)
    launch = WorkerLaunch(str(model), "tiny", -1, kv_cache_tokens=512, kv_cache_ratio=0.5, max_sequences=8)
    process = start(folder, launch)
    process.wait_ready()
    yield process
    end(process)


def text_of(events: list[Any]) -> str:
    words = vocabulary(320)[0]
    letters = byte_alphabet()
    data = bytes(letters.index(char) for token in tokens_of(events) for char in words[token])
    return data.decode()


@pytest.mark.parametrize("seed", range(4))
def test_a_schema_is_kept_by_a_random_model(worker: Process, seed: int) -> None:
    events = worker.run(Submit(f"json-{seed}", PROMPT, 300, Sampling(temperature=2.0, seed=seed), grammar=JSON))

    ending = events[-1]
    assert isinstance(ending, Finished), ending
    assert ending.reason is FinishReason.STOP
    value = json.loads(text_of(events))
    assert value["kind"] in ("lock", "weir")
    assert 1 <= value["gates"] <= 9


def test_an_answer_ends_with_its_grammar_even_where_the_models_own_end_is_ignored(worker: Process) -> None:
    grammar = Grammar(GrammarKind.REGEX, "(ab){3}")

    events = worker.run(
        Submit("regex", PROMPT, 300, Sampling(temperature=1.0), grammar=grammar, ignore_eos=True, min_tokens=100)
    )

    assert isinstance(events[-1], Finished)
    assert events[-1].reason is FinishReason.STOP
    assert text_of(events) == "ababab"


def test_sequences_with_and_without_grammar_share_a_step_and_do_not_touch_each_other(worker: Process) -> None:
    sampling = Sampling(temperature=1.0, seed=5)
    alone = [
        tokens_of(worker.run(Submit("alone-plain", PROMPT, 40, sampling, ignore_eos=True))),
        tokens_of(worker.run(Submit("alone-json", PROMPT, 200, sampling, grammar=JSON))),
    ]

    worker.send(*(Submit(f"plain-{i}", PROMPT, 40, sampling, ignore_eos=True) for i in range(3)))
    worker.send(*(Submit(f"json-x{i}", PROMPT, 200, sampling, grammar=JSON) for i in range(3)))
    heard: dict[str, list[Any]] = {}
    while sum(isinstance(events[-1], Finished) for events in heard.values()) < 6:
        frame = worker.frame()
        for event in getattr(frame, "events", []):
            heard.setdefault(event.request_id, []).append(event)

    for name, events in heard.items():
        assert tokens_of(events) == alone[name.startswith("json")], name


def test_preempted_answers_still_follow_their_grammar(worker: Process) -> None:
    # 512 tokens of KV for five sequences of 60 + up to 120: some are preempted and computed again.
    grammar = Grammar(GrammarKind.REGEX, "(x[0-9]y){40}")
    prompt = PROMPT[:60]

    worker.send(
        *(
            Submit(f"pre-{i}", [*prompt, 10 + i], 200, Sampling(temperature=1.5, seed=i), grammar=grammar)
            for i in range(5)
        )
    )
    heard: dict[str, list[Any]] = {}
    while sum(isinstance(events[-1], Finished) for events in heard.values()) < 5:
        for event in getattr(worker.frame(), "events", []):
            assert not isinstance(event, Failed), event
            heard.setdefault(event.request_id, []).append(event)

    endings = [events[-1] for events in heard.values()]
    assert sum(ending.num_preemptions for ending in endings) > 0
    for events in heard.values():
        text = text_of(events)
        assert len(text) == 120, text
        assert set(text[0::3]) == {"x"}


def test_only_allowed_ids_are_chosen(worker: Process) -> None:
    events = worker.run(Submit("allowed", PROMPT, 20, Sampling(temperature=1.0), allowed_token_ids=[70, 71, 300]))

    assert set(tokens_of(events)) <= {70, 71, 300}
    assert len(tokens_of(events)) == 20


@pytest.mark.parametrize(
    ("grammar", "code"),
    [
        pytest.param(Grammar(GrammarKind.REGEX, "(a"), "invalid_grammar", id="regex"),
        pytest.param(Grammar(GrammarKind.JSON, "{"), "invalid_grammar", id="json"),
        pytest.param(Grammar(GrammarKind.LARK, "start: nobody"), "invalid_grammar", id="lark"),
        pytest.param(Grammar(GrammarKind.LARK, DOUBLING), "grammar_failed", id="cost"),
    ],
)
def test_a_grammar_that_cannot_be_used_fails_its_request_alone(worker: Process, grammar: Grammar, code: str) -> None:
    events = worker.run(Submit(f"bad-{code}-{grammar.source}", PROMPT, 20, grammar=grammar))

    assert isinstance(events[-1], Failed)
    assert events[-1].code == code
    assert tokens_of(worker.run(Submit(f"after-{grammar.source}", PROMPT, 3, ignore_eos=True)))


def test_an_abort_ends_a_request_wherever_it_is(worker: Process) -> None:
    grammar = Grammar(GrammarKind.REGEX, "[a-z]{1000}")

    worker.send(Submit("gone", PROMPT, 400, grammar=grammar), Abort("gone"))
    events: list[Any] = []
    while not events or not isinstance(events[-1], Finished | Failed):
        events += [event for event in getattr(worker.frame(), "events", []) if event.request_id == "gone"]

    assert isinstance(events[-1], Finished)
    assert events[-1].reason is FinishReason.ABORTED
