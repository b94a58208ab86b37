"""The opcode table: every instruction of the virtual machine, its fields, and their binary form.

This table is the only definition. ``python -m headrace.program.generate`` writes ``csrc/gen/opcodes.h`` from it, and
``program.encode`` packs records by it, so Python and C++ cannot disagree. Each record is ``RECORD_BYTES`` long:
a fixed header, then the opcode's own fields in order, then zeros.

Field types:
    i32     a count, index or enumerator
    f32     a scalar
    weight  i32 index into the program's weight table, −1 for none
    buffer  i64 byte offset into the scratch arena, −1 for none
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

RECORD_BYTES = 128
BLOCK_TOKENS = 32
"""Tokens of one KV page."""
LANES = 16
"""Output columns of one packed weight tile; all layouts are built from it."""
GROUP = 32
"""Weights along K that share a scale; activations are quantised in the same groups."""


class Opcode(IntEnum):
    """Numbers are stable: a program that was written by an older build keeps its meaning."""

    EMBED = 1
    LINEAR = 2
    QKV = 3
    ATTENTION = 4
    HEAD = 5
    NORM = 6
    MOE = 7
    POOL = 8
    # Parts of the above, each for itself: what `unfuse` takes programs apart into.
    PREPARE = 9
    ROTATE = 10
    GATE = 11
    PICK = 12


class Norm(IntEnum):
    """What is done to a row: nothing, x / rms(x) · w, or (x − mean) / deviation · w + b.

    PREPARED: nothing, and PREPARE has brought the rows into the form that the weight takes; LINEAR only.
    """

    NONE = 0
    RMS = 1
    LAYER = 2
    PREPARED = 3


class Epilogue(IntEnum):
    """What happens to a result: stored, added to the output in place, or gated pairwise (activation(gate) × up)."""

    STORE = 0
    ADD = 1
    GLU = 2


class Activation(IntEnum):
    """Function of a product's elements, or of the gates of a GLU. GELU_TANH is the approximation by tanh."""

    NONE = 0
    SILU = 1
    GELU_TANH = 2
    GELU_ERF = 3
    RELU = 4
    TANH = 5


class Domain(IntEnum):
    """What a buffer has a row for: each row of the step, each of its sequences (what POOL makes), or each of its output
    rows (what PICK makes).
    """

    ROWS = 0
    SEQUENCES = 1
    OUTPUTS = 2


class Pooling(IntEnum):
    """Which rows of a sequence become its one row: the first, the mean of all, the last."""

    FIRST = 0
    MEAN = 1
    LAST = 2


class Layout(IntEnum):
    """How a weight lies in memory (kernels.md §2.2). N is padded to LANES; tile t holds columns 16t … 16t+15.

    VECTOR_F32   f32 [n]                               norm weights, biases
    ROPE_F32     f32 [n positions][k]                  k = elements that turn: k/2 cosines, then k/2 sines
    F32          [N/16][K][16] f32
    BF16         [N/16][K/2][16][2] bf16
    F16          [N/16][K][16] f16                     products are F32's, with f32 activations
    Q8           [N/16][K/32] of {16 × f16 scale, [8][16][4] u8 = q + 128}                       544 bytes
    Q4           [N/16][K/32] of {16 × f16 scale, 4 × [16][4] bytes}, q = nibble − 8             288 bytes
    Q4M          [N/16][K/32] of {16 × f16 scale, 16 × f16 min, 4 × [16][4] bytes}, w = q·scale + min   320 bytes

    Nibble bytes of Q4 and Q4M: 64-byte run j (0..3) at [lane][i] holds k = 8j + i in its low nibble and
    k = 8j + 4 + i in its high nibble.
    """

    VECTOR_F32 = 0
    ROPE_F32 = 1
    F32 = 2
    BF16 = 3
    Q8 = 4
    Q4 = 5
    Q4M = 6
    F16 = 7


