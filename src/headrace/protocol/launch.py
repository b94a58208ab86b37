"""What a supervisor tells the processes that it starts: one frozen value each, handed down as JSON on an inherited fd.

Listening sockets are opened once by the supervisor and inherited by number, so a restart drops no queued connection.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec

GATE_MEMORY_BYTES: Final = 4096
"""Of the memory at a gate: a page of zeros, 32 bytes of it for each worker and as many for all."""
MAX_GATE_WORKERS: Final = GATE_MEMORY_BYTES // 32 - 1


class GateLaunch(msgspec.Struct, frozen=True):
    """A worker's place at the gate before the threads that several models share: see ``engine.gate``.

    Args:
        memory_fd: inherited, the memory in which all see who waits and who runs.
        wake_fds: inherited event descriptors, one for each worker, that end its wait.
        index: which of them this worker is.
        share: weight of its steps, > 0.
        total_share: of all workers at the gate.
    """

    memory_fd: int
    wake_fds: list[int]
    index: int
    share: float = 1.0
    total_share: float = 1.0


class WorkerLaunch(msgspec.Struct, frozen=True):
    """Everything a worker needs to start.

    Args:
        model_path: folder or file of the model, already resolved and local.
        served_name: name for logs and metrics.
        socket_fd: inherited, listening Unix socket of the worker link.
        architecture: None, or the class that the model must be of.
        threads: VM threads.
        isa: None picks the best instruction set of this CPU; else ``scalar``, ``avx2``, ``avx512``.
        dtype: ``bf16``, ``fp32`` (the exact path) or ``fp16`` operands.
        quantization: ``none``, ``int8``, ``int4``.
        max_sequences: sequences in one step.
        max_step_tokens: rows in one step (chunk budget).
        max_context_tokens: None takes the model's own context.
        kv_cache_tokens: None derives the pool from ``kv_cache_ratio``.
        kv_cache_ratio: share of the memory left after weights and scratch, in (0, 1].
        attention_window: None, or sliding window in tokens (already reconciled with the model).
        queue_limit: requests waiting in the worker before it refuses more.
        prefix_cache: whether finished blocks stay reusable.
        packed_cache_path: folder of packed weights, or None to keep none.
        packed_cache_bytes: what that folder may hold.
        memory_bytes: this model's part of a memory that several share; None takes what is free.
        gate: where it waits for its turn when several models share the threads; None runs at will.
    """

    model_path: str
    served_name: str
    socket_fd: int
    architecture: str | None = None
    threads: int = 2
    isa: str | None = None
    dtype: str = "bf16"
    quantization: str = "none"
    max_sequences: int = 32
    max_step_tokens: int = 512
    max_context_tokens: int | None = None
    kv_cache_tokens: int | None = None
    kv_cache_ratio: float = 0.9
    attention_window: int | None = None
    queue_limit: int = 4096
    prefix_cache: bool = True
    packed_cache_path: str | None = None
    packed_cache_bytes: int = 32 * 2**30
    memory_bytes: int | None = None
    gate: GateLaunch | None = None
    log_level: str = "info"
    is_log_json: bool = True


class Kind(StrEnum):
    """What a model gives.

    GENERATE: text.
    EMBED: vectors.
    SCORE: one number for a text or a pair.
    CLASSIFY: a number for each of several classes.
    """

    GENERATE = "generate"
    EMBED = "embed"
    SCORE = "score"
    CLASSIFY = "classify"


class ModelLaunch(msgspec.Struct, frozen=True):
    """One model behind a front. Limits as in api.md; see ``base.config`` for their meaning.

    Args:
        model_path: where the tokenizer, chat template and model configuration are read from.
        served_names: names that requests may use; the first is the canonical one.
        worker_socket_path: Unix socket path of the worker link.
        kind: what it gives, by its files.
    """

    model_path: str
    served_names: list[str]
    worker_socket_path: str
    kind: Kind = Kind.GENERATE
    max_concurrent_requests: int = 512
    max_queued_requests: int = 512
    default_completion_tokens: int = 16
    default_chat_tokens: int = 4096
    queue_timeout_s: float = 30.0
    first_token_timeout_s: float = 30.0
    request_timeout_s: float = 600.0
    max_context_tokens: int | None = None


class FrontLaunch(msgspec.Struct, frozen=True):
    """Everything a front needs to start.

    Args:
        models: what it serves, at least one.
        listen_fds: inherited, listening TCP sockets of the public API.
        admin_fd: inherited listener for metrics and admin, or None.
        index: which front of several this is, from 0.
    """

    models: list[ModelLaunch]
    listen_fds: list[int]
    admin_fd: int | None = None
    index: int = 0
    is_loopback: bool = True
    max_body_bytes: int = 4 * 2**20
    header_hold_s: float = 10.0
    ping_interval_s: float = 15.0
    stalled_reader_timeout_s: float = 60.0
    drain_s: float = 30.0
    stream_drain_s: float = 120.0
    log_level: str = "info"
    is_log_json: bool = True
