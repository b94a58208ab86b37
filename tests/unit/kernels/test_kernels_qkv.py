"""QKV against numpy: rotation, where q goes, and which element of which page k and v go to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.kernels import vm
from headrace.program.opcodes import BLOCK_TOKENS, KvType, Layout, Opcode
from headrace.testing.lone_op import plain_record

from .conftest import Weight, floats, matrix, no_outputs

ISAS = vm.available_isas()
WIDTH, HEADS, KV_HEADS, HEAD_SIZE, BLOCKS, LAYERS = 96, 6, 2, 64, 9, 2
N = (HEADS + 2 * KV_HEADS) * HEAD_SIZE
Q_OUT = 64 * 1024


@dataclass(frozen=True, slots=True)
class Inputs:
    """Weights of one layer and the table that input rows come from."""

    x: NDArray[np.float32]
    w: NDArray[np.float32]
    bias: NDArray[np.float32]
    rope: NDArray[np.float32]


@pytest.fixture
def inputs(rng: np.random.Generator) -> Inputs:
    """Random weights; the rotation table holds random angles."""
    angles = rng.uniform(0, 6.28, (BLOCKS * BLOCK_TOKENS, HEAD_SIZE // 2))
    return Inputs(
        rng.standard_normal((100, WIDTH), dtype=np.float32),
        rng.standard_normal((N, WIDTH), dtype=np.float32),
        rng.standard_normal(N, dtype=np.float32),
        np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32),
    )


def _machine(
    inputs: Inputs,
    isa: str,
    kv: KvType,
    *,
    threads: int,
    has_rope: bool = True,
    rotary_size: int = HEAD_SIZE,
    norms: NDArray[np.float32] | None = None,
) -> vm.Vm:
    weights: list[Weight] = [matrix(inputs.x, Layout.F32), matrix(inputs.w, Layout.F32), floats(inputs.bias)]
    weights.append(floats(inputs.rope, Layout.ROPE_F32))
    weights += [] if norms is None else [floats(norm) for norm in norms]
    program = plain_record(Opcode.EMBED, 0, table=0, out=0, width=WIDTH)
    program += plain_record(
        Opcode.QKV, 1, weight=1, bias=2, input=0, q_out=Q_OUT, k=WIDTH, heads=HEADS, kv_heads=KV_HEADS,
        head_size=HEAD_SIZE, rope=3 if has_rope else -1, rotary_size=rotary_size if has_rope else 0,
        q_norm=-1 if norms is None else 4, k_norm=-1 if norms is None else 5, layer=1,
    )  # fmt: skip
    return vm.Vm(
        program, Q_OUT + 100 * HEADS * HEAD_SIZE * 4, weights, threads=threads, max_rows=100, isa=isa,
        kv=vm.KvConfig(kv, LAYERS, KV_HEADS, HEAD_SIZE, BLOCKS),
    )  # fmt: skip


def _expected(
    inputs: Inputs, tokens: NDArray[np.int32], positions: NDArray[np.int32], *, has_rope: bool = True
) -> NDArray[np.float64]:
    """q, k and v of every row: [rows, heads + 2·kv_heads, head_size]."""
    y = inputs.x[tokens].astype(np.float64) @ inputs.w.T + inputs.bias
    y = y.reshape(len(tokens), HEADS + 2 * KV_HEADS, HEAD_SIZE)
    if has_rope:
        half = HEAD_SIZE // 2
        turned = y[:, : HEADS + KV_HEADS]
        cosine, sine = inputs.rope[positions, None, :half], inputs.rope[positions, None, half:]
        low, high = turned[..., :half], turned[..., half:]
        y[:, : HEADS + KV_HEADS] = np.concatenate([low * cosine - high * sine, high * cosine + low * sine], axis=-1)
    return y


# Three sequences in one step: a decode row that opens a page, a prefill chunk over two page borders, one at a border.
STARTS = np.array([0, 1, 71, 72], dtype=np.int32)
POSITIONS = np.array([64, *range(30, 100), 31], dtype=np.int32)
TABLES = np.array([[7, 0, 3, 99], [1, 5, 2, 8], [6, -1, -1, -1]], dtype=np.int32)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv", list(KvType))
@pytest.mark.parametrize("has_rope", [True, False], ids=["rope", "plain"])
@pytest.mark.parametrize("threads", [1, 2])
def test_qkv_fills_q_and_the_pages(isa: str, kv: KvType, has_rope: bool, threads: int, inputs: Inputs) -> None:
    tokens = np.arange(72, dtype=np.int32)
    machine = _machine(inputs, isa, kv, threads=threads, has_rope=has_rope)

    machine.step(tokens, POSITIONS, STARTS, TABLES, no_outputs())

    want = _expected(inputs, tokens, POSITIONS, has_rope=has_rope)
    q = machine.read_buffer(Q_OUT, 72, HEADS * HEAD_SIZE).reshape(72, HEADS, HEAD_SIZE)
    assert np.allclose(q, want[:, :HEADS], rtol=1e-4, atol=1e-4)
    # bf16 keeps 8 bits: half an ulp is 2^-9 of the value.
    tolerance = 1e-4 if kv is KvType.F32 else 2**-8
    sequence = np.repeat(np.arange(3), np.diff(STARTS))
    for row in range(72):
        block, slot = TABLES[sequence[row], POSITIONS[row] // BLOCK_TOKENS], POSITIONS[row] % BLOCK_TOKENS
        for head in range(KV_HEADS):
            key, value = machine.read_keys(1, block, head)[slot], machine.read_values(1, block, head)[slot]
            assert np.allclose(key, want[row, HEADS + head], rtol=tolerance, atol=1e-3), (row, head)
            assert np.allclose(value, want[row, HEADS + KV_HEADS + head], rtol=tolerance, atol=1e-3), (row, head)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rotary_size", [HEAD_SIZE, 48, 32, 10])
@pytest.mark.parametrize("has_norms", [True, False], ids=["normed", "plain"])
def test_heads_are_normed_one_by_one_and_their_first_elements_turn(
    isa: str, rotary_size: int, has_norms: bool, inputs: Inputs, rng: np.random.Generator
) -> None:
    tokens, half = np.arange(72, dtype=np.int32), rotary_size // 2
    norms = rng.standard_normal((2, HEAD_SIZE), dtype=np.float32)
    partial = replace(inputs, rope=np.ascontiguousarray(inputs.rope[:, :rotary_size]))
    machine = _machine(partial, isa, KvType.F32, threads=2, rotary_size=rotary_size, norms=norms if has_norms else None)

    machine.step(tokens, POSITIONS, STARTS, TABLES, no_outputs())

    want = _expected(inputs, tokens, POSITIONS, has_rope=False)
    for part, norm in ((slice(0, HEADS), norms[0]), (slice(HEADS, HEADS + KV_HEADS), norms[1])):
        heads = want[:, part]
        if has_norms:
            heads = heads / np.sqrt((heads**2).mean(axis=2, keepdims=True) + 1e-5) * norm
        cosine, sine = partial.rope[POSITIONS, None, :half], partial.rope[POSITIONS, None, half:]
        low, high, rest = heads[..., :half], heads[..., half:rotary_size], heads[..., rotary_size:]
        want[:, part] = np.concatenate([low * cosine - high * sine, high * cosine + low * sine, rest], axis=-1)
    q = machine.read_buffer(Q_OUT, 72, HEADS * HEAD_SIZE).reshape(72, HEADS, HEAD_SIZE)
    assert np.allclose(q, want[:, :HEADS], rtol=1e-4, atol=1e-4)
    for row in range(1, 71):  # the second sequence
        block, slot = TABLES[1, POSITIONS[row] // BLOCK_TOKENS], POSITIONS[row] % BLOCK_TOKENS
        for head in range(KV_HEADS):
            key, value = machine.read_keys(1, block, head)[slot], machine.read_values(1, block, head)[slot]
            assert np.allclose(key, want[row, HEADS + head], rtol=1e-4, atol=1e-4), (row, head)
            assert np.allclose(value, want[row, HEADS + KV_HEADS + head], rtol=1e-4, atol=1e-4), (row, head)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv", list(KvType))
def test_qkv_touches_no_other_slot(isa: str, kv: KvType, inputs: Inputs) -> None:
    machine = _machine(inputs, isa, kv, threads=2)

    machine.step(
        np.array([3], np.int32), np.array([33], np.int32), np.array([0, 1], np.int32), np.array([[4, 5]], np.int32),
        no_outputs(),
    )  # fmt: skip

    written = {
        (layer, block)
        for layer in range(LAYERS)
        for block in range(BLOCKS)
        if machine.read_keys(layer, block, 1).any() or machine.read_values(layer, block, 1).any()
    }
    assert written == {(1, 5)}
    assert list(np.flatnonzero(machine.read_keys(1, 5, 0).any(axis=1))) == [1]
    assert list(np.flatnonzero(machine.read_values(1, 5, 0).any(axis=1))) == [1]


def test_an_even_token_clears_its_partner_in_a_bf16_value_page(inputs: Inputs) -> None:
    machine = _machine(inputs, "scalar", KvType.BF16, threads=1)
    table = np.array([[4]], np.int32)
    two = (np.array([3, 4], np.int32), np.array([10, 11], np.int32), np.array([0, 2], np.int32))
    machine.step(*two, table, no_outputs())

    machine.step(np.array([9], np.int32), np.array([10], np.int32), np.array([0, 1], np.int32), table, no_outputs())

    values = machine.read_values(1, 4, 0)
    assert values[10].any()
    assert not values[11].any()


@pytest.mark.parametrize("kv", list(KvType))
def test_qkv_agrees_bit_for_bit_on_every_instruction_set(kv: KvType, inputs: Inputs) -> None:
    pages, queries = [], []
    for isa in ISAS:
        machine = _machine(inputs, isa, kv, threads=2)
        machine.step(np.arange(72, dtype=np.int32), POSITIONS, STARTS, TABLES, no_outputs())
        pages.append(np.stack([machine.read_keys(1, 5, 1), machine.read_values(1, 2, 0)]))
        queries.append(machine.read_buffer(Q_OUT, 72, HEADS * HEAD_SIZE))

    assert all(np.array_equal(pages[0], other) for other in pages)
    assert all(np.array_equal(queries[0], other) for other in queries)


def _anonymous_kib() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0])


def test_a_block_takes_memory_of_its_own_and_not_of_every_layer(inputs: Inputs) -> None:
    layers, blocks = 24, 256
    program = plain_record(Opcode.EMBED, 0, table=0, out=0, width=WIDTH)
    for layer in range(layers):
        program += plain_record(
            Opcode.QKV, 1 + layer, weight=1, bias=2, input=0, q_out=Q_OUT, k=WIDTH, heads=HEADS, kv_heads=KV_HEADS,
            head_size=HEAD_SIZE, layer=layer,
        )  # fmt: skip
    machine = vm.Vm(
        program, Q_OUT + 100 * HEADS * HEAD_SIZE * 4,
        [matrix(inputs.x, Layout.F32), matrix(inputs.w, Layout.F32), floats(inputs.bias)],
        threads=1, max_rows=100, isa="scalar", kv=vm.KvConfig(KvType.F32, layers, KV_HEADS, HEAD_SIZE, blocks),
    )  # fmt: skip

    def step(block: int) -> None:
        starts, table = np.array([0, 1], np.int32), np.array([[block]], np.int32)
        machine.step(np.array([3], np.int32), np.array([0], np.int32), starts, table, no_outputs())

    step(0)  # the arena and the scratch are touched here too
    before = _anonymous_kib()
    step(blocks // 2)

    # 0.75 MiB, in two huge pages at most; a pool laid out layer by layer would take one of each layer, 48 MiB.
    assert _anonymous_kib() - before <= 6 * 1024
    assert machine.read_keys(layers - 1, blocks // 2, 1)[0].any()
