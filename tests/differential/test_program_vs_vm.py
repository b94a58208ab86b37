"""The VM against the reference interpreter: every instruction's output, on every instruction set of this machine.

Everything is compared to the bit, for the numerics contract leaves no freedom (one accumulator per column along K, one
rounding per operation), but for two things with a derived bound:
    log-probabilities   the VM sums exponentials in float32, sixteen lanes, blocks of 128, then in float64: at most
                        2 + 8 + 4 roundings and exponentials within 2⁻²² give 2⁻¹⁹ relative in the sum, hence absolute
                        in its logarithm; the results are float32 of magnitude up to 16 (2⁻²⁰ more)
    avx512bf16          its product instruction adds a pair in another order: one rounding (2⁻²⁴) a pair, which may tip
                        the bf16 rounding of an activation (2⁻⁸ of it). Rows agree within 2⁻⁵ of their largest element,
                        log-probabilities within 2⁻⁴; chosen tokens are not compared, they may tip too
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from headrace.kernels.vm import KvConfig, Vm, available_isas
from headrace.program.encode import encode
from headrace.program.interpret import Interpreter, StepInput, StepOutput
from headrace.program.ir import NONE, Instruction, Program, effect, result
from headrace.program.layouts import Numbers, pack
from headrace.program.model import Architecture
from headrace.program.opcodes import BLOCK_TOKENS, KvType, Layout, Opcode
from headrace.program.spec import build_program
from headrace.program.verify import verify
from headrace.program.verify_lowered import verify_encoded
from headrace.testing.random_builder import TOKEN_TYPES, Wanted, random_program
from headrace.testing.random_programs import (
    Conversation,
    Packed,
    aligned,
    plain_outputs,
    random_outputs,
    random_spec,
    random_weights,
)

BLOCKS = 40
MAX_ROWS = 80
LOGPROB_BOUND = 2**-19 + 2**-20
BF16_ROW_BOUND = 2**-5
BF16_LOGPROB_BOUND = 2**-4
ISAS = available_isas()
LAYOUTS = {
    "f32": [Layout.F32],
    "bf16": [Layout.BF16],
    "f16": [Layout.F16],
    "q8": [Layout.Q8],
    "q4": [Layout.Q4],
    "q4m": [Layout.Q4M],
    "mixed": [Layout.F32, Layout.BF16, Layout.F16, Layout.Q8, Layout.Q4, Layout.Q4M],
}


class Pair:
    """The same program, weights and pool, in the VM and in the reference."""

    def __init__(
        self,
        program: Program,
        weights: Sequence[Packed],
        kv_type: KvType,
        isa: str,
        threads: int,
        max_rows: int = MAX_ROWS,
    ) -> None:
        self.is_exact = isa != "avx512bf16" or kv_type is KvType.F32
        self.program, spec = program, program.spec
        self.encoded = encode(self.program, max_rows)
        verify(self.program)
        verify_encoded(self.program, self.encoded)
        self.reference = Interpreter(self.program, weights, kv_type=kv_type, blocks=BLOCKS, isa=isa)
        self.vm = Vm(
            self.encoded.records,
            self.encoded.arena_bytes,
            weights,
            threads=threads,
            isa=isa,
            max_rows=max_rows,
            max_sequences=8,
            max_outputs=MAX_ROWS,
            max_top=20,
            kv=KvConfig(kv_type, spec.layers, spec.kv_heads, spec.head_size, BLOCKS)
            if spec.architecture is Architecture.DECODER_ONLY
            else KvConfig(kv_type, 0, spec.kv_heads, spec.head_size, 0),
        )

    def vm_step(self, step: StepInput, num_records: int | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.vm.step(
            step.tokens,
            step.positions,
            step.seq_starts,
            step.block_tables,
            step.outputs,
            count_ids=step.count_ids,
            counts=step.counts,
            bias_ids=step.bias_ids,
            bias_values=step.bias_values,
            masks=step.masks,
            num_records=num_records,
            **({} if step.token_types is None else {"token_types": step.token_types}),
        )

    def same(self, ours: np.ndarray, wanted: np.ndarray, where: str) -> None:
        """Equal to the bit, or within the bound of the bf16 instruction."""
        if self.is_exact:
            np.testing.assert_array_equal(ours, wanted, err_msg=where)
        else:
            bound = BF16_ROW_BOUND * np.abs(wanted).max(initial=0)
            np.testing.assert_allclose(ours, wanted, rtol=0, atol=bound, err_msg=where)

    def compare(self, step: StepInput, skip: Opcode | None = None) -> None:
        """Runs the step up to every instruction in turn, and compares what it wrote; then the pages, then the head.

        What ``skip`` writes is in a form of the VM's own.
        """

        def written(number: int, item: Instruction) -> None:
            self.vm_step(step, number + 1)
            if item.opcode is skip:
                return
            for index in (*effect(item).updates, *effect(item).writes):
                bound = self.encoded.buffer(self.program.buffers[index].name)
                wanted = self.reference.buffers[index]
                ours = self.vm.read_buffer(bound.offset, len(wanted), bound.width)
                self.same(ours, wanted, f"instruction {number} {item.opcode.name}")

        wanted = self.reference.step(step, max_top=20, after=written)
        if self.program.spec.architecture is Architecture.ENCODER_ONLY:
            return
        self.compare_pages(step)
        self.compare_head(step, wanted)

    def compare_pages(self, step: StepInput) -> None:
        """Compares what stands in the pages of the step's sequences."""
        for seq in range(len(step.seq_starts) - 1):
            length = int(step.positions[step.seq_starts[seq + 1] - 1]) + 1
            for page in range(-(-length // BLOCK_TOKENS)):
                block, used = int(step.block_tables[seq, page]), min(length - page * BLOCK_TOKENS, BLOCK_TOKENS)
                for layer in range(self.program.spec.layers):
                    for head in range(self.program.spec.kv_heads):
                        keys = self.vm.read_keys(layer, block, head)[:used]
                        values = self.vm.read_values(layer, block, head)[:used]
                        self.same(keys, self.reference.keys[layer, block, head, :used], "keys")
                        self.same(values, self.reference.values[layer, block, head, :used], "values")

    def compare_head(self, step: StepInput, wanted: StepOutput) -> None:
        """Compares what the head says."""
        results, top_ids, top_logprobs = self.vm_step(step)
        if not self.is_exact:
            np.testing.assert_array_equal(results["status"], wanted.results["status"])
            close = {"rtol": 0, "atol": BF16_LOGPROB_BOUND}
            np.testing.assert_allclose(results["logsumexp"], wanted.results["logsumexp"], **close)
            return
        for name in ("status", "token", "num_top"):
            np.testing.assert_array_equal(results[name], wanted.results[name], err_msg=name)
        np.testing.assert_allclose(results["logsumexp"], wanted.results["logsumexp"], rtol=0, atol=LOGPROB_BOUND)
        np.testing.assert_allclose(results["logprob"], wanted.results["logprob"], rtol=0, atol=LOGPROB_BOUND)
        for row, count in enumerate(results["num_top"]):
            np.testing.assert_array_equal(top_ids[row, :count], wanted.top_ids[row, :count])
            np.testing.assert_allclose(
                top_logprobs[row, :count], wanted.top_logprobs[row, :count], rtol=0, atol=LOGPROB_BOUND
            )


def pair(layouts: Sequence[Layout], seed: int, isa: str, kv_type: KvType = KvType.BF16, **changes: object) -> Pair:
    random = np.random.default_rng(seed)
    spec = random_spec(random, **changes)
    program = build_program(spec)
    return Pair(program, random_weights(random, program, layouts), kv_type, isa, threads=1 + seed % 2)


def drawn(layouts: Sequence[Layout], seed: int, isa: str, kv_type: KvType, wanted: Wanted | None = None) -> Pair:
    random = np.random.default_rng(seed)
    program = random_program(random, wanted)
    return Pair(program, random_weights(random, program, layouts), kv_type, isa, threads=1 + seed % 2)


def conversation(case: Pair, seed: int) -> Conversation:
    return Conversation(np.random.default_rng(seed + 1000), case.program.spec.vocab_size, BLOCKS)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("layouts", LAYOUTS)
@pytest.mark.parametrize("isa", ISAS)
def test_every_instruction_gives_the_same_bits(isa: str, layouts: str, seed: int) -> None:
    kv_type = KvType.F32 if layouts == "f32" else KvType.BF16
    case = pair(LAYOUTS[layouts], seed, isa, kv_type)
    talk = conversation(case, seed)

    # A prompt that ends one short of a page, one that ends one past it, then rows of all kinds together.
    for rows in ({0: 31, 1: 33}, {0: 1, 1: 1, 2: 5}, {2: 1, 0: 34, 3: 1, 1: 2}):
        case.compare(talk.step(rows))


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("isa", ISAS)
def test_drawn_programs_give_the_same_bits(isa: str, seed: int) -> None:
    layouts, kv_type = (["f32"], KvType.F32) if seed % 3 == 0 else (["mixed", "bf16"], KvType.BF16)
    case = drawn(LAYOUTS[layouts[seed % len(layouts)]], seed, isa, kv_type, Wanted(has_experts=False))
    talk = conversation(case, seed)

    for rows in ({0: 33, 1: 1}, {0: 1, 1: 40, 2: 2}):
        case.compare(talk.step(rows))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("isa", ISAS)
def test_routed_experts_give_the_same_bits(isa: str, seed: int) -> None:
    layouts, kv_type = ("f32", KvType.F32) if seed % 4 == 0 else ("mixed", KvType.BF16)
    case = drawn(LAYOUTS[layouts], seed, isa, kv_type, Wanted(has_experts=True))
    talk = conversation(case, seed)

    for rows in ({0: 33, 1: 1}, {0: 1}, {1: 2, 0: 1}):
        case.compare(talk.step(rows))


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("isa", ISAS)
def test_encoders_give_the_same_bits(isa: str, seed: int) -> None:
    layouts, kv_type = ("f32", KvType.F32) if seed % 3 == 0 else ("mixed", KvType.BF16)
    case = drawn(LAYOUTS[layouts], seed, isa, kv_type, Wanted(is_encoder=True))
    random = np.random.default_rng(seed)

    for lengths in ([1], [33, 1, 40], [2, 32, 31, 5, 10]):
        step = conversation(case, seed).step(dict(enumerate(lengths)), plain_outputs([], np.zeros(0, np.int32)))
        types = random.integers(0, TOKEN_TYPES, len(step.tokens)).astype(np.int32) if seed % 2 else None
        has_types = any(item.values.get("types", NONE) != NONE for item in case.program.instructions)
        case.compare(replace(step, token_types=types if has_types else None))


@pytest.mark.parametrize("isa", ISAS)
def test_pooled_rows_do_not_depend_on_company_or_threads(isa: str) -> None:
    random = np.random.default_rng(3)
    program = random_program(random, Wanted(is_encoder=True))
    weights = random_weights(random, program, LAYOUTS["mixed"])
    one, three = (Pair(program, weights, KvType.BF16, isa, threads) for threads in (1, 3))
    left = one.encoded.buffer(program.buffers[result(program) or 0].name)
    whole = conversation(one, 0).step({0: 20, 1: 50, 2: 1}, plain_outputs([], np.zeros(0, np.int32)))

    three.vm_step(whole)
    together = three.vm.read_buffer(left.offset, 3, left.width)
    for seq in range(3):
        rows = slice(whole.seq_starts[seq], whole.seq_starts[seq + 1])
        starts = np.array([0, rows.stop - rows.start], np.int32)
        step = replace(whole, tokens=whole.tokens[rows], positions=whole.positions[rows], seq_starts=starts)
        one.vm_step(replace(step, block_tables=whole.block_tables[seq : seq + 1]))

        np.testing.assert_array_equal(one.vm.read_buffer(left.offset, 1, left.width)[0], together[seq])


def test_sequence_that_is_not_whole_is_refused_where_rows_see_later_ones() -> None:
    case = drawn(LAYOUTS["f32"], 0, "scalar", KvType.F32, Wanted(is_encoder=True))
    talk = conversation(case, 0)
    none = plain_outputs([], np.zeros(0, np.int32))
    case.vm_step(talk.step({0: 3, 1: 2}, none))

    with pytest.raises(ValueError, match="sequence 1 starts at position 2, it must stand in the step whole"):
        case.vm_step(talk.step({2: 3, 1: 2}, none))


@pytest.mark.parametrize("layouts", ["f32", "bf16", "q8", "q4m"])
@pytest.mark.parametrize("isa", ISAS)
def test_experts_of_a_row_do_not_depend_on_company_or_threads(isa: str, layouts: str) -> None:
    random = np.random.default_rng(7)
    program = random_program(random, Wanted(has_experts=True))
    weights = random_weights(random, program, LAYOUTS[layouts])
    one, two, three = (Pair(program, weights, KvType.F32, isa, threads) for threads in (1, 2, 3))
    whole = conversation(one, 0).step({0: 20, 1: 40, 2: 1})
    wanted, _, _ = one.vm_step(whole)

    together, _, _ = three.vm_step(whole)
    # The same sequences one after the other, in steps of one to seven rows.
    alone = []
    for seq in range(3):
        start, stop = whole.seq_starts[seq : seq + 2]
        while start < stop:
            count = min(1 + start % 7, stop - start)
            rows = slice(start, start + count)
            outputs = whole.outputs[rows].copy()
            outputs["row"] -= start
            step = replace(
                whole,
                tokens=whole.tokens[rows],
                positions=whole.positions[rows],
                seq_starts=np.array([0, count], np.int32),
                block_tables=whole.block_tables[seq : seq + 1],
                outputs=outputs,
            )
            alone.append(two.vm_step(step)[0])
            start += count

    np.testing.assert_array_equal(together, wanted)
    np.testing.assert_array_equal(np.concatenate(alone), wanted)


@pytest.mark.parametrize("head_size", [32, 96, 128, 160, 256])
@pytest.mark.parametrize("isa", ISAS)
def test_heads_of_any_size_give_the_same_bits(isa: str, head_size: int) -> None:
    wanted = Wanted(head_size=head_size, has_experts=False, layers=1)
    for kv_type in KvType:
        case = drawn(LAYOUTS["q8"], head_size, isa, kv_type, wanted)
        talk = conversation(case, head_size)

        for rows in ({0: 30, 1: 9}, {0: 3, 1: 1}):
            case.compare(talk.step(rows))


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 31, 64, 65])
@pytest.mark.parametrize("isa", ISAS)
def test_any_number_of_rows_gives_the_same_bits(isa: str, rows: int) -> None:
    case = pair(LAYOUTS["mixed"], rows, isa)

    case.compare(conversation(case, rows).step({0: rows}))


