"""From a launch to a running engine: look at the files, decide what fits, load, build the VM, warm it up.

Two stages. ``inspect`` reads headers only (milliseconds) and refuses what cannot work, so a worker can greet its peers
with the truth before it loads. ``load`` reads the weights; it runs in a thread of its own while the link is served.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.base.clock import Clock
from headrace.base.errors import ConfigError, MachineError, ModelFormatError
from headrace.base.log import get_log
from headrace.engine.encode_executor import EncodeExecutor, View
from headrace.engine.encode_scheduler import EncodeConfig, EncodeScheduler
from headrace.engine.executor import Executor, StepVm
from headrace.engine.memory import MemoryNeeds, PoolPlan, plan_pool, read_available_bytes, wish_of
from headrace.engine.pace import Pace
from headrace.engine.packed_cache import PackedCache
from headrace.engine.scheduler import Scheduler, SchedulerConfig
from headrace.engine.validate import MAX_MARKS
from headrace.engine.weight_plan import WeightPlan, plan_weights, weight_bytes, with_positions
from headrace.engine.weights import PackedWeight, make_weights
from headrace.engine.work import WorkExecutor
from headrace.policy.shares import Wish
from headrace.policy.threads import ThreadPolicy
from headrace.program.domains import RowLimits
from headrace.program.encode import Encoded, encode
from headrace.program.families import encoder_heads
from headrace.program.ir import Program
from headrace.program.model import Architecture, ModelSpec
from headrace.program.opcodes import BLOCK_TOKENS, MAX_LOGPROBS, KvType, Layout
from headrace.program.records import PackedLike
from headrace.program.spec import build_program, spec_from_files
from headrace.program.verify import verify
from headrace.protocol.frames import Encode, EncodeForm, Sampling, Submit, pack_ids
from headrace.protocol.launch import WorkerLaunch
from headrace.registry.model import ModelFiles, open_model

if TYPE_CHECKING:
    from headrace.kernels.vm import Vm

# The VM's own scratch beside the arena (quantised activations, attention partials, sampling heaps), generously.
_VM_SCRATCH_BYTES = 64 * 2**20
# Rows of the first prefill: enough to be no decode, and few enough that a large model is not kept waiting by it. The
# bytes are rows times weights: 17 rows of a model of 1 GB, which two AVX2 cores do in 0.1 s.
_WARM_UP_ROWS = (16, 64)
_WARM_UP_BYTES = 16 * 2**30
_WARM_UP_DECODES = 3
# Texts of a step are limited so that it can be full of texts as short as this.
_SHORT_TEXT_TOKENS = 8
_NARROWER = {"none": ("int8", "int4"), "int8": ("int4",), "int4": ()}

log = get_log(__name__)

Progress = Callable[[str, float], None]
"""Called with the stage and the share of it that is done."""


@dataclass(frozen=True, slots=True)
class Inspection:
    """What is known of a model before its weights are read."""

    launch: WorkerLaunch
    files: ModelFiles
    spec: ModelSpec
    program: Program
    encoded: Encoded
    kv_type: KvType
    pool: PoolPlan
    plans: list[WeightPlan]
    weight_bytes: int

    @property
    def layouts(self) -> dict[int, Layout]:
        """The layout of each weight, by index."""
        return {plan.spec.index: plan.layout for plan in self.plans}

    @property
    def encode_config(self) -> EncodeConfig | None:
        """The limits of a model that makes vectors; None where it generates."""
        if self.spec.architecture is not Architecture.ENCODER_ONLY:
            return None
        limits = self.encoded.limits
        return EncodeConfig(
            vocab_size=self.spec.vocab_size,
            width=len(self.spec.labels) or self.spec.width,
            forms=_forms(self.spec),
            context_tokens=self.pool.context_tokens,
            max_sequences=limits.sequences,
            max_step_tokens=limits.rows,
            max_marks=limits.outputs,
            queue_limit=self.launch.queue_limit,
        )

    @property
    def scheduler_config(self) -> SchedulerConfig:
        """The limits of a model that generates."""
        launch = self.launch
        return SchedulerConfig(
            vocab_size=self.spec.vocab_size,
            context_tokens=self.pool.context_tokens,
            eos_token_ids=frozenset(self.spec.eos_token_ids),
            num_blocks=self.pool.num_blocks,
            max_sequences=launch.max_sequences,
            max_step_tokens=max(launch.max_step_tokens, launch.max_sequences),
            queue_limit=launch.queue_limit,
            has_prefix_cache=launch.prefix_cache,
            window_tokens=_widest_window(self.spec),
        )


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model that can run. ``isa`` is what its kernels were made for, ``threads`` chooses how many a step uses."""

    executor: WorkExecutor
    vm: StepVm
    pace: Pace
    threads: ThreadPolicy
    isa: str


