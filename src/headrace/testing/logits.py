"""What the real VM computes, for comparison: rows of logits, read back from log-probabilities, and vectors of texts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headrace.base.clock import SystemClock
from headrace.engine.loader import inspect, load
from headrace.engine.weights import load_weights
from headrace.kernels.vm import KvConfig, Vm, best_isa
from headrace.program.encode import encode
from headrace.program.families.encoder_heads import VECTORS
from headrace.program.opcodes import BLOCK_TOKENS, MAX_LOGPROBS, KvType
from headrace.program.records import OUTPUT_DTYPE
from headrace.program.spec import build_program, spec_from_files
from headrace.program.verify import verify
from headrace.protocol.launch import WorkerLaunch
from headrace.registry.model import open_model


def vm_logits(
    model_path: Path,
    tokens: Sequence[int],
    rows: Sequence[int],
    *,
    context_tokens: int | None = None,
    isa: str | None = None,
    dtype: str = "fp32",
    quantization: str = "none",
) -> NDArray[np.float64]:
    """Returns the logits [rows, vocabulary] of one text, computed in one step; by default on the exact path.

    Args:
        rows: positions of the text.
        context_tokens: what the engine serves at most; None is the model's own.
    """
    launch = WorkerLaunch(
        model_path=str(model_path),
        served_name="logits",
        socket_fd=-1,
        threads=1,
        isa=isa,
        dtype=dtype,
        quantization=quantization,
        max_step_tokens=len(tokens),
        max_context_tokens=context_tokens,
        kv_cache_tokens=1024,
        max_sequences=1,
    )
    inspection = inspect(launch)
    vocab_size = inspection.spec.vocab_size
    assert vocab_size <= MAX_LOGPROBS
    outputs = np.zeros(len(rows), OUTPUT_DTYPE)
    outputs["row"] = rows
    outputs["position"] = np.array(rows) + 1
    outputs["top_p"] = outputs["repetition"] = 1.0
    outputs["mask"] = -1
    outputs["num_logprobs"] = vocab_size
    none = np.zeros(0, np.int32)
    results, ids, logprobs = load(inspection, SystemClock()).vm.step(
        np.array(tokens, np.int32),
        np.arange(len(tokens), dtype=np.int32),
        np.array([0, len(tokens)], np.int32),
        np.arange(-(-len(tokens) // BLOCK_TOKENS), dtype=np.int32)[None],
        outputs,
        count_ids=none,
        counts=none,
        bias_ids=none,
        bias_values=np.zeros(0, np.float32),
        masks=np.zeros((0, -(-vocab_size // 32)), np.uint32),
    )
    logits = np.full((len(rows), vocab_size), np.nan)
    np.put_along_axis(logits, ids[:, :vocab_size].astype(np.int64), logprobs[:, :vocab_size].astype(np.float64), axis=1)
    return logits + results["logsumexp"].astype(np.float64)[:, None]


def vm_vectors(
    model_path: Path, texts: Sequence[Sequence[int]], *, isa: str | None = None, threads: int = 1
) -> NDArray[np.float32]:
    """Returns an encoder's vectors [texts, width] on the exact path, all texts in one step."""
    files = open_model(model_path, has_vocabulary=False)
    spec = spec_from_files(files)
    program = build_program(spec)
    verify(program)
    rows = sum(map(len, texts))
    encoded = encode(program, rows)
    vm = Vm(
        encoded.records,
        encoded.arena_bytes,
        load_weights(files, program, dtype="fp32", threads=1),
        threads=threads,
        isa=isa or best_isa(),
        max_rows=rows,
        max_sequences=len(texts),
        max_outputs=1,
        max_top=1,
        kv=KvConfig(type=KvType.F32, layers=0, kv_heads=spec.kv_heads, head_size=spec.head_size, blocks=0),
    )
    vm.step(
        np.concatenate([np.array(text, np.int32) for text in texts]),
        np.concatenate([np.arange(len(text), dtype=np.int32) for text in texts]),
        np.cumsum([0, *map(len, texts)], dtype=np.int32),
        np.zeros((len(texts), 0), np.int32),
        np.zeros(0, OUTPUT_DTYPE),
    )
    return vm.read_buffer(encoded.buffer(VECTORS).offset, len(texts), spec.width)
