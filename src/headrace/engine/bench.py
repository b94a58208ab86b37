"""Measures the engine alone, without HTTP: decode at several batch sizes, prefill at several lengths.

Every step is a whole engine step (plan, VM call, bookkeeping, frame encoding), as the worker runs it; of several decode
steps in a row each takes its share. Beside each
median stand what the step had to move (``program.cost``) and its share of the bandwidth that was probed, before and
after, on a buffer as large as the weights: memory on shared machines has fast and slow hours, and a speed without its
hour says little. Prompts are random and fresh, and the prefix cache is off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median, quantiles

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.base.clock import Clock
from headrace.base.errors import EngineError
from headrace.engine.encode_bench import SHAPES, time_encoding
from headrace.engine.executor import Executor, Float32s, Int32s, StepVm
from headrace.engine.loader import Inspection, inspect, load, make_executor
from headrace.engine.pace import Pace
from headrace.engine.scheduler import Scheduler
from headrace.policy.burst import burst_steps
from headrace.program.cost import Arithmetic, Work, arithmetic_of, limit_s, step_cost
from headrace.protocol.frames import Failed, Sampling, Step, Submit, encode_frame
from headrace.protocol.launch import WorkerLaunch

DECODE_BATCHES = (1, 8, 32)
PREFILL_LENGTHS = (512, 2048)
_PROMPT_TOKENS = 128
_DECODE_STEPS = 64
_WARM_STEPS = 4
_PREFILL_REPEATS = 5
_PROBE_S = 0.2
_LEAST_PROBE_BYTES = 64 * 2**20  # above any cache of today, so that a small model is not compared with its L3


@dataclass(frozen=True, slots=True)
class Measure:
    """One row of the report.

    Args:
        name: ``decode c=8``, ``prefill 512``, ``encode 32×256`` (texts, tokens of each).
        tokens_per_s: of the median step (decode) or run (prefill), all sequences together.
        step_s, step_low_s, step_high_s: median, 10th and 90th percentile of a step (decode) or run (prefill).
        overhead_s: median of the time outside the VM call per step.
        bytes_moved: what a step must move.
        bandwidth_ratio: bytes moved ÷ median step ÷ bandwidth, the probe's mean of before and after.
        operations_per_s: multiply and add counted as two.
        limit_s: the least that the machine needs for a step or run, by ``program.cost.limit_s``.
        limit_ratio: share of that limit that the median reaches.
    """

    name: str
    tokens_per_s: float
    step_s: float
    step_low_s: float
    step_high_s: float
    overhead_s: float
    bytes_moved: int
    bandwidth_ratio: float
    operations_per_s: float
    limit_s: float
    limit_ratio: float


@dataclass(frozen=True, slots=True)
class BenchReport:
    """Everything that a speed needs beside it to mean something.

    Args:
        bandwidth_before, bandwidth_after: bytes per second, probed on a buffer as large as the weights.
        arithmetic: what most weights are multiplied in; ``peak_before``, ``peak_after``: its operations per second.
    """

    model: str
    model_digest: str
    program_digest: str
    isa: str
    threads: int
    dtype: str
    quantization: str
    layouts: dict[str, int]
    weight_bytes: int
    load_s: float
    bandwidth_before: float
    bandwidth_after: float
    arithmetic: str
    peak_before: float
    peak_after: float
    measures: tuple[Measure, ...]


def run_bench(
    launch: WorkerLaunch,
    clock: Clock,
    *,
    decode_batches: Sequence[int] = DECODE_BATCHES,
    prefill_lengths: Sequence[int] = PREFILL_LENGTHS,
    decode_steps: int = _DECODE_STEPS,
    progress: Callable[[str], None] = lambda what: None,
) -> BenchReport:
    """Loads the model and measures it; lengths that its context does not hold are left out.

    A model that makes vectors is measured in ``encode_bench.SHAPES``; batches and lengths are not for it.

    Raises:
        ModelError, ConfigError, MachineError: as loading does.
        EngineError: a request of the measurement failed.
    """
    needed = max(decode_batches, default=1)
    launch = msgspec.structs.replace(launch, prefix_cache=False, max_sequences=max(launch.max_sequences, needed))
    inspection = inspect(launch)
    started_at_s = clock.now_s()
    loaded = load(inspection, clock, lambda stage, ratio: progress(stage))
    load_s = clock.now_s() - started_at_s
    arithmetic = _main_arithmetic(inspection)

    def peak_now() -> float:
        from headrace.kernels.vm import probe_peak

        return probe_peak(loaded.isa, arithmetic, launch.threads)

    bandwidth_before, peak_before = probe(inspection), peak_now()
    runs: list[_Run] = []
    if inspection.encode_config is not None:
        for num_texts, length in SHAPES:
            if length <= inspection.pool.context_tokens:
                name = f"encode {num_texts}×{length}"
                progress(name)
                times = time_encoding(inspection, loaded, clock, num_texts, length)
                cost = (times.bytes_moved, times.operations)
                runs.append(_Run(name, num_texts * length, times.times_s, times.overheads_s, *cost))
    else:
        bench = _Bench(inspection, loaded.vm, clock)
        for batch in decode_batches:
            progress(f"decode c={batch}")
            runs.append(bench.decode(batch, decode_steps))
        for length in prefill_lengths:
            if length < inspection.pool.context_tokens:
                progress(f"prefill {length}")
                runs.append(bench.prefill(length))
    bandwidth_after, peak_after = probe(inspection), peak_now()
    bandwidth, peak = (bandwidth_before + bandwidth_after) / 2, (peak_before + peak_after) / 2
    return BenchReport(
        model=launch.served_name,
        model_digest=inspection.files.digest,
        program_digest=inspection.program.digest,
        isa=loaded.isa,
        threads=launch.threads,
        dtype=launch.dtype,
        quantization=launch.quantization,
        layouts=count_layouts(inspection),
        weight_bytes=inspection.weight_bytes,
        load_s=load_s,
        bandwidth_before=bandwidth_before,
        bandwidth_after=bandwidth_after,
        arithmetic=arithmetic.name.lower(),
        peak_before=peak_before,
        peak_after=peak_after,
        measures=tuple(run.measure(bandwidth, peak) for run in runs),
    )


def probe(inspection: Inspection) -> float:
    """Returns the bytes a second that memory gives now, on as many bytes as the weights: median of three probes."""
    from headrace.kernels.vm import probe_bandwidth

    size_bytes = max(inspection.weight_bytes, _LEAST_PROBE_BYTES)
    return median(probe_bandwidth(size_bytes, inspection.launch.threads, _PROBE_S) for _ in range(3))


def report_table(report: BenchReport) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Returns columns and rows for a table of the measures."""
    columns = ("measure", "tok/s", "step ms", "10–90 %", "Python µs", "MB moved", "of bandwidth", "GFLOP/s", "of limit")
    rows: list[tuple[str, ...]] = [
        (
            row.name,
            f"{row.tokens_per_s:,.1f}",
            f"{row.step_s * 1e3:.2f}",
            f"{row.step_low_s * 1e3:.2f}–{row.step_high_s * 1e3:.2f}",
            f"{row.overhead_s * 1e6:.0f}",
            f"{row.bytes_moved / 1e6:,.1f}",
            f"{row.bandwidth_ratio:.0%}",
            f"{row.operations_per_s / 1e9:,.1f}",
            f"{row.limit_ratio:.0%}",
        )
        for row in report.measures
    ]
    return columns, rows