@dataclass(frozen=True, slots=True)
class _Study:
    """What headers say of a model, before it is decided how much memory it gets."""

    files: ModelFiles
    spec: ModelSpec
    program: Program
    encoded: Encoded
    kv_type: KvType
    plans: list[WeightPlan]
    needs: MemoryNeeds
    kv_cache_tokens: int | None
    context_tokens: int


def inspect(launch: WorkerLaunch, *, available_bytes: int | None = None) -> Inspection:
    """Returns everything that is decided before loading.

    Args:
        available_bytes: memory that may be taken; None takes what the launch says, or else measures it.

    Raises:
        ModelError: the files are wrong, unsupported, or too large for this machine (with the arithmetic).
        ConfigError: settings that the native engine does not have, or that contradict the model.
    """
    study = _study(launch)
    if available_bytes is None:
        available_bytes = launch.memory_bytes
    pool = plan_pool(
        study.needs,
        available_bytes=read_available_bytes() if available_bytes is None else available_bytes,
        kv_cache_ratio=launch.kv_cache_ratio,
        kv_cache_tokens=study.kv_cache_tokens,
        context_tokens=study.context_tokens,
        max_sequences=launch.max_sequences,
        is_share=launch.memory_bytes is not None,
    )
    return Inspection(
        launch=launch,
        files=study.files,
        spec=study.spec,
        program=study.program,
        encoded=study.encoded,
        kv_type=study.kv_type,
        pool=pool,
        plans=study.plans,
        weight_bytes=study.needs.weight_bytes,
    )


def measure(launch: WorkerLaunch, share: float) -> tuple[MemoryNeeds, Wish]:
    """Returns what a model needs, and what it wants of a memory that others share.

    Args:
        share: weight of its part of what all leave.

    Raises:
        ModelError, ConfigError: as ``inspect``, but for the size.
    """
    study = _study(launch)
    wish = wish_of(
        study.needs,
        kv_cache_ratio=launch.kv_cache_ratio,
        kv_cache_tokens=study.kv_cache_tokens,
        context_tokens=study.context_tokens,
        max_sequences=launch.max_sequences,
        share=share,
    )
    return study.needs, wish


def _study(launch: WorkerLaunch) -> _Study:
    _check_launch(launch)
    files = open_model(Path(launch.model_path), has_vocabulary=False)
    spec = _with_window(spec_from_files(files), launch.attention_window)
    if launch.architecture is not None and launch.architecture != spec.architecture:
        raise ConfigError(
            f"architecture is {launch.architecture!r}, but {launch.model_path} is {spec.architecture.value!r} "
            f"({spec.family}): correct inference_engine.architecture or leave it out"
        )
    program = build_program(spec)
    verify(program)
    kv_type = KvType.F32 if launch.dtype == "fp32" else KvType.BF16
    context_tokens = min(spec.context_tokens, launch.max_context_tokens or spec.context_tokens)
    limits = _row_limits(launch, spec, context_tokens)
    encoded = encode(program, limits)
    # An encoder keeps keys and values of one layer, for the rows of one step.
    is_encoder = spec.architecture is Architecture.ENCODER_ONLY
    kv_layers = 1 if is_encoder else spec.layers
    plans = plan_weights(files, program, dtype=launch.dtype, quantization=launch.quantization)
    needs = MemoryNeeds(
        weight_bytes=sum(plan.size_bytes for plan in plans),
        scratch_bytes=encoded.arena_bytes + _VM_SCRATCH_BYTES,
        kv_token_bytes=2 * kv_layers * spec.kv_heads * spec.head_size * (4 if kv_type is KvType.F32 else 2),
        narrower_bytes=lambda: {
            name: weight_bytes(files, program, "bf16", name) for name in _NARROWER[launch.quantization]
        },
    )
    return _Study(
        files=files,
        spec=spec,
        program=program,
        encoded=encoded,
        kv_type=kv_type,
        plans=plans,
        needs=needs,
        kv_cache_tokens=limits.rows + BLOCK_TOKENS * limits.sequences if is_encoder else launch.kv_cache_tokens,
        context_tokens=context_tokens,
    )


