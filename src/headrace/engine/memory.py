"""What fits: how much memory this process may take, how large the KV pool becomes, and the refusal in figures.

Everything is decided from headers, before a weight is read, so a model that cannot fit is refused in milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from headrace.base.errors import ModelTooLargeError
from headrace.policy.shares import Wish
from headrace.program.opcodes import BLOCK_TOKENS

LOADING_FACTOR = 1.5
"""Weights are counted one and a half times: while they are packed, raw copies and the file's pages lie beside them."""
LEAST_CONTEXT_TOKENS = 2048
"""A pool below this (or below the model's own shorter context) is called too small instead of being used quietly."""
_GIB = 2**30
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """What a model takes, in bytes.

    Args:
        weight_bytes: packed weights.
        scratch_bytes: activations and the VM's own scratch.
        kv_token_bytes: keys and values of one token, all layers.
        narrower_bytes: gives the packed weights under each narrower quantization that the user could choose, by name;
            called for a refusal only, because planning them takes a good part of a start.
    """

    weight_bytes: int
    scratch_bytes: int
    kv_token_bytes: int
    narrower_bytes: Callable[[], Mapping[str, int]]


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """The KV pool, and the longest sequence that it allows."""

    num_blocks: int
    context_tokens: int
    kv_bytes: int


