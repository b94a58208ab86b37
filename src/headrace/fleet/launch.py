"""From settings, model and machine to what the children are told: the table of DESIGN §5, decided in one place.

Pure, but for `read_facts`, which looks at the model's headers. A setting that cannot be meant is a ConfigError; one
that is adjusted or ignored gives a warning that says so.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from headrace.base.config import Config
from headrace.base.errors import ConfigError
from headrace.base.units import GIB
from headrace.protocol.launch import FrontLaunch, GateLaunch, Kind, ModelLaunch, WorkerLaunch
from headrace.registry.cache import default_cache_path, packed_folder

_DEFAULT_SEQUENCES: Final = 32
_DEFAULT_STEP_TOKENS: Final = 512


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the settings must agree with, read from the model's own files.

    Args:
        architecture: ``decoder-only``, ``encoder-only`` or ``encoder-decoder``.
        context_tokens: the longest sequence that the model was made for.
        window: the sliding window in tokens that it was trained with, if only on some layers; None for full attention.
        kind: what it gives.
    """

    architecture: str
    context_tokens: int
    window: int | None
    kind: Kind = Kind.GENERATE


@dataclass(frozen=True, slots=True)
class Resolved:
    """What the settings come to.

    Args:
        attention_window: None leaves the model its own.
        warnings: (setting, sentence) pairs for the log.
    """

    threads: int
    max_sequences: int
    max_step_tokens: int
    max_context_tokens: int
    attention_window: int | None
    warnings: tuple[tuple[str, str], ...]


def read_facts(path: Path) -> ModelFacts:
    """Reads a local model's headers.

    Raises:
        ModelError: the files are malformed, altered or of a kind that is not run.
    """
    from headrace.program.model import Architecture
    from headrace.program.spec import spec_from_files
    from headrace.registry.model import open_model

    spec = spec_from_files(open_model(path, has_vocabulary=False))
    window = max(spec.layer(index).window for index in range(spec.layers))
    kind = Kind.GENERATE
    if spec.architecture is Architecture.ENCODER_ONLY:
        kind = (Kind.EMBED, Kind.SCORE, Kind.CLASSIFY)[min(len(spec.labels), 2)]
    return ModelFacts(str(spec.architecture), spec.context_tokens, window or None, kind)


def resolve(config: Config, facts: ModelFacts, *, num_cpus: int) -> Resolved:
    """Reconciles the settings with the model and the machine.

    Raises:
        ConfigError: a setting contradicts the model, the machine or another setting.
    """
    warnings: list[tuple[str, str]] = []
    engine = config.inference_engine
    if engine.engine != "native":
        raise ConfigError(f"inference_engine.engine {engine.engine!r} is not in this release: use native")
    if engine.architecture is not None and engine.architecture != facts.architecture:
        raise ConfigError(
            f"{config.origins['inference_engine.architecture']}: inference_engine.architecture is "
            f"{engine.architecture!r}, but the model is {facts.architecture}: correct the setting or the model path"
        )
    threads = engine.threads or num_cpus
    if engine.tensor_parallel_size > threads:
        raise ConfigError(
            f"inference_engine.tensor_parallel_size is {engine.tensor_parallel_size}, but the native engine has "
            f"{threads} threads here: lower it, or serve on GPUs with --engine vllm"
        )
    if threads > num_cpus:
        warnings.append(
            ("inference_engine.threads", f"{threads} threads on {num_cpus} cores: more threads than cores are slower")
        )
    sequences = _sequences(config, warnings)
    return Resolved(
        threads=threads,
        max_sequences=sequences,
        max_step_tokens=_step_tokens(config, sequences),
        max_context_tokens=_context_tokens(config, facts, warnings),
        attention_window=_window(config, facts, warnings),
        warnings=tuple(warnings),
    )


def _sequences(config: Config, warnings: list[tuple[str, str]]) -> int:
    first, second = config.inference_engine.max_batch_size, config.kernel_config.batch_size
    if first is not None and second is not None and first != second:
        warnings.append(
            (
                "kernel_config.batch_size",
                f"inference_engine.max_batch_size is {first} and kernel_config.batch_size {second}: "
                f"the smaller, {min(first, second)}, is used",
            )
        )
    return min(value for value in (first, second, None if first or second else _DEFAULT_SEQUENCES) if value)


def _step_tokens(config: Config, sequences: int) -> int:
    given = config.inference_engine.max_step_tokens
    if not config.is_given("inference_engine.max_step_tokens"):
        return max(_DEFAULT_STEP_TOKENS, sequences)
    if given < sequences:
        raise ConfigError(
            f"inference_engine.max_step_tokens is {given}, but a step may hold {sequences} sequences with a row each: "
            "raise it or lower max_batch_size"
        )
    return given