@pytest.mark.parametrize("isa", ISAS)
def test_values_of_a_pair_meet_in_their_page_whichever_thread_comes_first(isa: str) -> None:
    """Two values share a word of a page; a chunk of rows ends between them, since the text before is of odd length."""
    rows = 520
    random = np.random.default_rng(7)
    program = build_program(random_spec(random, num_hidden_layers=1))
    case = Pair(program, random_weights(random, program, LAYOUTS["bf16"]), KvType.BF16, isa, 3, max_rows=rows)
    step = conversation(case, 7).step({0: 3, 1: rows - 3}, plain_outputs([], np.zeros(0, np.int32)))
    case.reference.step(step, max_top=20)

    for _ in range(10):
        case.vm_step(step)
        case.compare_pages(step)


@pytest.mark.parametrize("layouts", ["f32", "bf16", "f16", "q8", "q4", "q4m"])
@pytest.mark.parametrize("isa", ISAS)
def test_inputs_wider_than_a_panel_give_the_same_bits(isa: str, layouts: str) -> None:
    """Many rows meet floats in panels of 256 inputs: 288 and 544 are one and two of them and a rest."""
    wide = {"hidden_size": 288, "intermediate_size": 544, "num_hidden_layers": 1}
    case = pair(LAYOUTS[layouts], 5, isa, **wide)
    talk = conversation(case, 5)

    for rows in ({0: 13, 1: 6}, {1: 11}):
        case.compare(talk.step(rows))


