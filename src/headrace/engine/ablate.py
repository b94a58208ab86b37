"""Measures what each fusion brings: the model op by op, then one fusion more at a time, up to the program that ships.

All stages run the same kernels over the same weights in VMs of the same build, with as many threads, and must give the
same tokens (``program.unfuse``). A round runs every stage for a few steps, one after the other, so that a slow second
of the machine meets all of them; what a fusion brings is the median over the rounds of one stage's time through the
next's.
Times are those of the VM call: planning and bookkeeping are the same for all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median, quantiles

import msgspec
import numpy as np

from headrace.base.clock import Clock
from headrace.base.errors import ConfigError, EngineError
from headrace.engine.bench import TimedVm, count_layouts, probe
from headrace.engine.executor import Executor
from headrace.engine.loader import Inspection, choose_isa, inspect, make_executor, make_vm, read_weights
from headrace.engine.scheduler import Scheduler
from headrace.program.cost import Work, step_cost
from headrace.program.encode import encode
from headrace.program.unfuse import STAGES, Cutter, Fusion, unfuse
from headrace.program.verify import verify
from headrace.program.verify_lowered import verify_encoded
from headrace.protocol.frames import Failed, Sampling, Submit, Tokens
from headrace.protocol.launch import WorkerLaunch

ABLATE_BATCHES = (1, 8)
ABLATE_PREFILLS = (512,)
_PROMPT_TOKENS = 128
_DECODE_ROUNDS = 12
_PREFILL_ROUNDS = 4
# Of a stage's turn: the first steps wake its threads and bring its code and small buffers into the caches.
_WARM_STEPS, _TIMED_STEPS = 2, 5
_NAMES = {
    Fusion.QUANTISE: "+ quantising in the product",
    Fusion.NORM: "+ norm in the product",
    Fusion.GATE: "+ gate, up and activation as one",
    Fusion.RESIDUAL: "+ residual added by the product",
    Fusion.QKV: "+ q, k, v as one",
    Fusion.ROTATE: "+ RoPE and KV write in the product",
    Fusion.HEAD: "+ sampling in the head",
}


@dataclass(frozen=True, slots=True)
class StageTime:
    """How long a stage takes in one shape.

    Args:
        shape: ``decode c=8``, ``prefill 512``.
        token_s: median of the VM call per token of it: of a decode step ÷ its sequences, of a prefill ÷ its tokens.
        token_low_s, token_high_s: 10th and 90th percentile.
        gain: time of the stage before ÷ this one's, median over the rounds; 1 for the first.
        total: time of the first stage ÷ this one's, likewise.
        bandwidth_ratio: bytes that the fused program must move ÷ time ÷ bandwidth, the probe's mean.
    """

    shape: str
    token_s: float
    token_low_s: float
    token_high_s: float
    gain: float
    total: float
    bandwidth_ratio: float


@dataclass(frozen=True, slots=True)
class Stage:
    """One form of the program; ``instructions`` is also how many barriers a step has between them."""

    name: str
    program_digest: str
    instructions: int
    times: tuple[StageTime, ...]


@dataclass(frozen=True, slots=True)
class AblateReport:
    """All stages, the shipped program last."""

    model: str
    model_digest: str
    isa: str
    threads: int
    dtype: str
    quantization: str
    layouts: dict[str, int]
    weight_bytes: int
    bandwidth_before: float
    bandwidth_after: float
    rounds: dict[str, int]
    stages: tuple[Stage, ...]


def run_ablation(
    launch: WorkerLaunch,
    clock: Clock,
    *,
    decode_batches: Sequence[int] = ABLATE_BATCHES,
    prefill_lengths: Sequence[int] = ABLATE_PREFILLS,
    decode_rounds: int = _DECODE_ROUNDS,
    prefill_rounds: int = _PREFILL_ROUNDS,
    progress: Callable[[str], None] = lambda what: None,
) -> AblateReport:
    """Loads the model once and measures all stages of its program; lengths that its context does not hold are left out.

    Raises:
        ConfigError: the model makes vectors.
        ModelError, MachineError: as loading does.
        EngineError: a stage chose another token than the others, or a request failed.
    """
    inspection = _inspect(launch, decode_batches)
    isa = choose_isa(launch)
    weights = read_weights(inspection, lambda stage, ratio: progress(stage))
    cutter = Cutter(weights)
    arms = [_Arm(inspection, cutter, isa, stage, clock) for stage in range(STAGES)]
    bandwidth_before = probe(inspection)
    runs: list[_Shape] = []
    context_tokens = inspection.pool.context_tokens
    random = np.random.default_rng(0)

    def prompts(count: int, length: int) -> list[list[int]]:
        return [random.integers(0, inspection.spec.vocab_size, length).tolist() for _ in range(count)]

    for batch in decode_batches:
        progress(f"decode c={batch}")
        length = min(_PROMPT_TOKENS, context_tokens // 2)
        rounds = min(decode_rounds, (context_tokens - length - 1) // (_WARM_STEPS + _TIMED_STEPS))
        shape = _decode(arms, prompts(batch, length), rounds)
        work = Work(batch, batch, [length + rounds * (_WARM_STEPS + _TIMED_STEPS) // 2] * batch)
        runs.append(replace(shape, bytes_moved=_bytes_moved(inspection, work)))
    for length in prefill_lengths:
        if length < context_tokens:
            progress(f"prefill {length}")
            shape = _prefill(arms, prompts(1, length)[0], prefill_rounds)
            chunk = inspection.scheduler_config.max_step_tokens
            moved = sum(
                _bytes_moved(inspection, Work(stop - start, int(stop == length), range(start + 1, stop + 1)))
                for start, stop in ((start, min(start + chunk, length)) for start in range(0, length, chunk))
            )
            runs.append(replace(shape, bytes_moved=moved))
    bandwidth_after = probe(inspection)
    bandwidth = (bandwidth_before + bandwidth_after) / 2
    return AblateReport(
        model=launch.served_name,
        model_digest=inspection.files.digest,
        isa=isa,
        threads=launch.threads,
        dtype=launch.dtype,
        quantization=launch.quantization,
        layouts=count_layouts(inspection),
        weight_bytes=inspection.weight_bytes,
        bandwidth_before=bandwidth_before,
        bandwidth_after=bandwidth_after,
        rounds={run.name: len(run.times_s[0]) for run in runs},
        stages=tuple(
            Stage(
                name=_NAMES[Fusion(index)] if index else "op by op",
                program_digest=arm.digest,
                instructions=arm.num_instructions,
                times=tuple(run.stage_time(index, bandwidth) for run in runs),
            )
            for index, arm in enumerate(arms)
        ),
    )


def ablation_table(report: AblateReport) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Returns columns and rows: a stage a line, its time per token and what its fusion brought in each shape."""
    shapes = [time.shape for time in report.stages[0].times]
    columns = ("stage", "instructions", *(title for shape in shapes for title in (f"{shape}, ms a token", "gain")))
    rows = [
        (
            stage.name,
            str(stage.instructions),
            *(
                cell
                for time in stage.times
                for cell in (f"{time.token_s * 1e3:.3f}", f"{time.gain - 1:+.1%}" if number else "")
            ),
        )
        for number, stage in enumerate(report.stages)
    ]
    totals = (cell for time in report.stages[-1].times for cell in (f"× {time.total:.2f}", f"{time.total - 1:+.1%}"))
    return columns, [*rows, ("all of them", "", *totals)]