def report_head(report: BenchReport) -> str:
    """Returns the lines that stand above the table: what was measured, on what, in which hour of the memory."""
    layouts = ", ".join(f"{count} × {name}" for name, count in report.layouts.items())
    return (
        f"{report.model} ({report.model_digest[:12]}), {report.weight_bytes / 1e6:.1f} MB of weights ({layouts}), "
        f"dtype {report.dtype}, quantization {report.quantization}\n"
        f"isa {report.isa}, {report.threads} threads, loaded in {report.load_s:.2f} s; memory bandwidth "
        f"{report.bandwidth_before / 1e9:.1f} GB/s before, {report.bandwidth_after / 1e9:.1f} GB/s after; "
        f"{report.arithmetic} peak {report.peak_before / 1e9:,.0f} Gop/s before, {report.peak_after / 1e9:,.0f} after"
    )


@dataclass(frozen=True, slots=True)
class _Run:
    """Raw times of one measure. ``tokens`` and costs belong to one entry of ``times_s``."""

    name: str
    tokens: int
    times_s: list[float]
    overheads_s: list[float]
    bytes_moved: int
    operations: int

    def measure(self, bandwidth: float, peak: float) -> Measure:
        step_s = median(self.times_s)
        least_s = limit_s(self.bytes_moved, self.operations, bandwidth=bandwidth, peak=peak)
        tenths = quantiles(self.times_s, n=10, method="inclusive")
        return Measure(
            name=self.name,
            tokens_per_s=self.tokens / step_s,
            step_s=step_s,
            step_low_s=tenths[0],
            step_high_s=tenths[-1],
            overhead_s=median(self.overheads_s),
            bytes_moved=self.bytes_moved,
            bandwidth_ratio=self.bytes_moved / step_s / bandwidth,
            operations_per_s=self.operations / step_s,
            limit_s=least_s,
            limit_ratio=least_s / step_s,
        )