def load(
    inspection: Inspection,
    clock: Clock,
    progress: Progress = lambda stage, ratio: None,
    *,
    wake_fd: int = -1,
) -> Loaded:
    """Reads the weights, builds the VM and runs its first steps.

    Args:
        wake_fd: ends decode steps that run in a row when it has something to read; −1 for none.

    Raises:
        ModelFormatError: a weight holds what the VM or the packer refuses, or the model makes NaN of its first prompt.
        MachineError: the native library is missing, or this machine lacks the instruction set that was asked for.
        MemoryError: the memory is gone after all.
    """
    launch, spec = inspection.launch, inspection.spec
    isa = choose_isa(launch)
    encode_config = inspection.encode_config
    config = encode_config or inspection.scheduler_config
    moments_s = [clock.now_s()]
    cache = _packed_cache(inspection)
    stored = cache.read(launch.threads) if cache else {}
    weights = read_weights(inspection, progress, stored)
    moments_s.append(clock.now_s())
    progress("building the program", 1.0)
    vm = make_vm(inspection, inspection.encoded, weights, isa)
    moments_s.append(clock.now_s())
    progress("warming up", 1.0)
    pace = Pace(config.max_step_tokens)
    executor: WorkExecutor
    if isinstance(config, EncodeConfig):
        executor = EncodeExecutor(
            vm,
            _views(inspection, config.forms),
            max_rows=config.max_step_tokens,
            has_types=spec.token_types > 1,
        )
        _warm_up_encoder(executor, config, pace, clock)
    else:
        executor = make_executor(vm, config, wake_fd)
        _warm_up(vm, config, pace, clock, weight_bytes=inspection.weight_bytes)
    moments_s.append(clock.now_s())
    weights_s, program_s, warm_up_s = (round(stop - start, 3) for start, stop in pairwise(moments_s))
    log.info(
        "model_loaded",
        size_bytes=sum(weight.data.nbytes for weight in weights),
        isa=isa,
        is_cached=bool(stored),
        weights_s=weights_s,
        program_s=program_s,
        warm_up_s=warm_up_s,
    )
    if cache is not None:
        cache.finish_in_background(weights)
    return Loaded(executor=executor, vm=vm, pace=pace, threads=ThreadPolicy(launch.threads), isa=isa)


def choose_isa(launch: WorkerLaunch) -> str:
    """Returns the instruction set to run: what was asked for, or the best.

    Raises:
        MachineError: this machine or build lacks it, or the native library is missing.
    """
    # Late: inspecting a model, and everything that only counts, must work where the native library is not built.
    from headrace.kernels.vm import available_isas, best_isa

    isa = launch.isa or best_isa()
    if isa not in available_isas():
        raise MachineError(f"isa is {isa!r}, this machine and build have {', '.join(available_isas())}")
    return isa


def read_weights(
    inspection: Inspection, progress: Progress, stored: Mapping[int, PackedWeight] | None = None
) -> list[PackedWeight]:
    """Returns the packed weights of the program's table.

    Args:
        stored: those that are packed already, by index.

    Raises:
        ModelFormatError: a weight holds what the packer refuses.
    """
    return make_weights(
        with_positions(inspection.plans, _num_positions(inspection)),
        inspection.spec,
        threads=inspection.launch.threads,
        progress=lambda done, total: progress("loading weights", done / max(total, 1)),
        stored=stored or {},
    )


