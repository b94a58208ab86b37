"""The scheduler's promises, on the executor and a fake VM that reads every token back through the block tables."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from headrace.engine.scheduler import SchedulerConfig
from headrace.protocol.frames import (
    LEAST_POSITIVE,
    EchoLogprobs,
    Failed,
    Finished,
    FinishReason,
    Sampling,
    Started,
    Submit,
    Tokens,
)
from headrace.testing.fake_vm import FakeVm, next_token
from headrace.testing.machine import OWNER, Machine

VOCAB = 1000
CONFIG = SchedulerConfig(
    vocab_size=VOCAB, context_tokens=512, eos_token_ids=frozenset(), num_blocks=64, max_sequences=4, max_step_tokens=64
)


def submit(request_id: str = "r", length: int = 10, max_tokens: int = 8, **changes: object) -> Submit:
    prompt = [(7 * i + length) % VOCAB for i in range(length)]
    return msgspec.structs.replace(Submit(request_id, prompt, max_tokens), **changes)


def expected_tokens(request: Submit, count: int, banned: frozenset[int] = frozenset()) -> list[int]:
    tokens = list(request.prompt_ids)
    for _ in range(count):
        tokens.append(next_token(np.array(tokens, np.int32), request.sampling.seed, VOCAB, banned))
    return tokens[len(request.prompt_ids) :]


def test_request_hears_started_then_its_tokens_then_one_ending() -> None:
    machine = Machine(CONFIG)
    request = submit(length=100)

    machine.run(request)

    assert machine.events["r"][0] == Started("r", 0)
    assert machine.tokens("r") == expected_tokens(request, 8)
    ending = machine.ending("r")
    assert isinstance(ending, Finished)
    assert (ending.reason, ending.prompt_tokens, ending.output_tokens) == (FinishReason.LENGTH, 100, 8)
    machine.scheduler.check()


def test_context_that_fills_up_ends_with_length() -> None:
    machine = Machine(CONFIG)

    machine.run(submit(length=505, max_tokens=100))

    ending = machine.ending("r")
    assert isinstance(ending, Finished)
    assert (ending.reason, ending.output_tokens) == (FinishReason.LENGTH, 7)


def test_stop_id_ends_the_request_and_is_not_delivered() -> None:
    request = submit()
    stop = expected_tokens(request, 4)[3]
    machine = Machine(CONFIG)

    machine.run(msgspec.structs.replace(request, stop_token_ids=[stop]))

    ending = machine.ending("r")
    assert isinstance(ending, Finished)
    assert (ending.reason, ending.stop_token_id, ending.output_tokens) == (FinishReason.STOP, stop, 3)
    assert machine.tokens("r") == expected_tokens(request, 3)


def test_end_of_sequence_ends_the_request_unless_it_is_ignored() -> None:
    request = submit()
    eos = expected_tokens(request, 3)[2]
    machine = Machine(replace(CONFIG, eos_token_ids=frozenset({eos})))

    machine.run(request, msgspec.structs.replace(request, request_id="deaf", ignore_eos=True))

    assert machine.tokens("r") == expected_tokens(request, 2)
    assert machine.tokens("deaf") == expected_tokens(request, 8)


def test_min_tokens_bans_the_ends_until_it_is_reached() -> None:
    request = submit(min_tokens=5)
    eos = expected_tokens(request, 1)[0]
    machine = Machine(replace(CONFIG, eos_token_ids=frozenset({eos})))

    machine.run(request)

    assert machine.tokens("r")[:5] == expected_tokens(request, 5, banned=frozenset({eos}))


def test_second_request_with_the_same_start_takes_it_from_the_cache() -> None:
    machine = Machine(CONFIG)
    machine.run(submit("first", length=100))

    machine.run(submit("second", length=100))

    assert machine.events["second"][0] == Started("second", 96)
    assert machine.tokens("second") == machine.tokens("first")
    assert machine.scheduler.totals.prefix_hits_tokens == 96


def test_full_hit_still_computes_a_row() -> None:
    machine = Machine(CONFIG)
    machine.run(submit("first", length=96))

    machine.run(submit("second", length=96))

    assert machine.events["second"][0] == Started("second", 64)
    assert machine.tokens("second") == machine.tokens("first")


@pytest.mark.parametrize("has_prefix_cache", [True, False], ids=["other salt", "cache off"])
def test_no_hit_across_salts_or_without_the_cache(has_prefix_cache: bool) -> None:
    machine = Machine(replace(CONFIG, has_prefix_cache=has_prefix_cache))
    machine.run(submit("first", length=100))

    machine.run(submit("second", length=100, cache_salt="tenant b" if has_prefix_cache else ""))

    assert machine.events["second"][0] == Started("second", 0)


def test_generated_blocks_serve_the_next_turn_of_a_conversation() -> None:
    machine = Machine(CONFIG)
    first = submit("first", length=60, max_tokens=80)
    machine.run(first)

    prompt = [*first.prompt_ids, *machine.tokens("first"), 5, 6]
    machine.run(Submit("second", prompt, 4))

    assert machine.events["second"][0] == Started("second", 128)


def test_requests_wait_for_a_slot_and_run_in_order_of_priority_then_arrival() -> None:
    machine = Machine(replace(CONFIG, max_sequences=1))

    machine.run(submit("a", priority=1), submit("b", priority=0), submit("c", priority=0))

    starts = [
        request_id for request_id, _ in sorted(machine.events.items(), key=lambda item: _queue_s(machine, item[0]))
    ]
    assert starts == ["b", "c", "a"]


def _queue_s(machine: Machine, request_id: str) -> float:
    ending = machine.ending(request_id)
    assert isinstance(ending, Finished)
    return ending.queue_s


def test_preempted_requests_give_the_very_tokens_of_an_undisturbed_run() -> None:
    tight = Machine(replace(CONFIG, num_blocks=16))
    requests = [submit(f"r{i}", length=90 + i, max_tokens=120) for i in range(4)]

    tight.run(*requests)

    assert tight.scheduler.totals.preemptions > 0
    for request in requests:
        assert tight.tokens(request.request_id) == expected_tokens(request, 120)
    assert any(_num_preemptions(tight, request.request_id) for request in requests)
    assert _num_preemptions(tight, "r0") == 0
    tight.scheduler.check()


def _num_preemptions(machine: Machine, request_id: str) -> int:
    ending = machine.ending(request_id)
    assert isinstance(ending, Finished)
    return ending.num_preemptions


def test_abort_frees_everything_at_once_whether_waiting_or_running() -> None:
    machine = Machine(replace(CONFIG, max_sequences=1))
    machine.submit(submit("running", max_tokens=100), submit("waiting"))
    machine.step()

    machine.abort("waiting")
    machine.abort("running")
    machine.abort("running")

    for request_id, output_tokens in (("waiting", 0), ("running", 1)):
        ending = machine.ending(request_id)
        assert isinstance(ending, Finished)
        assert (ending.reason, ending.output_tokens) == (FinishReason.ABORTED, output_tokens)
    assert not machine.scheduler.has_work
    assert machine.scheduler.pool.num_used == 0
    machine.scheduler.check()


def test_peer_that_is_gone_takes_its_requests_along_without_a_word() -> None:
    machine = Machine(CONFIG)
    machine.submit(submit("a"), submit("b"))
    machine.step()

    ended = machine.scheduler.abort_owner(OWNER)

    assert ended == 2
    assert machine.scheduler.take_events() == {}
    assert machine.scheduler.pool.num_used == 0
    machine.scheduler.check()


def test_deadline_fails_waiting_and_running_requests() -> None:
    machine = Machine(replace(CONFIG, max_sequences=1), step_s=1.0)

    machine.run(submit("running", max_tokens=100, timeout_s=3.5), submit("waiting", timeout_s=2.0))

    running, waiting = machine.ending("running"), machine.ending("waiting")
    assert isinstance(running, Failed)
    assert isinstance(waiting, Failed)
    assert (running.code, running.has_started) == ("generation_timeout", True)
    assert (waiting.code, waiting.has_started) == ("generation_timeout", False)
    assert machine.clock.now_s() <= 5.0


def test_full_queue_refuses_with_queue_full() -> None:
    machine = Machine(replace(CONFIG, queue_limit=2))

    machine.submit(*(submit(f"r{i}") for i in range(3)))

    ending = machine.ending("r2")
    assert isinstance(ending, Failed)
    assert (ending.code, ending.has_started) == ("queue_full", False)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"prompt_ids": []}, "invalid_value"),
        ({"prompt_ids": [VOCAB]}, "invalid_value"),
        ({"prompt_ids": [-1]}, "invalid_value"),
        ({"prompt_ids": [1] * 512}, "context_length_exceeded"),
        ({"max_tokens": 0}, "invalid_value"),
        ({"min_tokens": 9}, "invalid_value"),
        ({"stop_token_ids": [VOCAB]}, "invalid_value"),
        ({"timeout_s": float("nan")}, "invalid_value"),
        ({"timeout_s": float("inf")}, "invalid_value"),
        ({"echo_logprobs": 257}, "invalid_value"),
        ({"sampling": Sampling(temperature=float("nan"))}, "invalid_value"),
        ({"sampling": Sampling(temperature=-1.0)}, "invalid_value"),
        ({"sampling": Sampling(top_p=0.0)}, "invalid_value"),
        ({"sampling": Sampling(top_k=-1)}, "invalid_value"),
        ({"sampling": Sampling(min_p=1.5)}, "invalid_value"),
        ({"sampling": Sampling(repetition_penalty=0.0)}, "invalid_value"),
        ({"sampling": Sampling(presence_penalty=3.0)}, "invalid_value"),
        ({"sampling": Sampling(logit_bias={VOCAB: 1.0})}, "invalid_value"),
        ({"sampling": Sampling(logit_bias={1: float("inf")})}, "invalid_value"),
        ({"sampling": Sampling(num_logprobs=21)}, "invalid_value"),
    ],
    ids=str,
)
def test_bad_field_fails_that_request_and_nothing_else(changes: dict[str, object], code: str) -> None:
    machine = Machine(CONFIG)

    machine.run(submit("bad", **changes), submit("good"))

    bad = machine.ending("bad")
    assert isinstance(bad, Failed)
    assert (bad.code, bad.has_started) == (code, False)
    assert machine.tokens("good") == expected_tokens(submit("good"), 8)


def test_whatever_is_over_0_is_a_repetition_penalty() -> None:
    machine = Machine(CONFIG)

    machine.run(submit("least", sampling=Sampling(repetition_penalty=LEAST_POSITIVE)))

    assert isinstance(machine.ending("least"), Finished)


def test_any_64_bit_seed_is_taken() -> None:
    machine = Machine(CONFIG)

    machine.run(submit("low", sampling=Sampling(seed=-(2**63))), submit("high", sampling=Sampling(seed=2**64 - 1)))

    assert isinstance(machine.ending("low"), Finished)
    assert isinstance(machine.ending("high"), Finished)


def test_row_that_is_not_a_number_fails_its_request_only_and_is_not_cached() -> None:
    vm = FakeVm(CONFIG.num_blocks, VOCAB, nan_after=999)
    machine = Machine(CONFIG, vm)
    poisoned = Submit("poisoned", [999] * 100, 8)  # its first chunk is published before the second fails

    machine.run(submit("before"), poisoned, submit("after", length=50))

    ending = machine.ending("poisoned")
    assert isinstance(ending, Failed)
    assert (ending.code, ending.has_started) == ("numerical_error", True)
    assert machine.tokens("before") == expected_tokens(submit("before"), 8)
    assert machine.tokens("after") == expected_tokens(submit("after", length=50), 8)
    machine.run(msgspec.structs.replace(poisoned, request_id="again"))
    assert machine.events["again"][0] == Started("again", 0)
    machine.scheduler.check()


def test_echo_scores_every_prompt_position_once_in_order_across_chunks() -> None:
    machine = Machine(CONFIG)
    machine.run(submit("warm", length=150))

    machine.run(submit("echo", length=150, echo_logprobs=3, max_tokens=1))

    echoes = [event for event in machine.events["echo"] if isinstance(event, EchoLogprobs)]
    positions = [event.start + offset for event in echoes for offset in range(len(event.logprobs))]
    assert positions == list(range(1, 150))
    assert len(echoes) > 1
    assert all(len(entry.top_ids) == 3 for event in echoes for entry in event.logprobs)


def test_logprobs_come_with_every_token_when_asked() -> None:
    machine = Machine(CONFIG)

    machine.run(submit(sampling=Sampling(num_logprobs=2)))

    tokens = [event for event in machine.events["r"] if isinstance(event, Tokens)]
    assert [len(event.logprobs) for event in tokens] == [1] * 8
    assert all(len(event.logprobs[0].top_ids) == 2 for event in tokens)


def test_failed_step_ends_its_requests_and_leaves_the_queue() -> None:
    machine = Machine(replace(CONFIG, max_sequences=1))
    machine.submit(submit("running"), submit("waiting"))
    plan = machine.scheduler.plan(0.0)
    assert plan is not None

    machine.scheduler.fail_step(plan, "engine_out_of_memory", "no memory for the step")
    machine.run()

    ending = machine.ending("running")
    assert isinstance(ending, Failed)
    assert ending.code == "engine_out_of_memory"
    assert isinstance(machine.ending("waiting"), Finished)
    machine.scheduler.check()


# Several decode steps in a row.


def batches(machine: Machine, request_id: str) -> list[list[int]]:
    return [event.ids for event in machine.events[request_id] if isinstance(event, Tokens)]


def test_tokens_of_steps_in_a_row_come_together_and_are_the_same() -> None:
    machine = Machine(CONFIG, max_steps=4)
    request = submit(max_tokens=10)

    machine.run(request)

    assert machine.tokens("r") == expected_tokens(request, 10)
    assert [len(ids) for ids in batches(machine, "r")] == [1, 4, 4, 1]
    assert machine.scheduler.totals.steps == 10
    assert machine.scheduler.totals.generation_tokens == 10
    machine.scheduler.check()


def test_steps_in_a_row_cross_pages_and_publish_them() -> None:
    machine = Machine(CONFIG, max_steps=8)
    request = submit(length=30, max_tokens=80)

    machine.run(request)
    machine.run(Submit("again", [*request.prompt_ids, *machine.tokens("r")], 1))

    assert machine.tokens("r") == expected_tokens(request, 80)
    assert machine.events["again"][0] == Started("again", 96)
    machine.scheduler.check()


def test_a_stop_id_ends_steps_in_a_row_for_its_request_alone() -> None:
    request = submit(max_tokens=20)
    other = submit("other", length=11, max_tokens=20)
    stop = expected_tokens(request, 4)[3]
    assert stop not in expected_tokens(other, 20)
    machine = Machine(CONFIG, max_steps=8)

    machine.run(msgspec.structs.replace(request, stop_token_ids=[stop]), other)

    ending = machine.ending("r")
    assert isinstance(ending, Finished)
    assert (ending.stop_token_id, ending.output_tokens) == (stop, 3)
    assert machine.tokens("r") == expected_tokens(request, 3)
    assert machine.tokens("other") == expected_tokens(other, 20)


def test_a_row_that_is_not_a_number_keeps_the_tokens_before_it() -> None:
    request = submit(max_tokens=20)
    bad = expected_tokens(request, 5)[4]
    machine = Machine(CONFIG, FakeVm(CONFIG.num_blocks, VOCAB, nan_after=bad), max_steps=8)

    machine.run(request)

    assert isinstance(machine.ending("r"), Failed)
    assert machine.tokens("r") == expected_tokens(request, 5)
    machine.scheduler.check()


@pytest.mark.parametrize(
    "changes",
    [
        {"sampling": Sampling(repetition_penalty=1.1)},
        {"sampling": Sampling(logit_bias={3: 1.0})},
        {"allowed_token_ids": list(range(VOCAB))},
        {"min_tokens": 20, "stop_token_ids": [5]},
    ],
    ids=["penalty", "bias", "mask", "min_tokens"],
)
def test_a_choice_that_depends_on_more_than_tokens_is_made_step_by_step(changes: dict[str, object]) -> None:
    machine = Machine(CONFIG, max_steps=8)

    machine.run(submit(max_tokens=20, **changes), submit("beside", length=12, max_tokens=20))

    assert all(len(ids) == 1 for ids in batches(machine, "r"))
    assert machine.tokens("beside") == expected_tokens(submit("beside", length=12), 20)


def test_who_could_be_let_in_is_not_kept_waiting_by_steps_in_a_row() -> None:
    machine = Machine(replace(CONFIG, num_blocks=16, context_tokens=512), max_steps=8)
    machine.submit(submit(length=100, max_tokens=100))
    machine.step()
    machine.step()
    machine.submit(submit("wide", length=480, max_tokens=1))  # needs more blocks than are left: it waits

    machine.step()
    machine.step()

    assert [len(ids) for ids in batches(machine, "r")][-2:] == [1, 1]


def test_a_full_house_runs_steps_in_a_row_though_others_wait() -> None:
    machine = Machine(CONFIG, max_steps=5)

    machine.submit(*(submit(f"r{index}", length=10 + index, max_tokens=30) for index in range(5)))
    for _ in range(3):
        machine.step()

    assert [len(ids) for ids in batches(machine, "r0")] == [1, 5, 5]
    assert machine.scheduler.num_waiting == 1


def test_steps_in_a_row_take_no_blocks_that_somebody_needs() -> None:
    config = replace(CONFIG, num_blocks=16, has_prefix_cache=False)
    machine = Machine(config, max_steps=8)
    requests = [submit(f"r{index}", length=110 + index, max_tokens=60) for index in range(4)]

    machine.run(*requests)

    for request in requests:
        assert machine.tokens(request.request_id) == expected_tokens(request, 60)
    machine.scheduler.check()


def test_log_probabilities_come_with_every_token_of_steps_in_a_row() -> None:
    machine = Machine(CONFIG, max_steps=4)

    machine.run(submit(max_tokens=9, sampling=Sampling(num_logprobs=2)))

    events = [event for event in machine.events["r"] if isinstance(event, Tokens)]
    for event in events:
        assert [entry.top_ids[0] for entry in event.logprobs] == event.ids
        assert all(len(entry.top_ids) == 2 for entry in event.logprobs)