@pytest.mark.parametrize("window", [1, 31, 32, 33, 512, 600])
@pytest.mark.parametrize("isa", ISAS)
def test_windows_and_slices_of_a_long_context_give_the_same_bits(isa: str, window: int) -> None:
    small = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "head_dim": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 20}
    case = pair(LAYOUTS["bf16"], 1, isa, architectures=["MistralForCausalLM"], sliding_window=window, **small, **heads)
    talk = conversation(case, 0)
    # The pool is filled by the VM and copied: the reference needs only the pages.
    for _ in range(8):
        step = talk.step({0: 70, 1: 1})
        case.vm_step(step)
        copy_pages(case, step)

    case.compare(talk.step({0: 3, 1: 2, 2: 1}))


def copy_pages(case: Pair, step: StepInput) -> None:
    for block in np.unique(step.block_tables):
        for head in range(case.program.spec.kv_heads):
            case.reference.keys[0, block, head] = case.vm.read_keys(0, int(block), head)
            case.reference.values[0, block, head] = case.vm.read_values(0, int(block), head)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("isa", ISAS)
def test_choices_are_those_of_the_definition(isa: str, seed: int) -> None:
    case = pair(LAYOUTS["mixed"], seed, isa, num_hidden_layers=1)
    talk = conversation(case, seed)
    random = np.random.default_rng(seed)
    step = random_outputs(random, talk.step({0: 17, 1: 40}), case.program.spec.vocab_size)

    case.compare(step)