def ablation_head(report: AblateReport) -> str:
    """Returns the lines that stand above the table."""
    layouts = ", ".join(f"{count} × {name}" for name, count in report.layouts.items())
    shares = ", ".join(f"{time.shape} {time.bandwidth_ratio:.0%}" for time in report.stages[-1].times)
    return (
        f"{report.model} ({report.model_digest[:12]}), {report.weight_bytes / 1e6:.1f} MB of weights ({layouts}), "
        f"dtype {report.dtype}, quantization {report.quantization}\n"
        f"isa {report.isa}, {report.threads} threads; memory bandwidth "
        f"{report.bandwidth_before / 1e9:.1f} GB/s before, {report.bandwidth_after / 1e9:.1f} GB/s after; "
        f"the last stage reads at {shares} of it\n"
        "the same tokens in all stages; gain: time of the line before ÷ this one's, median of "
        + ", ".join(f"{count} rounds ({shape})" for shape, count in report.rounds.items())
    )


@dataclass(frozen=True, slots=True)
class _Shape:
    """Raw times of one shape: per stage and round the times of the VM calls, each over ``tokens`` tokens."""

    name: str
    tokens: int
    times_s: list[list[list[float]]]
    bytes_moved: int = 0

    def stage_time(self, stage: int, bandwidth: float) -> StageTime:
        times_s = [time_s for round_s in self.times_s[stage] for time_s in round_s]
        step_s = median(times_s)
        tenths = quantiles(times_s, n=10, method="inclusive") if len(times_s) > 1 else [step_s]
        return StageTime(
            shape=self.name,
            token_s=step_s / self.tokens,
            token_low_s=tenths[0] / self.tokens,
            token_high_s=tenths[-1] / self.tokens,
            gain=self._ratio(max(stage - 1, 0), stage),
            total=self._ratio(0, stage),
            bandwidth_ratio=self.bytes_moved / step_s / bandwidth,
        )

    def _ratio(self, one: int, other: int) -> float:
        pairs = zip(self.times_s[one], self.times_s[other], strict=True)
        return median(median(slow) / median(fast) for slow, fast in pairs)