def plan_pool(
    needs: MemoryNeeds,
    *,
    available_bytes: int,
    kv_cache_ratio: float,
    kv_cache_tokens: int | None,
    context_tokens: int,
    max_sequences: int,
    is_share: bool = False,
) -> PoolPlan:
    """Sizes the pool.

    It takes ``kv_cache_ratio`` of what weights and scratch leave, at most ``kv_cache_tokens``, and never more than all
    sequences at full length could use. A pool shorter than the context shortens the context.

    Args:
        context_tokens: the longest sequence wanted.
        is_share: what is available is this model's part of a machine that others use too; for messages.

    Raises:
        ModelTooLargeError: weights × 1.5 do not fit, or the pool is too small; says the figures and what would fit.
    """
    loading_bytes = int(needs.weight_bytes * LOADING_FACTOR) + needs.scratch_bytes
    left_bytes = available_bytes - needs.weight_bytes - needs.scratch_bytes
    pool_tokens = int(max(0, left_bytes) * kv_cache_ratio) // needs.kv_token_bytes
    # Rounded up: a pool size that was asked for is kept even when it is no whole number of blocks.
    whole_sequences = max_sequences * -(-context_tokens // BLOCK_TOKENS)
    num_blocks = min(pool_tokens // BLOCK_TOKENS, whole_sequences)
    if kv_cache_tokens is not None:
        num_blocks = min(num_blocks, -(-kv_cache_tokens // BLOCK_TOKENS))
    wanted_tokens = _wanted_tokens(context_tokens, kv_cache_tokens)
    if loading_bytes > available_bytes or num_blocks * BLOCK_TOKENS < wanted_tokens:
        raise ModelTooLargeError(_refusal(needs, available_bytes, kv_cache_ratio, wanted_tokens, is_share=is_share))
    return PoolPlan(
        num_blocks=num_blocks,
        context_tokens=min(context_tokens, num_blocks * BLOCK_TOKENS),
        kv_bytes=num_blocks * BLOCK_TOKENS * needs.kv_token_bytes,
    )


def wish_of(
    needs: MemoryNeeds,
    *,
    kv_cache_ratio: float,
    kv_cache_tokens: int | None,
    context_tokens: int,
    max_sequences: int,
    share: float,
) -> Wish:
    """Returns the bytes that a model wants where several share a machine: see ``plan_pool`` for the arguments."""
    # Two blocks more than the tokens fill: pools are whole blocks, and their size is rounded down.
    wanted_tokens = _wanted_tokens(context_tokens, kv_cache_tokens) + 2 * BLOCK_TOKENS
    least = _least_bytes(needs, needs.weight_bytes, kv_cache_ratio, wanted_tokens)
    blocks = max_sequences * -(-context_tokens // BLOCK_TOKENS)
    if kv_cache_tokens is not None:
        blocks = min(blocks, -(-kv_cache_tokens // BLOCK_TOKENS))
    pool_bytes = math.ceil((blocks + 1) * BLOCK_TOKENS * needs.kv_token_bytes / kv_cache_ratio)
    most = needs.scratch_bytes + needs.weight_bytes + pool_bytes
    return Wish(least, max(least, most), share)


def _wanted_tokens(context_tokens: int, kv_cache_tokens: int | None) -> int:
    return min(context_tokens, LEAST_CONTEXT_TOKENS, kv_cache_tokens or LEAST_CONTEXT_TOKENS)


def _least_bytes(needs: MemoryNeeds, weight_bytes: int, kv_cache_ratio: float, wanted_tokens: int) -> int:
    pool_bytes = int(wanted_tokens * needs.kv_token_bytes / kv_cache_ratio)
    return needs.scratch_bytes + max(int(weight_bytes * LOADING_FACTOR), weight_bytes + pool_bytes)


def describe_need(needs: MemoryNeeds, wish: Wish) -> str:
    """Returns a model's arithmetic for people: weights, scratch, KV, and the least that comes of them."""
    return (
        f"weights {format_size(needs.weight_bytes)} × {LOADING_FACTOR} while loading, scratch "
        f"{format_size(needs.scratch_bytes)}, KV {needs.kv_token_bytes} bytes per token: at least "
        f"{format_size(wish.least)}"
    )


def _refusal(
    needs: MemoryNeeds, available_bytes: int, kv_cache_ratio: float, wanted_tokens: int, *, is_share: bool
) -> str:
    def need(weight_bytes: int) -> int:
        return _least_bytes(needs, weight_bytes, kv_cache_ratio, wanted_tokens)

    narrower = needs.narrower_bytes()
    fitting = [name for name, size in narrower.items() if need(size) <= available_bytes]
    if fitting:
        name = fitting[0]
        advice = f"quantization: {name} would fit (weights {format_size(narrower[name])})"
    else:
        least = min([needs.weight_bytes, *narrower.values()])
        advice = f"it needs a machine with {format_size(need(least))} available, or a smaller model"
    holder = "its share of the memory leaves" if is_share else "this machine has"
    return (
        f"the model does not fit: weights {format_size(needs.weight_bytes)} × {LOADING_FACTOR} while loading + scratch "
        f"{format_size(needs.scratch_bytes)} + KV {needs.kv_token_bytes} bytes per token × {wanted_tokens} tokens ÷ "
        f"kv_cache_ratio {kv_cache_ratio} = {format_size(need(needs.weight_bytes))} needed, "
        f"{holder} {format_size(available_bytes)} available: {advice}"
    )


def format_size(count: int) -> str:
    """Returns bytes as GiB or MiB."""
    return f"{count / _GIB:.2f} GiB" if count >= _GIB else f"{count / _MIB:.1f} MiB"


def read_available_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Returns the bytes that this process may still take: the machine's, or its container's where that is less."""
    return min([_machine_available(proc), *_cgroup_available(proc, cgroup)])


def _machine_available(proc: Path) -> int:
    for line in (proc / "meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _cgroup_available(proc: Path, cgroup: Path) -> list[int]:
    """Returns what each limit on the way from our control group to its root leaves, v2 and v1."""
    found: list[int] = []
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit, usage, cache = cgroup, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            base, limit, usage = cgroup / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache = "total_inactive_file"
        else:
            continue
        # Inside a container the path may be the host's and not exist here; the limits are then at the mount's root.
        folder = base / path.lstrip("/")
        for place in [folder, *folder.parents]:
            if place == base or base in place.parents:
                found += _left(place, limit, usage, cache)
    return found


def _left(folder: Path, limit: str, usage: str, cache: str) -> list[int]:
    try:
        limit_text = (folder / limit).read_text().strip()
        if limit_text == "max":
            return []
        used = int((folder / usage).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        # Unused file pages are given back before anything is refused.
        return [max(0, int(limit_text) - used + int(stat.get(cache, "0")))]
    except (OSError, ValueError):
        return []
