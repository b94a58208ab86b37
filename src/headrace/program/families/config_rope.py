"""Rotary specs from config.json, in both spellings: ``rope_theta`` with ``rope_scaling``, and ``rope_parameters``."""

from __future__ import annotations

import math

from headrace.program.families.checks import FACTOR, LIMITS, THETA, unsupported
from headrace.program.keys import Keys
from headrace.program.model import RopeKind, RopeSpec

_DIVISOR = (1e-6, 1e6)


def rope_from_config(keys: Keys, context_tokens: int, default_theta: float = 10000.0) -> RopeSpec:
    """Returns the rotary spec of a model whose layers all turn alike. ``rope_scaling`` wins, as in transformers."""
    scaling = next((found for key in ("rope_scaling", "rope_parameters") if (found := keys.mapping(key))), None)
    theta = keys.number("rope_theta", *THETA, default=default_theta)
    return rope_from_parameters(keys, scaling, theta, context_tokens)


def rope_from_parameters(keys: Keys, scaling: Keys | None, theta: float, context_tokens: int) -> RopeSpec:
    """Returns the rotary spec of one parameter object.

    Args:
        scaling: ``rope_scaling``, ``rope_parameters`` or one of its layer types; None or empty scales nothing.
        theta: base, where the object has none of its own.
    """
    if scaling is None or not scaling.values:
        return RopeSpec(theta)
    theta = scaling.number("rope_theta", *THETA, default=theta)
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    match kind:
        case "default":
            return RopeSpec(theta)
        case "linear":
            return RopeSpec(theta, RopeKind.LINEAR, factor=scaling.number("factor", *FACTOR))
        case "dynamic":
            # The base grows only past max_position_embeddings: below it the table is static and is the default one.
            scaling.number("factor", *FACTOR)
            return RopeSpec(theta)
        case "llama3":
            low = scaling.number("low_freq_factor", 1e-3, 1e3)
            high = scaling.number("high_freq_factor", 1e-3, 1e3)
            if high <= low:
                raise scaling.refuse("high_freq_factor", f"must be above low_freq_factor ({low:g})")
            return RopeSpec(
                theta,
                RopeKind.LLAMA3,
                factor=scaling.number("factor", *FACTOR),
                original_context_tokens=original_context(keys, scaling, context_tokens),
                low_freq_factor=low,
                high_freq_factor=high,
            )
        case "yarn":
            return _yarn(keys, scaling, theta, context_tokens)
        case "longrope":
            return _longrope(keys, scaling, theta, context_tokens)
        case _:
            raise unsupported(scaling, "rope_type", kind, "default, linear, dynamic, llama3, yarn, longrope")


def original_context(keys: Keys, scaling: Keys, context_tokens: int) -> int:
    """Returns the context before scaling; the config's own key wins over the scaling's."""
    limits = LIMITS["context_tokens"]
    inner = scaling.integer("original_max_position_embeddings", *limits, default=context_tokens)
    return keys.integer("original_max_position_embeddings", *limits, default=inner)


def _yarn(keys: Keys, scaling: Keys, theta: float, context_tokens: int) -> RopeSpec:
    original = original_context(keys, scaling, context_tokens)
    factor = scaling.number("factor", *FACTOR, default=max(1.0, context_tokens / original))

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    over = scaling.number("mscale", 0.0, 100.0, default=0.0)
    under = scaling.number("mscale_all_dim", 0.0, 100.0, default=0.0)
    inferred = mscale(over) / mscale(under) if over and under else mscale(1.0)
    fast = scaling.number("beta_fast", 0.0, 1e6, default=0.0) or 32.0
    slow = scaling.number("beta_slow", 0.0, 1e6, default=0.0) or 1.0
    if fast < slow:
        raise scaling.refuse("beta_fast", f"must not be below beta_slow ({slow:g})")
    return RopeSpec(
        theta,
        RopeKind.YARN,
        factor=factor,
        original_context_tokens=original,
        beta_fast=fast,
        beta_slow=slow,
        is_truncated=scaling.boolean("truncate", True),
        attention_factor=scaling.number("attention_factor", 1e-3, 100.0, default=inferred),
    )


def _longrope(keys: Keys, scaling: Keys, theta: float, context_tokens: int) -> RopeSpec:
    original = original_context(keys, scaling, context_tokens)
    factor = scaling.number("factor", *FACTOR, default=max(1.0, context_tokens / original))
    inferred = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0

    def factors(key: str) -> tuple[float, ...]:
        value = scaling.values.get(key)
        if not isinstance(value, list) or not 1 <= len(value) <= LIMITS["head_size"][1]:
            raise scaling.refuse(key, "must be a list of one factor per rotary pair")
        return tuple(item.number("", *_DIVISOR) for item in scaling.sequence(key, len(value)) or ())

    return RopeSpec(
        theta,
        RopeKind.LONGROPE,
        original_context_tokens=original,
        attention_factor=scaling.number("attention_factor", 1e-3, 100.0, default=inferred),
        factors=factors("short_factor"),
        long_factors=factors("long_factor"),
    )