class TimedVm:
    """Passes steps through and notes how long they take."""

    def __init__(self, vm: StepVm, clock: Clock) -> None:
        self._vm = vm
        self._clock = clock
        self.step_s = 0.0

    def use_threads(self, count: int) -> None:
        """Passes it on."""
        self._vm.use_threads(count)

    def step(
        self,
        tokens: Int32s,
        positions: Int32s,
        seq_starts: Int32s,
        block_tables: Int32s,
        outputs: npt.NDArray[np.void],
        *,
        count_ids: Int32s,
        counts: Int32s,
        bias_ids: Int32s,
        bias_values: Float32s,
        masks: npt.NDArray[np.uint32],
    ) -> tuple[npt.NDArray[np.void], Int32s, Float32s]:
        """Runs one step."""
        started_at_s = self._clock.now_s()
        result = self._vm.step(
            tokens,
            positions,
            seq_starts,
            block_tables,
            outputs,
            count_ids=count_ids,
            counts=counts,
            bias_ids=bias_ids,
            bias_values=bias_values,
            masks=masks,
        )
        self.step_s = self._clock.now_s() - started_at_s
        return result

    def decode(
        self,
        tokens: Int32s,
        positions: Int32s,
        seq_starts: Int32s,
        block_tables: Int32s,
        outputs: npt.NDArray[np.void],
        *,
        num_steps: int,
        stop_ids: Int32s,
        stop_starts: Int32s,
        wake_fd: int,
    ) -> tuple[npt.NDArray[np.void], Int32s, Float32s]:
        """Runs decode steps in a row."""
        started_at_s = self._clock.now_s()
        result = self._vm.decode(
            tokens,
            positions,
            seq_starts,
            block_tables,
            outputs,
            num_steps=num_steps,
            stop_ids=stop_ids,
            stop_starts=stop_starts,
            wake_fd=wake_fd,
        )
        self.step_s = self._clock.now_s() - started_at_s
        return result


