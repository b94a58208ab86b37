"""Rotary tables against transformers' own (tests/golden/rope.json, made with transformers 5.24.0, torch 2.13.0)."""

import json
from pathlib import Path

import numpy as np
import pytest

from headrace.program.rope import inverse_frequencies, rope_table
from headrace.program.spec import ModelSpec, spec_from_config

CASES = json.loads((Path(__file__).parents[2] / "golden" / "rope.json").read_text())
POSITIONS = [0, 1, 7, 100, 2047]  # as the golden script asked
BASE = {"architectures": ["LlamaForCausalLM"], "hidden_size": 256, "num_attention_heads": 4, "head_dim": 64}


def spec_of(name: str) -> ModelSpec:
    return spec_from_config({**BASE, **CASES[name]["config"]})


@pytest.mark.parametrize("name", sorted(CASES))
def test_inverse_frequencies_are_those_of_transformers(name: str) -> None:
    spec = spec_of(name)

    frequencies = inverse_frequencies(spec.rope, 64, 2048)

    # powf of two libraries may differ by one unit in the last place, and each formula adds at most three roundings.
    np.testing.assert_allclose(frequencies, CASES[name]["inverse_frequencies"], rtol=4 * 2**-23)


@pytest.mark.parametrize("name", sorted(CASES))
def test_table_is_that_of_transformers(name: str) -> None:
    table = rope_table(spec_of(name).rope, 64, 2048)[POSITIONS]

    # An angle of up to 2047 rad carries 4 ulp of its frequency: 2047 · 4 · 2⁻²³ = 0.001. The golden has 7 digits.
    bounds = np.array(POSITIONS)[:, None] * 4 * 2**-23 + 2**-22 + 5e-7
    scale = max(1.0, spec_of(name).rope.attention_factor)
    assert np.all(np.abs(table[:, :32] - CASES[name]["cos"]) <= bounds * scale)
    assert np.all(np.abs(table[:, 32:] - CASES[name]["sin"]) <= bounds * scale)


def test_table_of_a_long_context_is_the_start_of_a_longer_one() -> None:
    spec = spec_of("llama3")

    short, long = rope_table(spec.rope, 64, 5000), rope_table(spec.rope, 64, 9000)

    assert short.shape == (5000, 64)
    assert short.dtype == np.float32
    np.testing.assert_array_equal(short, long[:5000])
