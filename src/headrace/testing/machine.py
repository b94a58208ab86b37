"""A whole engine without a model or a process: scheduler, executor and a fake (or real) VM, stepped by hand."""

from __future__ import annotations

from collections.abc import Callable

from headrace.base.clock import ManualClock
from headrace.engine.executor import Executor, StepVm
from headrace.engine.scheduler import Scheduler, SchedulerConfig
from headrace.engine.step import StepPlan
from headrace.protocol.frames import Event, Failed, Finished, Submit, Tokens
from headrace.testing.fake_vm import FakeVm

OWNER = 1


class Machine:
    """Steps a scheduler and remembers what every request heard.

    Args:
        config: the scheduler's limits.
        vm: what computes; a ``FakeVm`` of the right size by default.
        step_s: how far the clock moves per step, or a function of its plan.
        max_steps: decode steps that may be run in a row; may be changed between steps.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        vm: StepVm | None = None,
        *,
        step_s: float | Callable[[StepPlan], float] = 0.001,
        max_steps: int = 1,
    ) -> None:
        self.max_steps = max_steps
        self.clock = ManualClock()
        self.scheduler = Scheduler(config)
        self.executor = Executor(
            vm or FakeVm(config.num_blocks, config.vocab_size),
            max_rows=config.max_step_tokens,
            max_sequences=config.max_sequences,
            context_tokens=config.context_tokens,
            vocab_size=config.vocab_size,
        )
        self.events: dict[str, list[Event]] = {}
        self.peak_running = 0
        self._step_s = step_s

    def submit(self, *submits: Submit) -> None:
        """Queues requests."""
        for submit in submits:
            self.scheduler.submit(OWNER, submit, self.clock.now_s())
        self._hear()

    def abort(self, request_id: str) -> None:
        """Aborts a request."""
        self.scheduler.abort(OWNER, request_id, self.clock.now_s())
        self._hear()

    def step(self) -> bool:
        """Runs one step; returns whether there was anything to run."""
        plan = self.scheduler.plan(self.clock.now_s(), self.max_steps)
        self.peak_running = max(self.peak_running, self.scheduler.num_running)
        if callable(self._step_s):
            self.clock.advance(0.0 if plan is None else self._step_s(plan))
        else:
            self.clock.advance(self._step_s)
        if plan is not None:
            self.scheduler.complete(plan, self.executor.run(plan), self.clock.now_s())
        self._hear()
        return plan is not None

    def run(self, *submits: Submit, max_steps: int = 100_000) -> None:
        """Queues requests and steps until nothing is left."""
        self.submit(*submits)
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError(f"still busy after {max_steps} steps")

    def tokens(self, request_id: str) -> list[int]:
        """Returns the tokens that a request heard."""
        return [token for event in self.events[request_id] if isinstance(event, Tokens) for token in event.ids]

    def ending(self, request_id: str) -> Finished | Failed:
        """Returns how a request ended; exactly one ending, and nothing behind it."""
        events = self.events[request_id]
        endings = [event for event in events if isinstance(event, Finished | Failed)]
        assert len(endings) == 1, f"{request_id} heard {len(endings)} endings"
        assert events[-1] is endings[0]
        return endings[0]

    def _hear(self) -> None:
        for owner, events in self.scheduler.take_events().items():
            assert owner == OWNER
            for event in events:
                self.events.setdefault(event.request_id, []).append(event)