def make_vm(inspection: Inspection, encoded: Encoded, weights: Sequence[PackedLike], isa: str) -> Vm:
    """Returns the VM of a program of this model, with a pool of its own.

    Args:
        encoded: the inspection's own, or another form of the same program.

    Raises:
        ModelFormatError: the program does not fit its weights.
        MachineError: memory was refused.
    """
    from headrace.kernels.vm import KvConfig, Vm

    spec, is_encoder = inspection.spec, inspection.encode_config is not None
    return Vm(
        encoded.records,
        encoded.arena_bytes,
        weights,
        threads=inspection.launch.threads,
        isa=isa,
        max_rows=encoded.limits.rows,
        max_sequences=encoded.limits.sequences,
        max_outputs=encoded.limits.outputs,
        max_top=MAX_LOGPROBS,
        kv=KvConfig(
            type=inspection.kv_type,
            layers=spec.layers,
            kv_heads=spec.kv_heads,
            head_size=spec.head_size,
            blocks=0 if is_encoder else inspection.pool.num_blocks,
        ),
    )


def _packed_cache(inspection: Inspection) -> PackedCache | None:
    """Returns this model's place in the cache of packed weights; None when there is to be none."""
    launch = inspection.launch
    if launch.packed_cache_path is None:
        return None
    return PackedCache(
        Path(launch.packed_cache_path),
        launch.packed_cache_bytes,
        inspection.files,
        inspection.plans,
        name=launch.served_name,
        scheme=f"{launch.dtype}, {launch.quantization}",
    )


def make_executor(vm: StepVm, config: SchedulerConfig, wake_fd: int = -1) -> Executor:
    """Returns an executor for plans of a scheduler with these limits; ``wake_fd`` as ``load`` says."""
    return Executor(
        vm,
        max_rows=config.max_step_tokens,
        max_sequences=config.max_sequences,
        context_tokens=config.context_tokens,
        vocab_size=config.vocab_size,
        wake_fd=wake_fd,
    )


