"""The reference against a plain dense Llama in float64 that shares nothing with it but the formulas."""

import numpy as np
import pytest

from headrace.program.interpret import Interpreter, StepInput
from headrace.program.layouts import Numbers, pack
from headrace.program.opcodes import KvType, Layout
from headrace.program.records import OUTPUT_DTYPE
from headrace.program.rope import rope_table
from headrace.program.spec import build_program, spec_from_config

CONFIG = {
    "architectures": ["MistralForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 50,
    "max_position_embeddings": 700,
    "tie_word_embeddings": False,
}
NONE = np.zeros((0, 0), np.float32)


class Weight:
    def __init__(self, layout: Layout, values: np.ndarray) -> None:
        self.layout = layout
        self.n, self.k = values.shape
        is_matrix = layout is Layout.F32
        self.data = pack(Numbers(layout, values, NONE, NONE)) if is_matrix else values.reshape(-1).view(np.uint8)


def model(window: int | None) -> tuple[Interpreter, dict[str, np.ndarray]]:
    spec = spec_from_config({**CONFIG, "sliding_window": window})
    program = build_program(spec)
    random = np.random.default_rng(5)
    parts: dict[str, np.ndarray] = {"rope": rope_table(spec.rope, 32, 700).astype(np.float64)}
    packed = []
    for weight in program.weights:
        if weight.kind == "rope":
            packed.append(Weight(Layout.ROPE_F32, rope_table(spec.rope, 32, 700)))
            continue
        values = random.standard_normal((weight.n, weight.k)).astype(np.float32) * np.float32(weight.k**-0.5)
        start = 0
        for part in weight.parts:
            parts[part.role] = values[start : start + part.n].astype(np.float64)
            start += part.n
        if weight.interleave:
            values = values.reshape(2, -1, weight.interleave, weight.k).transpose(1, 0, 2, 3).reshape(-1, weight.k)
        packed.append(
            Weight(Layout.F32 if weight.kind == "matrix" else Layout.VECTOR_F32, np.ascontiguousarray(values))
        )
    return Interpreter(program, packed, kv_type=KvType.F32, blocks=30), parts


def dense_logits(parts: dict[str, np.ndarray], tokens: np.ndarray, window: int | None) -> np.ndarray:
    """Logits of every position, [T, V], with a full score matrix."""

    def norm(x: np.ndarray, role: str) -> np.ndarray:
        return x / np.sqrt((x**2).mean(1, keepdims=True) + 1e-6) * parts[role][:, 0]

    def turn(x: np.ndarray) -> np.ndarray:
        angles = parts["rope"][: len(x)]
        cosine = np.concatenate([angles[:, :16], angles[:, :16]], 1)[:, None]
        sine = np.concatenate([angles[:, 16:], angles[:, 16:]], 1)[:, None]
        return x * cosine + np.concatenate([-x[..., 16:], x[..., :16]], 2) * sine

    count = len(tokens)
    distance = np.arange(count)[:, None] - np.arange(count)[None]
    visible = (distance >= 0) & (distance < (window or count))
    x = parts["embed"][tokens]
    for layer in (f"layers.{index}." for index in range(2)):
        y = norm(x, layer + "attention_norm")
        q = turn((y @ parts[layer + "q"].T).reshape(count, 4, 32))
        k = np.repeat(turn((y @ parts[layer + "k"].T).reshape(count, 2, 32)), 2, 1)
        v = np.repeat((y @ parts[layer + "v"].T).reshape(count, 2, 32), 2, 1)
        scores = np.einsum("qhd,khd->hqk", q, k) * 32**-0.5
        scores = np.where(visible, scores, -np.inf)
        weights = np.exp(scores - scores.max(2, keepdims=True))
        weights /= weights.sum(2, keepdims=True)
        x = x + np.einsum("hqk,khd->qhd", weights, v).reshape(count, -1) @ parts[layer + "o"].T
        y = norm(x, layer + "mlp_norm")
        gate = y @ parts[layer + "gate"].T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ parts[layer + "up"].T)) @ parts[layer + "down"].T
    return norm(x, "final_norm") @ parts["head"].T


def step_of(tokens: np.ndarray, start: int, table: np.ndarray) -> StepInput:
    rows = len(tokens)
    outputs = np.zeros(rows, OUTPUT_DTYPE)
    outputs["row"] = np.arange(rows)
    outputs["top_p"] = outputs["repetition"] = 1
    outputs["mask"] = outputs["target"] = -1
    none = np.zeros(0, np.int32)
    return StepInput(
        tokens,
        np.arange(start, start + rows, dtype=np.int32),
        np.array([0, rows], np.int32),
        table[None],
        outputs,
        none,
        none,
        none,
        none.astype(np.float32),
        np.zeros((0, 0), np.uint32),
    )


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("chunks", [[66], [1, 31, 2, 32], [33, 33]], ids=str)
def test_paged_chunks_give_the_logits_of_a_dense_model(window: int | None, chunks: list[int]) -> None:
    interpreter, parts = model(window)
    tokens = np.random.default_rng(1).integers(0, 50, 66).astype(np.int32)
    table = np.array([7, 2, 19], np.int32)

    logits, start = [], 0
    for chunk in chunks:
        logits.append(interpreter.step(step_of(tokens[start : start + chunk], start, table), max_top=0).logits)
        start += chunk

    # float32 against float64 over sums of at most 128 terms of order 1: a few hundred roundings of 2⁻²⁴.
    np.testing.assert_allclose(np.concatenate(logits), dense_logits(parts, tokens, window), atol=5e-5)


def test_slices_of_a_long_context_merge_to_the_same() -> None:
    interpreter, parts = model(None)
    tokens = np.random.default_rng(1).integers(0, 50, 600).astype(np.int32)
    table = np.random.default_rng(2).permutation(30)[:19].astype(np.int32)

    logits = interpreter.step(step_of(tokens, 0, table), max_top=0).logits[-1]

    np.testing.assert_allclose(logits, dense_logits(parts, tokens, None)[-1], atol=5e-5)


def test_rows_do_not_depend_on_chunks_to_the_bit() -> None:
    whole, _ = model(None)
    chunked, _ = model(None)
    tokens = np.random.default_rng(1).integers(0, 50, 40).astype(np.int32)
    table = np.array([3, 4], np.int32)

    at_once = whole.step(step_of(tokens, 0, table), max_top=0).logits
    chunked.step(step_of(tokens[:33], 0, table), max_top=0)
    later = chunked.step(step_of(tokens[33:], 33, table), max_top=0).logits

    np.testing.assert_array_equal(later, at_once[33:])