class KvType(IntEnum):
    """Element type of the KV pages."""

    F32 = 0
    BF16 = 1


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a record."""

    name: str
    type: str
    meaning: str


STEP_PAGES = -1
"""In a field ``layer``: pages that hold the step's own rows and nothing longer, shared by all such layers in turn."""


def prepared_width(k: int) -> int:
    """Floats of a row that PREPARE writes: enough for any layout and any number of rows (csrc/ops/prologue.h)."""
    return 2 * k + 128


_PROLOGUE = (
    Field("norm", "i32", "Norm applied to each input row"),
    Field("norm_weight", "weight", "VECTOR_F32 [k], or none"),
    Field("norm_bias", "weight", "VECTOR_F32 [k], or none; LAYER only"),
    Field("norm_eps", "f32", "epsilon inside the root"),
)

FIELDS: dict[Opcode, tuple[Field, ...]] = {
    # out = table[token] × scale + positions[position + position_offset] + types[token type]
    Opcode.EMBED: (
        Field("table", "weight", "any matrix layout, n = vocabulary, k = width"),
        Field("out", "buffer", "[rows, width] f32"),
        Field("width", "i32", "elements of a row"),
        Field("scale", "f32", "multiplies the table's row"),
        Field("positions", "weight", "any matrix layout, n > any position + offset, k = width; or none"),
        Field("position_offset", "i32", "row of position 0"),
        Field("types", "weight", "any matrix layout, n = token types, k = width; or none"),
    ),
    # out = epilogue(activation(norm(in) · wᵀ + bias)). With GLU the weight's tiles alternate gate, up; out has n/2
    # columns, and the activation is the gate's.
    Opcode.LINEAR: (
        Field("weight", "weight", "matrix, n columns, k inputs"),
        Field("bias", "weight", "VECTOR_F32 [n], or none"),
        Field("input", "buffer", "[rows, k] f32"),
        Field("out", "buffer", "[rows, n or n/2] f32"),
        Field("k", "i32", "inputs"),
        Field("n", "i32", "columns of the weight"),
        *_PROLOGUE,
        Field("epilogue", "i32", "Epilogue"),
        Field("activation", "i32", "Activation"),
        Field("domain", "i32", "Domain of input and out"),
    ),
    # q, k, v = norm(in) · wᵀ + bias; RMS norm of each head and RoPE on q and k; k and v go to this layer's pages.
    Opcode.QKV: (
        Field("weight", "weight", "rows: all heads of q, then k, then v"),
        Field("bias", "weight", "VECTOR_F32, or none"),
        Field("input", "buffer", "[rows, k] f32"),
        Field("q_out", "buffer", "[rows, heads × head_size] f32"),
        Field("k", "i32", "inputs"),
        Field("heads", "i32", "query heads"),
        Field("kv_heads", "i32", "key and value heads"),
        Field("head_size", "i32", "elements of a head, a multiple of 32"),
        *_PROLOGUE,
        Field("q_norm", "weight", "VECTOR_F32 [head_size] of the RMS norm of every q head, or none"),
        Field("k_norm", "weight", "VECTOR_F32 [head_size] of the RMS norm of every k head, or none"),
        Field("qk_norm_eps", "f32", "epsilon of these"),
        Field("rope", "weight", "ROPE_F32 table [positions, rotary_size], or none"),
        Field("rotary_size", "i32", "first elements of a head that turn, i with i + rotary_size/2; 0 without a table"),
        Field("layer", "i32", "index of this layer's KV pages, or STEP_PAGES"),
    ),
    # out = softmax(q · Kᵀ × scale) · V over the positions up to its own, or all of a sequence that stands in the step
    Opcode.ATTENTION: (
        Field("q", "buffer", "[rows, heads × head_size] f32"),
        Field("out", "buffer", "[rows, heads × head_size] f32"),
        Field("heads", "i32", "query heads"),
        Field("kv_heads", "i32", "key and value heads"),
        Field("head_size", "i32", "elements of a head"),
        Field("layer", "i32", "index of this layer's KV pages, or STEP_PAGES"),
        Field("scale", "f32", "multiplies the scores"),
        Field("window", "i32", "last positions visible, its own included; bidirectional: on each side; 0 for all"),
        Field("is_bidirectional", "i32", "1: later positions are visible too; STEP_PAGES only"),
        Field("softcap", "f32", "tanh cap of the scores, 0 for none"),
    ),
    # Norm, vocabulary product and sampling for the output rows only; logits are never stored whole. Without a weight
    # the products are there already, and it samples.
    Opcode.HEAD: (
        Field("weight", "weight", "matrix, n = vocabulary, k inputs; or none: k = vocabulary, and no norm"),
        Field("input", "buffer", "[rows, k] f32; without a weight [output rows, k]"),
        Field("k", "i32", "inputs"),
        Field("vocab", "i32", "columns that exist (the weight is padded to LANES)"),
        *_PROLOGUE,
        Field("scale", "f32", "multiplies the logits"),
        Field("softcap", "f32", "tanh cap of the logits, 0 for none"),
    ),
    # out = norm(in), or out += norm(in); without a norm, out += in
    Opcode.NORM: (
        Field("input", "buffer", "[rows, k] f32"),
        Field("out", "buffer", "[rows, k] f32, not the input"),
        Field("k", "i32", "elements of a row"),
        *_PROLOGUE,
        Field("epilogue", "i32", "STORE or ADD"),
        Field("domain", "i32", "Domain of input and out"),
    ),
    # Routed experts: p = softmax(norm(in) · routerᵀ); the top_k experts of each row by p (equal ones: lowest id), their
    # p divided by the sum of theirs if renormalised; out += Σ p · (activation(gate) × up) · downᵀ, in rising order.
    Opcode.MOE: (
        Field("input", "buffer", "[rows, k] f32; may be out"),
        Field("out", "buffer", "[rows, k] f32"),
        Field("router", "weight", "matrix, n = experts, k inputs"),
        Field("gate_up", "weight", "matrix, n = experts × 2·hidden: expert after expert, tiles alternate gate, up"),
        Field("down", "weight", "matrix, n = experts × k, k = hidden: expert after expert"),
        Field("k", "i32", "width of the rows"),
        Field("hidden", "i32", "width of one expert"),
        Field("experts", "i32", "how many there are"),
        Field("top_k", "i32", "experts of a row"),
        Field("is_renormalised", "i32", "0 or 1"),
        *_PROLOGUE,
        Field("activation", "i32", "of the gates"),
    ),
    # One row of each sequence: the first, mean or last of its normed rows, perhaps divided by its length.
    Opcode.POOL: (
        Field("input", "buffer", "[rows, k] f32"),
        Field("out", "buffer", "[sequences, k] f32, not the input"),
        Field("k", "i32", "elements of a row"),
        *_PROLOGUE,
        Field("pooling", "i32", "Pooling"),
        Field("is_normalised", "i32", "1: divided by its Euclidean length, or by 1e-12 if that is less"),
    ),
    # Rows in the form that a weight's product takes: f32, bf16, or integers with a scale per 32.
    Opcode.PREPARE: (
        Field("weight", "weight", "matrix, k inputs"),
        Field("input", "buffer", "[rows, k] f32"),
        Field("out", "buffer", "[rows, 2·k + 128] of memory, not the input; read by products whose norm is PREPARED"),
        Field("k", "i32", "inputs"),
        Field("domain", "i32", "Domain of input and out"),
    ),
    # What QKV does after its product: norms of the heads, RoPE on q and k, and k and v go to the layer's pages.
    Opcode.ROTATE: (
        Field("q", "buffer", "[rows, heads × head_size] f32, or all heads of q, then k, then v"),
        Field("keys", "buffer", "[rows, kv_heads × head_size] f32, or none: q has them all"),
        Field("values", "buffer", "likewise"),
        Field("q_out", "buffer", "[rows, heads × head_size] f32, not q"),
        Field("heads", "i32", "query heads"),
        Field("kv_heads", "i32", "key and value heads"),
        Field("head_size", "i32", "elements of a head, a multiple of 32"),
        Field("q_norm", "weight", "as QKV's"),
        Field("k_norm", "weight", "as QKV's"),
        Field("qk_norm_eps", "f32", "epsilon of these"),
        Field("rope", "weight", "as QKV's"),
        Field("rotary_size", "i32", "as QKV's"),
        Field("layer", "i32", "index of this layer's KV pages, or STEP_PAGES"),
    ),
    # out = activation(gate) × up, or activation(gate)
    Opcode.GATE: (
        Field("gate", "buffer", "[rows, width] f32"),
        Field("up", "buffer", "[rows, width] f32, or none"),
        Field("out", "buffer", "[rows, width] f32, neither of the two"),
        Field("width", "i32", "elements of a row"),
        Field("activation", "i32", "Activation"),
    ),
    # out[i] = in[row of output i]
    Opcode.PICK: (
        Field("input", "buffer", "[rows, k] f32"),
        Field("out", "buffer", "[output rows, k] f32, not the input"),
        Field("k", "i32", "elements of a row"),
    ),
}

