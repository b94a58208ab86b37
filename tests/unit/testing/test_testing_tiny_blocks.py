"""The test encoders write what the reference reads back, within the steps of the type."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from headrace.testing.tiny_blocks import encode

# Steps over the range of a group; f16 and six-bit scales may cost as much again.
STEPS = {"Q4_0": 15, "Q4_1": 15, "Q5_0": 31, "Q5_1": 31, "Q8_0": 254, "Q4_K": 15, "Q5_K": 31, "Q6_K": 62}


@pytest.mark.parametrize("kind", STEPS)
def test_encoded_blocks_read_back_within_a_step(kind: str) -> None:
    values = np.random.default_rng(5).standard_normal((6, 512), dtype=np.float32)
    values[0] += 2  # a range that does not hold zero

    raw = np.frombuffer(encode(values, kind).data, np.uint8).reshape(6, -1)

    found = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])
    groups = values.reshape(6, -1, 32)
    span = np.maximum(groups.max(-1), 0) - np.minimum(groups.min(-1), 0)
    limit = 2 * np.maximum(span, 2 * np.abs(groups).max(-1)) / STEPS[kind]
    assert (np.abs(found - values).reshape(6, -1, 32).max(-1) <= limit).all()
