"""The scheduler of models that make vectors: whole inputs in every step, turns between requests, one ending each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.encode_scheduler import EncodeConfig, EncodePlan, EncodeScheduler
from headrace.protocol.frames import (
    Encode,
    Encoded,
    EncodeForm,
    Event,
    Failed,
    Finished,
    FinishReason,
    Started,
    pack_ids,
)

CONFIG = EncodeConfig(vocab_size=100, width=8, context_tokens=16, max_sequences=4, max_step_tokens=20, queue_limit=5)


def encode_of(request_id: str, inputs: list[list[int]], **more: Any) -> Encode:
    return Encode(request_id, [pack_ids(ids) for ids in inputs], **more)


def vectors_of(plan: EncodePlan) -> np.ndarray:
    """A vector that tells its input: its tokens' sum in the first element, ones behind."""
    out = np.ones((len(plan.items), CONFIG.width), np.float32)
    out[:, 0] = [int(item.ids.sum()) for item in plan.items]
    return out


def run(scheduler: EncodeScheduler, now_s: float = 0.0) -> list[EncodePlan]:
    """Runs until nothing is left; returns the steps."""
    plans = []
    while (plan := scheduler.plan(now_s)) is not None:
        plans.append(plan)
        scheduler.complete(plan, vectors_of(plan), now_s)
    return plans


def first_elements(events: list[Event]) -> dict[int, float]:
    return {e.index: float(np.frombuffer(e.vector, "<f4")[0]) for e in events if isinstance(e, Encoded)}


def test_every_input_comes_back_in_order_and_the_request_ends_once() -> None:
    scheduler = EncodeScheduler(CONFIG)
    inputs = [[1] * length for length in (3, 16, 1, 7, 5, 2)]
    scheduler.submit(1, encode_of("a", inputs), 0.0)

    run(scheduler)
    events = scheduler.take_events()[1]

    assert isinstance(events[0], Started)
    assert [event.index for event in events if isinstance(event, Encoded)] == list(range(6))
    assert first_elements(events) == {index: len(ids) for index, ids in enumerate(inputs)}
    ending = events[-1]
    assert isinstance(ending, Finished)
    assert (ending.reason, ending.prompt_tokens, ending.output_tokens) == (FinishReason.STOP, 34, 0)
    assert not scheduler.has_work


def test_a_step_holds_no_more_marks_than_it_has_room_for() -> None:
    scheduler = EncodeScheduler(replace(CONFIG, forms=(EncodeForm.POOLED, EncodeForm.MASKED), max_marks=5))
    masks = {"form": EncodeForm.MASKED, "num_top": 1}
    scheduler.submit(0, encode_of("a", [[1] * 4] * 3, marks=[[0, 1], [0, 1, 2, 3], [2]], **masks), 0.0)
    scheduler.submit(0, encode_of("b", [[1] * 4]), 0.0)

    plans = run(scheduler)

    assert [sum(len(item.marks) for item in plan.items) for plan in plans] == [2, 5]
    assert [len(plan.items) for plan in plans] == [2, 2]  # b's text went beside the first


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=16), min_size=1, max_size=9), min_size=1, max_size=5
    )
)
def test_no_step_is_too_large_and_none_is_left_empty(batches: list[list[list[int]]]) -> None:
    scheduler = EncodeScheduler(CONFIG)
    for number, inputs in enumerate(batches):
        scheduler.submit(0, encode_of(f"r{number}", inputs), 0.0)

    plans = run(scheduler)

    assert all(0 < plan.num_rows <= CONFIG.max_step_tokens for plan in plans)
    assert all(plan.num_rows == sum(len(item.ids) for item in plan.items) for plan in plans)
    assert all(len(plan.items) <= CONFIG.max_sequences for plan in plans)
    events = scheduler.take_events()[0]
    for number, inputs in enumerate(batches):
        own = [event for event in events if event.request_id == f"r{number}"]
        assert first_elements(own) == {index: sum(ids) for index, ids in enumerate(inputs)}
        assert [type(event) for event in own].count(Finished) == 1


def test_a_large_batch_delays_a_single_text_by_one_step() -> None:
    scheduler = EncodeScheduler(CONFIG)
    scheduler.submit(1, encode_of("batch", [[1] * 10] * 100), 0.0)
    for _ in range(3):
        plan = scheduler.plan(0.0)
        assert plan is not None
        scheduler.complete(plan, vectors_of(plan), 0.0)
    scheduler.submit(2, encode_of("single", [[5] * 10]), 0.0)

    plan = scheduler.plan(0.0)

    assert plan is not None
    assert "single" in [item.request.encode.request_id for item in plan.items]