def _warm_up(vm: StepVm, config: SchedulerConfig, pace: Pace, clock: Clock, *, weight_bytes: int) -> None:
    """Runs one prefill and a few decode steps, so that "ready" means that tokens have come out, and measures them."""
    scheduler = Scheduler(replace(config, has_prefix_cache=False))
    executor = make_executor(vm, config)
    least, most = _WARM_UP_ROWS
    wanted = max(least, min(most, _WARM_UP_BYTES // max(weight_bytes, 1)))
    num_rows = max(1, min(wanted, config.max_step_tokens, config.context_tokens - _WARM_UP_DECODES - 1))
    prompt = [index % config.vocab_size for index in range(num_rows)]
    greedy = Sampling(temperature=0.0)
    scheduler.submit(0, Submit("warm-up", prompt, _WARM_UP_DECODES + 1, greedy, ignore_eos=True), clock.now_s())
    while (plan := scheduler.plan(clock.now_s())) is not None:
        started_at_s = clock.now_s()
        result = executor.run(plan)
        pace.observe(plan.num_rows, clock.now_s() - started_at_s)
        scheduler.complete(plan, result, clock.now_s())
    if scheduler.totals.failed:
        raise ModelFormatError("the model's first tokens are not numbers: its weights hold NaN or overflow")


def _warm_up_encoder(executor: EncodeExecutor, config: EncodeConfig, pace: Pace, clock: Clock) -> None:
    """Runs one text, so that "ready" means that a vector has come out, and measures it."""
    scheduler = EncodeScheduler(config)
    length = min(_WARM_UP_ROWS[1], config.context_tokens)
    ids = [index % config.vocab_size for index in range(length)]
    scheduler.submit(0, Encode("warm-up", [pack_ids(ids)], form=config.forms[0]), clock.now_s())
    plan = scheduler.plan(clock.now_s())
    assert plan is not None
    started_at_s = clock.now_s()
    vectors = executor.run(plan)
    pace.observe(plan.num_rows, clock.now_s() - started_at_s)
    scheduler.complete(plan, vectors, clock.now_s())
    if scheduler.totals.failed:
        raise ModelFormatError("the model's first vector holds values that are not numbers: its weights overflow")


def _forms(spec: ModelSpec) -> tuple[EncodeForm, ...]:
    """Returns what an encoder makes of a text, what it is for first."""
    if spec.labels:
        return (EncodeForm.ROWS if spec.has_token_labels else EncodeForm.POOLED,)
    return (EncodeForm.POOLED, EncodeForm.ROWS, *([EncodeForm.MASKED] if spec.has_masked_head else []))


def _views(inspection: Inspection, forms: Sequence[EncodeForm]) -> dict[EncodeForm, View]:
    """Returns where the program leaves what each form is made of."""
    names = dict.fromkeys(forms, encoder_heads.SCORES)
    if not inspection.spec.labels:
        names = {
            EncodeForm.POOLED: encoder_heads.VECTORS,
            EncodeForm.ROWS: encoder_heads.ROWS,
            EncodeForm.MASKED: encoder_heads.TOKEN_SCORES,
        }
    buffers = {form: inspection.encoded.buffer(names[form]) for form in forms}
    return {form: View(buffer.offset, buffer.width) for form, buffer in buffers.items()}


def _row_limits(launch: WorkerLaunch, spec: ModelSpec, context_tokens: int) -> RowLimits:
    """Returns the limits of a step: the rows that were asked for, and in encoders the longest text at least.

    Of an encoder's rows few stand for a whole text, and only marks have outputs: scores of the vocabulary.
    """
    rows = max(launch.max_step_tokens, launch.max_sequences)
    if spec.architecture is not Architecture.ENCODER_ONLY:
        return RowLimits(rows, launch.max_sequences, rows)
    rows = max(rows, context_tokens)
    sequences = max(launch.max_sequences, rows // _SHORT_TEXT_TOKENS)
    return RowLimits(rows, sequences, min(rows, MAX_MARKS) if spec.has_masked_head else 1)


def _num_positions(inspection: Inspection) -> int:
    blocks = -(-inspection.pool.context_tokens // BLOCK_TOKENS)
    return min(inspection.spec.context_tokens, blocks * BLOCK_TOKENS)


def _with_window(spec: ModelSpec, window: int | None) -> ModelSpec:
    """Returns the spec with another window on the layers that have one; on all of them where none has."""
    if window is None:
        return spec
    layers = [spec.layer(index) for index in range(spec.layers)]
    is_mixed = any(layer.window for layer in layers) and not all(layer.window for layer in layers)
    if not is_mixed:
        per_layer = tuple(replace(layer, window=window) for layer in spec.per_layer)
        return replace(spec, window=window, per_layer=per_layer)
    return replace(spec, per_layer=tuple(replace(layer, window=window) if layer.window else layer for layer in layers))


def _widest_window(spec: ModelSpec) -> int:
    """Returns the last positions that some layer still sees, 0 where one sees everything."""
    windows = [spec.layer(index).window for index in range(spec.layers)]
    return max(windows) if all(windows) else 0


def _check_launch(launch: WorkerLaunch) -> None:
    for name, value in (
        ("threads", launch.threads),
        ("max_batch_size", launch.max_sequences),
        ("max_step_tokens", launch.max_step_tokens),
        ("max_sequence_length", 1 if launch.max_context_tokens is None else launch.max_context_tokens),
        ("kv_cache_size", 1 if launch.kv_cache_tokens is None else launch.kv_cache_tokens),
    ):
        if value < 1:
            raise ConfigError(f"{name} is {value}, it must be at least 1")
    if not 0.0 < launch.kv_cache_ratio <= 1.0:
        raise ConfigError(f"kv_cache_ratio is {launch.kv_cache_ratio}, it must be above 0 and at most 1")
    if launch.architecture not in (None, "decoder-only", "encoder-only", "encoder-decoder"):
        raise ConfigError(f"architecture is {launch.architecture!r}: use decoder-only, encoder-only or encoder-decoder")