class _Bench:
    """Runs requests step by step and times the steps."""

    def __init__(self, inspection: Inspection, vm: StepVm, clock: Clock) -> None:
        self._inspection = inspection
        self._vm = TimedVm(vm, clock)
        self._clock = clock
        self._random = np.random.default_rng(0)
        self._num_requests = 0
        self._pace = Pace(inspection.scheduler_config.max_step_tokens)

    def decode(self, batch: int, num_steps: int) -> _Run:
        """Times decode steps of ``batch`` sequences that started with 128-token prompts."""
        prompt_tokens = min(_PROMPT_TOKENS, self._inspection.pool.context_tokens // 2)
        num_steps = min(num_steps, self._inspection.pool.context_tokens - prompt_tokens - _WARM_STEPS - 2)
        scheduler, executor = self._engine(max_sequences=batch)
        for _ in range(batch):
            self._submit(scheduler, prompt_tokens, _WARM_STEPS + num_steps + 1)
        times_s: list[float] = []
        overheads_s: list[float] = []
        while scheduler.has_work:
            num_before = scheduler.totals.steps
            rows, step_s, overhead_s = self._step(scheduler, executor)
            count = scheduler.totals.steps - num_before  # of several in a row, each takes its share
            self._pace.observe(rows, step_s / count)
            if rows == batch and scheduler.num_running:
                times_s += [step_s / count] * count
                overheads_s += [overhead_s / count] * count
        # The middle of the run: contexts grow by one per step.
        contexts = [prompt_tokens + num_steps // 2] * batch
        cost = self._cost(Work(batch, batch, contexts))
        return _Run(f"decode c={batch}", batch, times_s[_WARM_STEPS:], overheads_s[_WARM_STEPS:], *cost)

    def prefill(self, length: int) -> _Run:
        """Times whole prefills of one fresh prompt, chunked as the scheduler does it, up to the first token."""
        times_s: list[float] = []
        overheads_s: list[float] = []
        for _ in range(1 + _PREFILL_REPEATS):
            scheduler, executor = self._engine(max_sequences=1)
            self._submit(scheduler, length, 1)
            steps = []
            while scheduler.has_work:
                steps.append(self._step(scheduler, executor))
            times_s.append(sum(step_s for _, step_s, _ in steps))
            overheads_s.append(median(overhead_s for _, _, overhead_s in steps))
        bytes_moved = operations = 0
        chunk = self._inspection.scheduler_config.max_step_tokens
        for start in range(0, length, chunk):
            stop = min(start + chunk, length)
            work = Work(stop - start, int(stop == length), range(start + 1, stop + 1))
            moved, done = self._cost(work)
            bytes_moved, operations = bytes_moved + moved, operations + done
        return _Run(f"prefill {length}", length, times_s[1:], overheads_s[1:], bytes_moved, operations)

    def _engine(self, max_sequences: int) -> tuple[Scheduler, Executor]:
        config = self._inspection.scheduler_config
        return Scheduler(replace(config, max_sequences=max_sequences)), make_executor(self._vm, config)

    def _submit(self, scheduler: Scheduler, prompt_tokens: int, max_tokens: int) -> None:
        self._num_requests += 1
        prompt = self._random.integers(0, self._inspection.spec.vocab_size, prompt_tokens).tolist()
        sampling = Sampling(temperature=0.0)
        request = Submit(f"bench-{self._num_requests}", prompt, max_tokens, sampling, ignore_eos=True)
        scheduler.submit(0, request, self._clock.now_s())

    def _step(self, scheduler: Scheduler, executor: Executor) -> tuple[int, float, float]:
        """Returns rows, seconds of the whole step, and seconds of it outside the VM."""
        started_at_s = self._clock.now_s()
        plan = scheduler.plan(started_at_s, burst_steps(self._pace.decode_step_s))
        assert plan is not None
        scheduler.complete(plan, executor.run(plan), self._clock.now_s())
        for events in scheduler.take_events().values():
            encode_frame(Step(events))
            failed = next((event for event in events if isinstance(event, Failed)), None)
            if failed is not None:
                raise EngineError(failed.message)
        step_s = self._clock.now_s() - started_at_s
        return plan.num_rows, step_s, step_s - self._vm.step_s

    def _cost(self, work: Work) -> tuple[int, int]:
        cost = step_cost(self._inspection.program, self._inspection.layouts, self._inspection.kv_type, work)
        return cost.bytes_moved, cost.operations


def count_layouts(inspection: Inspection) -> dict[str, int]:
    """Returns how many matrices of each layout the model has."""
    counts: dict[str, int] = {}
    for spec in inspection.program.weights:
        if spec.kind == "matrix":
            name = inspection.layouts[spec.index].name
            counts[name] = counts.get(name, 0) + 1
    return counts


def _main_arithmetic(inspection: Inspection) -> Arithmetic:
    """Returns what the matrices that hold most values are multiplied in."""
    values: dict[Arithmetic, int] = {}
    for spec in inspection.program.weights:
        if spec.kind == "matrix":
            kind = arithmetic_of(inspection.layouts[spec.index])
            values[kind] = values.get(kind, 0) + spec.n * spec.k
    return max(values, key=values.__getitem__)