def test_a_lower_priority_number_goes_first() -> None:
    scheduler = EncodeScheduler(CONFIG)
    scheduler.submit(1, encode_of("late", [[1] * 16] * 3, priority=1), 0.0)
    scheduler.submit(1, encode_of("soon", [[1] * 16] * 3, priority=0), 0.0)

    order = [item.request.encode.request_id for plan in run(scheduler) for item in plan.items]

    assert order == ["soon"] * 3 + ["late"] * 3


def test_a_vector_that_is_not_a_number_fails_its_own_request_only() -> None:
    scheduler = EncodeScheduler(CONFIG)
    scheduler.submit(1, encode_of("bad", [[1]]), 0.0)
    scheduler.submit(2, encode_of("good", [[2]]), 0.0)
    plan = scheduler.plan(0.0)
    assert plan is not None
    vectors = vectors_of(plan)
    vectors[[item.request.encode.request_id == "bad" for item in plan.items], 3] = np.nan

    scheduler.complete(plan, vectors, 0.0)
    events = scheduler.take_events()

    failed = events[1][-1]
    assert isinstance(failed, Failed)
    assert failed.code == "numerical_error"
    assert isinstance(events[2][-1], Finished)


def test_dimensions_are_cut_and_brought_to_length_one() -> None:
    scheduler = EncodeScheduler(CONFIG)
    scheduler.submit(1, encode_of("a", [[3]], dimensions=2), 0.0)

    run(scheduler)
    (vector,) = [np.frombuffer(e.vector, "<f4") for e in scheduler.take_events()[1] if isinstance(e, Encoded)]

    assert np.allclose(vector, np.array([3, 1]) / np.sqrt(10), atol=1e-7)


@pytest.mark.parametrize(
    ("encode", "word"),
    [
        (encode_of("x", []), "input is 0"),
        (encode_of("x", [[1], []]), "input 1 has 0 tokens"),
        (encode_of("x", [[1] * 17]), "maximum context length is 16"),
        (encode_of("x", [[100]]), "100"),
        (Encode("x", [b"\1\0\0\0\1"]), "input 0 has 1.25 tokens"),
        (encode_of("x", [[1]], dimensions=9), "dimensions is 9"),
        (encode_of("x", [[1]], timeout_s=float("nan")), "timeout_s"),
    ],
)
def test_what_cannot_run_is_refused_with_the_reason(encode: Encode, word: str) -> None:
    scheduler = EncodeScheduler(CONFIG)

    scheduler.submit(1, encode, 0.0)
    (failed,) = scheduler.take_events()[1]

    assert isinstance(failed, Failed)
    assert word in failed.message
    assert not scheduler.has_work


def test_late_aborted_and_orphaned_requests_end() -> None:
    scheduler = EncodeScheduler(CONFIG)
    scheduler.submit(1, encode_of("late", [[1]], timeout_s=1.0), 0.0)
    scheduler.submit(2, encode_of("aborted", [[1]]), 0.0)
    scheduler.submit(3, encode_of("orphan", [[1]]), 0.0)
    scheduler.abort(2, "aborted", 0.5)
    scheduler.abort(2, "unknown", 0.5)

    assert scheduler.abort_owner(3) == 1
    assert scheduler.plan(1.5) is None
    events = scheduler.take_events()

    assert [(type(e), getattr(e, "code", None)) for e in events[1]] == [(Failed, "generation_timeout")]
    assert [e.reason for e in events[2] if isinstance(e, Finished)] == [FinishReason.ABORTED]
    assert 3 not in events


def test_a_request_that_ends_while_its_step_runs_takes_nothing_more() -> None:
    scheduler = EncodeScheduler(CONFIG)
    scheduler.submit(1, encode_of("a", [[1], [2]]), 0.0)
    plan = scheduler.plan(0.0)
    assert plan is not None
    scheduler.abort(1, "a", 0.0)

    scheduler.complete(plan, vectors_of(plan), 0.0)

    assert [type(event) for event in scheduler.take_events()[1]] == [Started, Finished]


def test_the_queue_has_a_limit_and_a_failed_step_ends_its_requests() -> None:
    scheduler = EncodeScheduler(CONFIG)
    for number in range(6):
        scheduler.submit(1, encode_of(f"r{number}", [[1] * 10]), 0.0)
    (refused,) = scheduler.take_events()[1]
    assert isinstance(refused, Failed)
    assert refused.code == "queue_full" or "limit is 5" in refused.message
    plan = scheduler.plan(0.0)
    assert plan is not None

    scheduler.fail_step(plan, "engine_error", "broken")

    failed = [event.request_id for event in scheduler.take_events()[1] if isinstance(event, Failed)]
    assert failed == [item.request.encode.request_id for item in plan.items]
    scheduler.fail_all("engine_error", "broken")
    assert not scheduler.has_work
