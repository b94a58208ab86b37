"""One long prompt among running streams, with steps that take what a cost model says."""

from __future__ import annotations

import pytest

from headrace.engine.scheduler import SchedulerConfig
from headrace.engine.step import Chunk, StepPlan
from headrace.protocol.frames import Submit
from headrace.testing.fake_vm import FakeVm
from headrace.testing.machine import Machine

STREAMS, PROMPT_TOKENS = 16, 4096
CONFIG = SchedulerConfig(
    vocab_size=1000,
    context_tokens=8192,
    eos_token_ids=frozenset(),
    num_blocks=800,
    max_sequences=32,
    max_step_tokens=512,
    has_prefix_cache=False,
)


def old_cores(plan: StepPlan) -> float:
    """The demo model on two cores of a Zen 3: weights, decode rows, and prompt rows that get dearer with each position
    before them (docs/lab/0007): 1 ms a row, 0.48 µs a row and position; of few rows each is a fifth dearer.
    """
    return 0.004 + sum(0.0015 if c.rows == 1 else prompt_s(c, 0.001, 4.8e-7) for c in plan.chunks)


def new_cores(plan: StepPlan) -> float:
    """The same on two cores of a Zen 5."""
    return 0.0013 + sum(0.0006 if c.rows == 1 else prompt_s(c, 0.0002, 1.2e-7) for c in plan.chunks)


def prompt_s(chunk: Chunk, row_s: float, position_s: float) -> float:
    few = 1.2 if chunk.rows < 64 else 1.0
    return few * chunk.rows * (row_s + (chunk.start + chunk.rows / 2) * position_s)


def first_token_s(machine: Machine, request: Submit) -> float:
    sent_at_s = machine.clock.now_s()
    machine.submit(request)
    while len(machine.events.get(request.request_id, ())) < 2:  # Started and its token
        machine.step()
    return machine.clock.now_s() - sent_at_s


@pytest.mark.parametrize("step_s", [old_cores, new_cores])
def test_streams_flow_on_while_a_long_prompt_is_read_and_it_is_read_soon(step_s: object) -> None:
    machine = Machine(CONFIG, FakeVm(CONFIG.num_blocks, CONFIG.vocab_size), step_s=step_s)
    prompt = [index % 999 for index in range(PROMPT_TOKENS)]
    idle_s = first_token_s(machine, Submit("idle", prompt, 1))
    for index in range(STREAMS):
        machine.submit(Submit(f"s{index}", [index + 1] * 20, 3000))
    for _ in range(40):
        machine.step()
    started_at_s = machine.clock.now_s()
    machine.step()
    quiet_gap_s = machine.clock.now_s() - started_at_s

    gaps_s = []
    sent_at_s = machine.clock.now_s()
    machine.submit(Submit("prompt", prompt, 1))
    while len(machine.events.get("prompt", ())) < 2:
        before_s, heard = machine.clock.now_s(), len(machine.events["s0"])
        machine.step()
        assert len(machine.events["s0"]) == heard + 1
        gaps_s.append(machine.clock.now_s() - before_s)

    gaps_s.sort()
    assert gaps_s[int(0.99 * len(gaps_s))] <= 2.0 * quiet_gap_s
    assert machine.clock.now_s() - sent_at_s <= 3.0 * idle_s
