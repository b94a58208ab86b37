"""How a token is chosen from a row of logits: the definition of HEAD's second half, in simple code.

Order: repetition, frequency and presence penalties; bias; mask; temperature; top_k; top_p; min_p; draw. Best first
means larger logit first, equal logits by lower id. Log-probabilities are of the distribution before all of these.

Random numbers are Philox4x32-10 (Salmon et al., 2011) of (seed, position): a draw depends on nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.program.lanes import F32, fma

MIN_TEMPERATURE = 1e-5
"""Below it the choice is greedy: (logit − best) / temperature would overflow where it matters."""
CANDIDATES = 256
"""Filters that end inside the best 256 draw best first; else the draw runs by id, as it does without filters."""


def _philox(key: tuple[int, int], counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    mask = 0xFFFFFFFF
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & mask, (p0 >> 32) ^ c3 ^ k1, p0 & mask
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return c0, c1, c2, c3


def uniform(seed: int, position: int) -> float:
    """Returns the number in [0, 1), a multiple of 2⁻⁵³, for the token at ``position`` of a request with ``seed``."""
    v0, v1, _, _ = _philox((seed & 0xFFFFFFFF, seed >> 32), (position & 0xFFFFFFFF, 0, 0, 0))
    return ((v0 >> 5) * 2.0**26 + (v1 >> 6)) * 2.0**-53


def modified(
    logits: F32,
    row: Mapping[str, float],
    counts: Sequence[tuple[int, int]],
    biases: Sequence[tuple[int, float]],
    allowed: NDArray[np.bool_] | None,
) -> F32:
    """Returns the logits after penalties, bias and mask.

    Args:
        logits: [V].
        row: fields of ``OUTPUT_DTYPE``.
        counts: (id, count): count is how often the id stands in the output, or −1 − that when it is in the prompt too.
        allowed: [V], None for all.
    """
    keys = logits.copy()
    for token_id, count in counts:
        times = -1 - count if count < 0 else count
        key = keys[token_id]
        repetition = np.float32(row["repetition"])
        if count != 0:
            key = key / repetition if key > 0 else key * repetition
        if times > 0:
            key = fma(-np.float32(row["frequency"]), np.float32(times), key) - np.float32(row["presence"])
        keys[token_id] = key
    for token_id, bias in biases:
        keys[token_id] += np.float32(bias)
    if allowed is not None:
        keys[~allowed] = -np.inf
    return keys


def choose(keys: F32, row: Mapping[str, float]) -> int:
    """Returns the id that ``row`` chooses from modified logits, −1 when none is allowed."""
    if np.all(np.isneginf(keys)):
        return -1
    temperature, top_k, top_p, min_p = (row[name] for name in ("temperature", "top_k", "top_p", "min_p"))
    if not temperature >= MIN_TEMPERATURE:
        return int(np.argmax(keys))
    weights = np.exp((keys.astype(np.float64) - float(keys.max())) / temperature)
    is_filtered = 0 < top_k < len(keys) or top_p < 1 or min_p > 0
    order = np.arange(len(keys))
    if is_filtered:
        ranked = np.lexsort((order, -keys))
        keep, is_inside = filtered(weights[ranked], int(top_k), top_p, min_p)
        order = ranked[:keep] if is_inside else np.sort(ranked[:keep])
    sums = np.cumsum(weights[order])
    index = int(np.searchsorted(sums, uniform(int(row["seed"]), int(row["position"])) * sums[-1], side="right"))
    return int(order[min(index, int(np.flatnonzero(weights[order])[-1]))])


def filtered(weights: NDArray[np.float64], top_k: int, top_p: float, min_p: float) -> tuple[int, bool]:
    """Returns how many of the best-first ``weights`` remain, and whether the best 256 were enough to know it."""
    possible = int(np.count_nonzero(weights))
    limit = min(top_k, possible) if top_k > 0 else possible
    listed = possible < CANDIDATES or 0 < top_k <= CANDIDATES
    keep = limit
    if top_p < 1:
        sums = np.cumsum(weights[:limit])
        keep = min(limit, int(np.searchsorted(sums, top_p * sums[-1], side="left")) + 1)
        by_mass = listed or (top_k == 0 and keep <= CANDIDATES)
    else:
        by_mass = listed
    above = int(np.count_nonzero(weights[:keep] >= min_p))
    by_min = above < CANDIDATES and above < keep and (top_p >= 1 or top_k == 0)
    return max(above, 1), by_mass or by_min