class _Arm:
    """One stage's VM, and the requests that run on it."""

    def __init__(self, inspection: Inspection, cutter: Cutter, isa: str, stage: int, clock: Clock) -> None:
        unfused = unfuse(inspection.program, stage)
        verify(unfused.program)
        self._config = inspection.scheduler_config
        encoded = encode(unfused.program, inspection.encoded.limits)
        verify_encoded(unfused.program, encoded)
        self._vm = TimedVm(make_vm(inspection, encoded, cutter.weights_of(unfused), isa), clock)
        self._clock = clock
        self.digest = unfused.program.digest
        self.num_instructions = len(unfused.program.instructions)
        self.tokens: dict[str, list[int]] = {}
        self._scheduler, self._executor = self._engine()

    def _engine(self) -> tuple[Scheduler, Executor]:
        return Scheduler(self._config), make_executor(self._vm, self._config)

    def start(self, prompts: Sequence[list[int]], max_tokens: int) -> float:
        """Forgets what ran before and runs the prompts up to their first tokens; returns the VM's seconds."""
        self._scheduler, self._executor = self._engine()
        self.tokens = {}
        greedy = Sampling(temperature=0.0)
        for number, prompt in enumerate(prompts):
            request = Submit(f"ablate-{number}", prompt, max_tokens, greedy, ignore_eos=True)
            self._scheduler.submit(0, request, self._clock.now_s())
        total_s = 0.0
        while len(self.tokens) < len(prompts):
            total_s += self.step()
        return total_s

    def step(self) -> float:
        """Runs one step; returns the VM's seconds."""
        plan = self._scheduler.plan(self._clock.now_s())
        assert plan is not None
        self._scheduler.complete(plan, self._executor.run(plan), self._clock.now_s())
        for event in self._scheduler.take_events().get(0, []):
            match event:
                case Tokens():
                    self.tokens.setdefault(event.request_id, []).extend(event.ids)
                case Failed():
                    raise EngineError(event.message)
                case _:
                    pass
        return self._vm.step_s


class OneStage:
    """One stage of a model's program alone, to be measured beside other engines, one sequence at a time.

    Args:
        stage: 0 is op by op, ``STAGES - 1`` the program that ships.

    Raises:
        ConfigError: the model makes vectors.
        ModelError, MachineError: as loading does.
    """

    def __init__(self, launch: WorkerLaunch, clock: Clock, stage: int) -> None:
        inspection = _inspect(launch, ())
        weights = read_weights(inspection, lambda what, ratio: None)
        self._arm = _Arm(inspection, Cutter(weights), choose_isa(launch), stage, clock)

    def prefill_s(self, prompt: list[int]) -> float:
        """Returns the VM's seconds up to the first token."""
        return self._arm.start([prompt], 1)

    def decode_s(self, prompt: list[int], tokens: int) -> float:
        """Returns the VM's seconds for so many tokens after the first."""
        self._arm.start([prompt], tokens + 1)
        total_s = 0.0
        while sum(map(len, self._arm.tokens.values())) <= tokens:
            total_s += self._arm.step()
        return total_s


def _inspect(launch: WorkerLaunch, batches: Sequence[int]) -> Inspection:
    launch = msgspec.structs.replace(launch, prefix_cache=False, max_sequences=max(launch.max_sequences, *batches, 1))
    inspection = inspect(launch)
    if inspection.encode_config is not None:
        raise ConfigError("--ablate measures models that generate, and this one makes vectors")
    return inspection


def _decode(arms: Sequence[_Arm], prompts: list[list[int]], rounds: int) -> _Shape:
    turn = _WARM_STEPS + _TIMED_STEPS
    for arm in arms:
        arm.start(prompts, rounds * turn + 1)
    times_s: list[list[list[float]]] = [[] for _ in arms]
    for number in range(rounds):
        for stage in _turned(len(arms), number):
            times_s[stage].append([arms[stage].step() for _ in range(turn)][_WARM_STEPS:])
    _check_tokens(arms)
    return _Shape(f"decode c={len(prompts)}", len(prompts), times_s)


def _prefill(arms: Sequence[_Arm], prompt: list[int], rounds: int) -> _Shape:
    times_s: list[list[list[float]]] = [[] for _ in arms]
    for number in range(rounds + 1):
        for stage in _turned(len(arms), number):
            times_s[stage].append([arms[stage].start([prompt], 1)])
        _check_tokens(arms)
    return _Shape(f"prefill {len(prompt)}", len(prompt), [rounds_s[1:] for rounds_s in times_s])


def _turned(count: int, first: int) -> list[int]:
    return [(first + offset) % count for offset in range(count)]


def _check_tokens(arms: Sequence[_Arm]) -> None:
    for stage, arm in enumerate(arms):
        if arm.tokens != arms[-1].tokens:
            raise EngineError(f"stage {stage} of the program chose other tokens than the whole one")


def _bytes_moved(inspection: Inspection, work: Work) -> int:
    return step_cost(inspection.program, inspection.layouts, inspection.kv_type, work).bytes_moved
