// Generated from program/opcodes.py by `python -m headrace.program.generate`. Do not edit.
#pragma once

#include <cstdint>
#include <cstring>

namespace headrace {

inline constexpr int32_t kRecordBytes = 128;
inline constexpr int32_t kBlockTokens = 32;
inline constexpr int32_t kLanes = 16;
inline constexpr int32_t kGroup = 32;
inline constexpr int32_t kMaxLogprobs = 256;
inline constexpr int32_t kStepPages = -1;
inline constexpr int32_t kOpcodeCount = 13;

enum class Opcode : int32_t {
  kEmbed = 1,
  kLinear = 2,
  kQkv = 3,
  kAttention = 4,
  kHead = 5,
  kNorm = 6,
  kMoe = 7,
  kPool = 8,
  kPrepare = 9,
  kRotate = 10,
  kGate = 11,
  kPick = 12,
};

enum class Norm : int32_t {
  kNone = 0,
  kRms = 1,
  kLayer = 2,
  kPrepared = 3,
};

enum class Epilogue : int32_t {
  kStore = 0,
  kAdd = 1,
  kGlu = 2,
};

enum class Activation : int32_t {
  kNone = 0,
  kSilu = 1,
  kGeluTanh = 2,
  kGeluErf = 3,
  kRelu = 4,
  kTanh = 5,
};

enum class Domain : int32_t {
  kRows = 0,
  kSequences = 1,
  kOutputs = 2,
};

enum class Pooling : int32_t {
  kFirst = 0,
  kMean = 1,
  kLast = 2,
};

enum class Layout : int32_t {
  kVectorF32 = 0,
  kRopeF32 = 1,
  kF32 = 2,
  kBf16 = 3,
  kQ8 = 4,
  kQ4 = 5,
  kQ4m = 6,
  kF16 = 7,
};

enum class KvType : int32_t {
  kF32 = 0,
  kBf16 = 1,
};

struct EmbedRecord {
  int32_t opcode;  // Opcode
  int32_t phase;  // records of one phase run without a barrier between them
  int64_t out;  // [rows, width] f32
  int32_t table;  // any matrix layout, n = vocabulary, k = width
  int32_t width;  // elements of a row
  float scale;  // multiplies the table's row
  int32_t positions;  // any matrix layout, n > any position + offset, k = width; or none
  int32_t position_offset;  // row of position 0
  int32_t types;  // any matrix layout, n = token types, k = width; or none
};

static_assert(sizeof(EmbedRecord) <= kRecordBytes);

struct LinearRecord {
  int32_t opcode;  // Opcode
  int32_t phase;  // records of one phase run without a barrier between them
  int64_t input;  // [rows, k] f32
  int64_t out;  // [rows, n or n/2] f32
  int32_t weight;  // matrix, n columns, k inputs
  int32_t bias;  // VECTOR_F32 [n], or none
  int32_t k;  // inputs
  int32_t n;  // columns of the weight
  int32_t norm;  // Norm applied to each input row
  int32_t norm_weight;  // VECTOR_F32 [k], or none
  int32_t norm_bias;  // VECTOR_F32 [k], or none; LAYER only
  float norm_eps;  // epsilon inside the root
  int32_t epilogue;  // Epilogue
  int32_t activation;  // Activation
  int32_t domain;  // Domain of input and out
};

static_assert(sizeof(LinearRecord) <= kRecordBytes);

struct QkvRecord {
  int32_t opcode;  // Opcode
  int32_t phase;  // records of one phase run without a barrier between them
  int64_t input;  // [rows, k] f32
  int64_t q_out;  // [rows, heads × head_size] f32
  int32_t weight;  // rows: all heads of q, then k, then v
  int32_t bias;  // VECTOR_F32, or none
  int32_t k;  // inputs
  int32_t heads;  // query heads
  int32_t kv_heads;  // key and value heads
  int32_t head_size;  // elements of a head, a multiple of 32
  int32_t norm;  // Norm applied to each input row
  int32_t norm_weight;  // VECTOR_F32 [k], or none
  int32_t norm_bias;  // VECTOR_F32 [k], or none; LAYER only
  float norm_eps;  // epsilon inside the root
  int32_t q_norm;  // VECTOR_F32 [head_size] of the RMS norm of every q head, or none
  int32_t k_norm;  // VECTOR_F32 [head_size] of the RMS norm of every k head, or none
  float qk_norm_eps;  // epsilon of these
  int32_t rope;  // ROPE_F32 table [positions, rotary_size], or none
  int32_t rotary_size;  // first elements of a head that turn, i with i + rotary_size/2; 0 without a table
  int32_t layer;  // index of this layer's KV pages, or STEP_PAGES
};

static_assert(sizeof(QkvRecord) <= kRecordBytes);

struct AttentionRecord {
  int32_t opcode;  // Opcode
  int32_t phase;  // records of one phase run without a barrier between them
  int64_t q;  // [rows, heads × head_size] f32
  int64_t out;  // [rows, heads × head_size] f32
  int32_t heads;  // query heads
  int32_t kv_heads;  // key and value heads
  int32_t head_size;  // elements of a head
  int32_t layer;  // index of this layer's KV pages, or STEP_PAGES
  float scale;  // multiplies the scores
  int32_t window;  // last positions visible, its own included; bidirectional: on each side; 0 for all
  int32_t is_bidirectional;  // 1: later positions are visible too; STEP_PAGES only
  float softcap;  // tanh cap of the scores, 0 for none
};

static_assert(sizeof(AttentionRecord) <= kRecordBytes);

struct HeadRecord {
  int32_t opcode;  // Opcode
  int32_t phase;  // records of one phase run without a barrier between them
  int64_t input;  // [rows, k] f32; without a weight [output rows, k]
  int32_t weight;  // matrix, n = vocabulary, k inputs; or none: k = vocabulary, and no norm
  int32_t k;  // inputs
  int32_t vocab;  // columns that exist (the weight is padded to LANES)
  int32_t norm;  // Norm applied to each input row
  int32_t norm_weight;  // VECTOR_F32 [k], or none
  int32_t norm_bias;  // VECTOR_F32 [k], or none; LAYER only
  float norm_eps;  // epsilon inside the root
  float scale;  // multiplies the logits
  float softcap;  // tanh cap of the logits, 0 for none
};

static_assert(sizeof(HeadRecord) <= kRecordBytes);

struct NormRecord {
  int32_t opcode;  // Opcode
  int32_t phase;  // records of one phase run without a barrier between them
  int64_t input;  // [rows, k] f32
  int64_t out;  // [rows, k] f32, not the input
  int32_t k;  // elements of a row
  int32_t norm;  // Norm applied to each input row
  int32_t norm_weight;  // VECTOR_F32 [k], or none
  int32_t norm_bias;  // VECTOR_F32 [k], or none; LAYER only
  float norm_eps;  // epsilon inside the root
  int32_t epilogue;  // STORE or ADD
  int32_t domain;  // Domain of input and out
};

static_assert(sizeof(NormRecord) <= kRecordBytes);

struct MoeRecord {
  int32_t opcode;  // Opcode
  int32_t phase;  // records of one phase run without a barrier between them
  int64_t input;  // [rows, k] f32; may be out
  int64_t out;  // [rows, k] f32
  int32_t router;  // matrix, n = experts, k inputs
  int32_t gate_up;  // matrix, n = experts × 2·hidden: expert after expert, tiles alternate gate, up
  int32_t down;  // matrix, n = experts × k, k = hidden: expert after expert
  int32_t k;  // width of the rows
  int32_t hidden;  // width of one expert
  int32_t experts;  // how many there are
  int32_t top_k;  // experts of a row
  int32_t is_renormalised;  // 0 or 1
  int32_t norm;  // Norm applied to each input row
  int32_t norm_weight;  // VECTOR_F32 [k], or none
  int32_t norm_bias;  // VECTOR_F32 [k], or none; LAYER only
  float norm_eps;  // epsilon inside the root
  int32_t activation;  // of the gates
};

static_assert(sizeof(MoeRecord) <= kRecordBytes);

struct PoolRecord {
  int32_t opcode;  // Opcode
  int32_t phase;  // records of one phase run without a barrier between them
  int64_t input;  // [rows, k] f32
  int64_t out;  // [sequences, k] f32, not the input
  int32_t k;  // elements of a row
  int32_t norm;  // Norm applied to each input row
  int32_t norm_weight;  // VECTOR_F32 [k], or none
  int32_t norm_bias;  // VECTOR_F32 [k], or none; LAYER only
  float norm_eps;  // epsilon inside the root
  int32_t pooling;  // Pooling
  int32_t is_normalised;  // 1: divided by its Euclidean length, or by 1e-12 if that is less
};

static_assert(sizeof(PoolRecord) <= kRecordBytes);

struct PrepareRecord {
  int32_t opcode;  // Opcode
  int32_t phase;  // records of one phase run without a barrier between them
  int64_t input;  // [rows, k] f32
  int64_t out;  // [rows, 2·k + 128] of memory, not the input; read by products whose norm is PREPARED
  int32_t weight;  // matrix, k inputs
  int32_t k;  // inputs
  int32_t domain;  // Domain of input and out
};

static_assert(sizeof(PrepareRecord) <= kRecordBytes);

struct RotateRecord {
  int32_t opcode;  // Opcode
  int32_t phase;  // records of one phase run without a barrier between them
  int64_t q;  // [rows, heads × head_size] f32, or all heads of q, then k, then v
  int64_t keys;  // [rows, kv_heads × head_size] f32, or none: q has them all
  int64_t values;  // likewise
  int64_t q_out;  // [rows, heads × head_size] f32, not q
  int32_t heads;  // query heads
  int32_t kv_heads;  // key and value heads
  int32_t head_size;  // elements of a head, a multiple of 32
  int32_t q_norm;  // as QKV's
  int32_t k_norm;  // as QKV's
  float qk_norm_eps;  // epsilon of these
  int32_t rope;  // as QKV's
  int32_t rotary_size;  // as QKV's
  int32_t layer;  // index of this layer's KV pages, or STEP_PAGES
};

static_assert(sizeof(RotateRecord) <= kRecordBytes);

struct GateRecord {
  int32_t opcode;  // Opcode
  int32_t phase;  // records of one phase run without a barrier between them
  int64_t gate;  // [rows, width] f32
  int64_t up;  // [rows, width] f32, or none
  int64_t out;  // [rows, width] f32, neither of the two
  int32_t width;  // elements of a row
  int32_t activation;  // Activation
};

static_assert(sizeof(GateRecord) <= kRecordBytes);

struct PickRecord {
  int32_t opcode;  // Opcode
  int32_t phase;  // records of one phase run without a barrier between them
  int64_t input;  // [rows, k] f32
  int64_t out;  // [output rows, k] f32, not the input
  int32_t k;  // elements of a row
};

static_assert(sizeof(PickRecord) <= kRecordBytes);

// One instruction as it lies in memory; `as` views it as the struct of its opcode.
struct alignas(kRecordBytes) Record {
  unsigned char bytes[kRecordBytes];
  Opcode opcode() const {
    int32_t value;
    std::memcpy(&value, bytes, sizeof value);
    return static_cast<Opcode>(value);
  }
  int32_t phase() const {
    int32_t value;
    std::memcpy(&value, bytes + 4, sizeof value);
    return value;
  }
  template <typename T>
  T as() const {
    T value;
    std::memcpy(&value, bytes, sizeof value);
    return value;
  }
};

struct OutputRow {
  uint64_t seed;  // random numbers are keyed by (seed, position of the new token)
  int32_t row;  // row of the step
  int32_t top_k;  // 0 keeps all
  float temperature;  // 0 is greedy
  float top_p;  // in (0, 1]
  float min_p;  // in [0, 1]
  float repetition;  // repetition penalty, 1 is none
  float presence;  // presence penalty
  float frequency;  // frequency penalty
  int32_t position;  // position of the token to choose
  int32_t num_logprobs;  // −1 none; else how many top entries to report, 0..256
  int32_t target;  // −1: sample; else score this token id instead of sampling
  int32_t counts_start;  // first entry in count_ids / counts (ids ascending)
  int32_t counts_len;  // entries; counts[i] = times in output, −1 − times when also in the prompt
  int32_t bias_start;  // first entry in bias_ids / bias_values (ids ascending)
  int32_t bias_len;  // entries
  int32_t mask;  // −1, or row of the allowed-token bit masks
};

static_assert(sizeof(OutputRow) == 72);

struct ResultRow {
  int32_t token;  // chosen (or scored) token id
  int32_t status;  // 0 good, 1 not a number
  float logprob;  // of that token, unmodified distribution
  int32_t num_top;  // entries filled in top_ids / top_logprobs
  float logsumexp;  // of the unmodified logits
};

static_assert(sizeof(ResultRow) == 20);

}  // namespace headrace