@pytest.mark.parametrize("isa", ISAS)
def test_choices_over_a_vocabulary_past_the_candidates_are_those_of_the_definition(isa: str) -> None:
    case = pair(LAYOUTS["f32"], 0, isa, num_hidden_layers=1, vocab_size=1500, hidden_size=32)
    talk = conversation(case, 0)

    for seed in range(3):
        step = random_outputs(np.random.default_rng(seed), talk.step({0: 40, 1: 20}), 1500)
        case.compare(step)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("layouts", ["f32", "bf16", "q8", "q4", "q4m"])
@pytest.mark.parametrize("isa", ISAS)
def test_row_that_is_not_finite_is_reported_and_its_neighbours_are_not(isa: str, layouts: str, bad: float) -> None:
    random = np.random.default_rng(0)
    spec = random_spec(random, tie_word_embeddings=False, vocab_size=64)
    weights = random_weights(random, build_program(spec), LAYOUTS[layouts])
    table = np.random.default_rng(1).standard_normal((64, spec.width)).astype(np.float32)
    table[5, 7] = bad
    none = np.zeros((0, 0), np.float32)
    embed = Packed(Layout.F32, 64, spec.width, aligned(pack(Numbers(Layout.F32, table, none, none))))
    case = Pair(build_program(spec), [embed, *weights[1:]], KvType.BF16, isa, threads=1)
    step = conversation(case, 0).step({0: 1, 1: 1, 2: 1})
    step.tokens[:] = [4, 5, 6]
    step.outputs["num_logprobs"] = -1

    results, _, _ = case.vm_step(step)

    with np.errstate(all="ignore"):
        wanted = case.reference.step(step, max_top=20)
    np.testing.assert_array_equal(results["status"], [0, 1, 0])
    np.testing.assert_array_equal(wanted.results["status"], [0, 1, 0])
