"""Random tiny programs with random packed weights, and ragged batches for them. Seeded: same seed, same case."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.program.interpret import StepInput
from headrace.program.ir import Program, WeightSpec
from headrace.program.lanes import round_bf16
from headrace.program.layouts import Numbers, pack
from headrace.program.opcodes import BLOCK_TOKENS, GROUP, Layout
from headrace.program.records import OUTPUT_DTYPE
from headrace.program.rope import rope_table
from headrace.program.spec import ModelSpec, spec_from_config

CONTEXT_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class Packed:
    """A packed weight as the VM takes it."""

    layout: Layout
    n: int
    k: int
    data: NDArray[np.uint8]


def random_spec(random: np.random.Generator, **changes: object) -> ModelSpec:
    """Returns a spec of odd sizes: vocabularies that fill no tile, heads of one to three groups, every option."""
    kv_heads = int(random.integers(1, 4))
    config: dict[str, Any] = {
        "architectures": ["MistralForCausalLM" if random.random() < 0.3 else "LlamaForCausalLM"],
        "num_hidden_layers": 2,
        "hidden_size": 32 * int(random.integers(1, 4)),
        "intermediate_size": 32 * int(random.integers(1, 5)),
        "num_attention_heads": kv_heads * int(random.integers(1, 4)),
        "num_key_value_heads": kv_heads,
        "head_dim": 32 * int(random.integers(1, 4)),
        "vocab_size": int(random.integers(17, 333)),
        "max_position_embeddings": CONTEXT_TOKENS,
        "sliding_window": int(random.integers(1, 80)),
        "attention_bias": bool(random.random() < 0.3),
        "mlp_bias": bool(random.random() < 0.3),
        "tie_word_embeddings": bool(random.random() < 0.5),
        "eos_token_id": None,
        "bos_token_id": None,
        **changes,
    }
    return spec_from_config(config)


def random_matrix(random: np.random.Generator, layout: Layout, n: int, k: int) -> NDArray[np.uint8]:
    """Returns packed bytes of weights with a variance of about 1/k, extreme integers included."""
    none = np.zeros((0, 0), np.float32)
    if layout in (Layout.F32, Layout.BF16, Layout.F16):
        values = (random.standard_normal((n, k)) * k**-0.5).astype(np.float32)
        return pack(Numbers(layout, round_bf16(values) if layout is Layout.BF16 else values, none, none))
    low, high = {Layout.Q8: (-128, 128), Layout.Q4: (-8, 8), Layout.Q4M: (0, 16)}[layout]
    integers = random.integers(low, high, (n, k)).astype(np.float32)
    scales = (random.uniform(0.2, 1, (n, k // GROUP)) * 2 * k**-0.5 / (high - low)).astype(np.float16)
    mins = (scales.astype(np.float32) * random.uniform(-9, -6, scales.shape)).astype(np.float16)
    empty = none if layout is not Layout.Q4M else mins.astype(np.float32)
    return pack(Numbers(layout, integers, scales.astype(np.float32), empty))


def random_weights(random: np.random.Generator, program: Program, layouts: Sequence[Layout]) -> list[Packed]:
    """Returns a packed weight for every entry of the table, its layout drawn from ``layouts``."""

    def one(weight: WeightSpec) -> Packed:
        if weight.kind == "rope":
            assert weight.rope is not None
            table = rope_table(weight.rope, weight.k, CONTEXT_TOKENS)
            return Packed(Layout.ROPE_F32, CONTEXT_TOKENS, weight.k, aligned(table))
        if weight.kind == "vector":
            values = (random.standard_normal(weight.n) * 0.1 + ("norm" in weight.name)).astype(np.float32)
            return Packed(Layout.VECTOR_F32, weight.n, 1, aligned(values))
        layout = layouts[int(random.integers(len(layouts)))]
        return Packed(layout, weight.n, weight.k, aligned(random_matrix(random, layout, weight.n, weight.k)))

    return [one(weight) for weight in program.weights]


def aligned(array: NDArray[Any]) -> NDArray[np.uint8]:
    """Returns the bytes of ``array`` at a 64-byte boundary, as the VM wants them."""
    raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    memory = np.empty(raw.size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    memory[start : start + raw.size] = raw
    return memory[start : start + raw.size]


@dataclass(slots=True)
class Conversation:
    """Sequences that grow step by step, their pages scattered over the pool."""

    random: np.random.Generator
    vocab_size: int
    blocks: int
    pages: dict[int, list[int]] = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)

    def step(self, rows: dict[int, int], outputs: NDArray[np.void] | None = None) -> StepInput:
        """Returns the step that gives sequence ``id`` its next ``rows[id]`` tokens."""
        free = [block for block in range(self.blocks) if all(block not in used for used in self.pages.values())]
        self.random.shuffle(free)
        positions: list[int] = []
        starts = [0]
        for seq, count in rows.items():
            start = self.lengths.get(seq, 0)
            positions += range(start, start + count)
            starts.append(len(positions))
            self.lengths[seq] = start + count
            pages = self.pages.setdefault(seq, [])
            while len(pages) * BLOCK_TOKENS < start + count:
                pages.append(free.pop())
        width = max(len(self.pages[seq]) for seq in rows)
        tables = np.zeros((len(rows), width), np.int32)
        for index, seq in enumerate(rows):
            tables[index, : len(self.pages[seq])] = self.pages[seq]
        count = len(positions)
        if outputs is None:
            outputs = plain_outputs(range(count), positions)
        none = np.zeros(0, np.int32)
        return StepInput(
            tokens=self.random.integers(0, self.vocab_size, count).astype(np.int32),
            positions=np.array(positions, np.int32),
            seq_starts=np.array(starts, np.int32),
            block_tables=tables,
            outputs=outputs,
            count_ids=none,
            counts=none,
            bias_ids=none,
            bias_values=none.astype(np.float32),
            masks=np.zeros((0, 0), np.uint32),
        )


def plain_outputs(rows: Sequence[int], positions: Sequence[int] | NDArray[np.int32]) -> NDArray[np.void]:
    """Returns greedy output rows with five top log-probabilities."""
    outputs = np.zeros(len(rows), OUTPUT_DTYPE)
    outputs["row"] = rows
    outputs["top_p"] = outputs["repetition"] = 1
    outputs["mask"] = outputs["target"] = -1
    outputs["num_logprobs"] = 5
    outputs["position"] = np.array(positions)[list(rows)] + 1
    return outputs


def random_outputs(random: np.random.Generator, step: StepInput, vocab_size: int) -> StepInput:
    """Returns the step with a choice of its own kind for every row: filters, penalties, bias, masks, targets."""
    rows = len(step.tokens)
    outputs = plain_outputs(range(rows), step.positions)
    ids: dict[str, list[NDArray[np.int32]]] = {"count": [], "bias": []}
    for output in outputs:
        output["num_logprobs"] = random.choice([-1, 0, 1, 20])
        output["temperature"] = random.choice([0, 0.3, 1, 2])
        output["top_k"] = random.choice([0, 0, 1, 5, 40, 400])
        output["top_p"] = random.choice([1, 1, 0.9, 0.3, 1e-6])
        output["min_p"] = random.choice([0, 0, 0.05, 1])
        output["seed"] = random.integers(0, 2**64, dtype=np.uint64)
        output["target"] = random.choice([-1, -1, -1, int(random.integers(vocab_size))])
        output["repetition"], output["presence"], output["frequency"] = 1.3, 0.4, -0.2
        output["mask"] = random.choice([-1, 0, 1])
        for name, drawn in ids.items():
            some = np.sort(random.choice(vocab_size, int(random.integers(0, 9)), replace=False)).astype(np.int32)
            start, length = ("counts_start", "counts_len") if name == "count" else ("bias_start", "bias_len")
            output[start], output[length] = sum(map(len, drawn)), len(some)
            drawn.append(some)
    count_ids, bias_ids = (np.concatenate(ids[name]) for name in ("count", "bias"))
    masks = random.integers(0, 2**32, (2, -(-vocab_size // 32)), dtype=np.uint64).astype(np.uint32)
    return StepInput(
        step.tokens,
        step.positions,
        step.seq_starts,
        step.block_tables,
        outputs,
        count_ids,
        random.integers(-4, 5, len(count_ids)).astype(np.int32),
        bias_ids,
        random.normal(0, 2, len(bias_ids)).astype(np.float32),
        masks,
    )