def _context_tokens(config: Config, facts: ModelFacts, warnings: list[tuple[str, str]]) -> int:
    kernel = config.kernel_config
    wanted = kernel.max_sequence_length
    if wanted is not None and wanted > facts.context_tokens:
        raise ConfigError(
            f"kernel_config.max_sequence_length is {wanted}, but the model's context is {facts.context_tokens} tokens: "
            "lower it"
        )
    context = wanted or facts.context_tokens
    if kernel.kv_cache_size is not None and kernel.kv_cache_size < context:
        warnings.append(
            (
                "kernel_config.kv_cache_size",
                f"the KV cache holds {kernel.kv_cache_size} tokens, so a request may have that many and not {context}",
            )
        )
        context = kernel.kv_cache_size
    return context


def _window(config: Config, facts: ModelFacts, warnings: list[tuple[str, str]]) -> int | None:
    wanted = config.kernel_config.attention_window
    if wanted is None:
        return None
    if facts.window is None and not config.kernel_config.attention_window_override:
        warnings.append(
            (
                "kernel_config.attention_window",
                f"attention_window {wanted} is ignored: the model was trained with full attention, and a window would "
                "change its answers; attention_window_override: true insists",
            )
        )
        return None
    if wanted != facts.window:
        trained = "full attention" if facts.window is None else f"a window of {facts.window}"
        warnings.append(
            (
                "kernel_config.attention_window",
                f"a window of {wanted} tokens is used, the model was trained with {trained}: answers may differ",
            )
        )
    return wanted


def model_cache(config: Config) -> Path:
    """Gives the folder of fetched models."""
    return Path(config.paths.model_cache) if config.paths.model_cache else default_cache_path()


def worker_launch(
    config: Config,
    resolved: Resolved,
    *,
    model_path: Path,
    name: str,
    socket_fd: int,
    memory_bytes: int | None = None,
    gate: GateLaunch | None = None,
) -> WorkerLaunch:
    """Gives what a worker is told."""
    engine, kernel = config.inference_engine, config.kernel_config
    return WorkerLaunch(
        model_path=str(model_path),
        served_name=name,
        socket_fd=socket_fd,
        architecture=engine.architecture,
        threads=resolved.threads,
        isa=engine.isa,
        dtype=kernel.dtype,
        quantization=engine.quantization,
        max_sequences=resolved.max_sequences,
        max_step_tokens=resolved.max_step_tokens,
        max_context_tokens=resolved.max_context_tokens,
        kv_cache_tokens=kernel.kv_cache_size,
        kv_cache_ratio=engine.kv_cache_ratio,
        attention_window=resolved.attention_window,
        prefix_cache=engine.prefix_cache,
        packed_cache_path=str(packed_folder(model_cache(config))) if engine.packed_cache_gib else None,
        packed_cache_bytes=int(engine.packed_cache_gib * GIB),
        memory_bytes=memory_bytes,
        gate=gate,
        log_level=config.log.level,
        is_log_json=config.is_log_json(is_terminal=sys.stderr.isatty()),
    )


def model_launch(
    config: Config,
    resolved: Resolved,
    *,
    model_path: Path,
    served_names: Sequence[str],
    kind: Kind,
    worker_socket_path: Path,
) -> ModelLaunch:
    """Gives what a front is told about one model, whose settings these are."""
    server, limits = config.server, config.limits
    return ModelLaunch(
        model_path=str(model_path),
        served_names=list(served_names),
        worker_socket_path=str(worker_socket_path),
        kind=kind,
        max_concurrent_requests=server.max_concurrent_requests,
        max_queued_requests=server.max_queued_requests,
        default_completion_tokens=limits.default_completion_tokens,
        default_chat_tokens=limits.default_chat_tokens,
        queue_timeout_s=server.queue_timeout_s,
        first_token_timeout_s=server.first_token_timeout_s,
        request_timeout_s=server.request_timeout_s,
        max_context_tokens=resolved.max_context_tokens,
    )


def front_launch(
    config: Config,
    models: Sequence[ModelLaunch],
    *,
    listen_fds: Sequence[int],
    admin_fd: int | None,
    is_loopback: bool,
    index: int,
) -> FrontLaunch:
    """Gives what a front is told."""
    server = config.server
    return FrontLaunch(
        models=list(models),
        listen_fds=list(listen_fds),
        admin_fd=admin_fd,
        index=index,
        is_loopback=is_loopback,
        max_body_bytes=config.limits.max_body_bytes,
        header_hold_s=server.header_hold_s,
        ping_interval_s=server.ping_interval_s,
        stalled_reader_timeout_s=server.stalled_reader_timeout_s,
        drain_s=server.drain_s,
        stream_drain_s=server.stream_drain_s,
        log_level=config.log.level,
        is_log_json=config.is_log_json(is_terminal=sys.stderr.isatty()),
    )