HEADER: tuple[Field, ...] = (
    Field("opcode", "i32", "Opcode"),
    Field("phase", "i32", "records of one phase run without a barrier between them"),
)

C_TYPES = {"i32": "int32_t", "f32": "float", "weight": "int32_t", "buffer": "int64_t"}
STRUCT_CODES = {"i32": "i", "f32": "f", "weight": "i", "buffer": "q"}

# One output row of a step: which row, and how to choose its token. Mirrored in C++ by the generator; numpy dtype is
# built from it. All offsets count entries of the penalty and bias arrays of the same step.
OUTPUT_FIELDS: tuple[tuple[str, str, str], ...] = (
    ("row", "i32", "row of the step"),
    ("top_k", "i32", "0 keeps all"),
    ("temperature", "f32", "0 is greedy"),
    ("top_p", "f32", "in (0, 1]"),
    ("min_p", "f32", "in [0, 1]"),
    ("repetition", "f32", "repetition penalty, 1 is none"),
    ("presence", "f32", "presence penalty"),
    ("frequency", "f32", "frequency penalty"),
    ("seed", "u64", "random numbers are keyed by (seed, position of the new token)"),
    ("position", "i32", "position of the token to choose"),
    ("num_logprobs", "i32", "−1 none; else how many top entries to report, 0..256"),
    ("target", "i32", "−1: sample; else score this token id instead of sampling"),
    ("counts_start", "i32", "first entry in count_ids / counts (ids ascending)"),
    ("counts_len", "i32", "entries; counts[i] = times in output, −1 − times when also in the prompt"),
    ("bias_start", "i32", "first entry in bias_ids / bias_values (ids ascending)"),
    ("bias_len", "i32", "entries"),
    ("mask", "i32", "−1, or row of the allowed-token bit masks"),
)

RESULT_FIELDS: tuple[tuple[str, str, str], ...] = (
    ("token", "i32", "chosen (or scored) token id"),
    ("status", "i32", "0 good, 1 not a number"),
    ("logprob", "f32", "of that token, unmodified distribution"),
    ("num_top", "i32", "entries filled in top_ids / top_logprobs"),
    ("logsumexp", "f32", "of the unmodified logits"),
)
MAX_LOGPROBS = 256


def ordered(fields: tuple[Field, ...]) -> tuple[Field, ...]:
    """Returns the fields as they lie in a record: 8-byte ones first, so that there is no padding."""
    return tuple(sorted(fields, key=lambda field: field.type != "buffer"))


def ordered_rows(fields: tuple[tuple[str, str, str], ...]) -> tuple[tuple[str, str, str], ...]:
    """Returns output or result fields as they lie in memory: 8-byte ones first."""
    return tuple(sorted(fields, key=lambda field: field[1] != "u64"))
