// What a program and its engine settings bound. The VM derives it once, at construction; ops size their scratch by it
// (constexpr functions beside each op) and may rely on it inside a step.
#pragma once

#include <cstdint>

namespace headrace {

struct Limits {
  int32_t max_rows = 0;       // rows of a step
  int32_t max_sequences = 0;  // sequences of a step
  int32_t max_outputs = 0;    // output rows of a step
  int32_t max_top = 0;        // width of top_ids / top_logprobs
  int32_t max_positions =
      0;  // positions are below this: rows of position tables and kv blocks × 32, whichever is less; none is INT32_MAX
  int32_t max_k = 0;      // widest input of any product
  int32_t max_vocab = 0;  // columns of the widest head
  int32_t max_heads = 0;
  int32_t max_kv_heads = 0;
  int32_t max_head_size = 0;
  int32_t max_whole_head = 0;  // largest head that QKV finishes as a whole; 0 where none is
  // Routed experts, the most of any record; 0 where there are none.
  int32_t max_experts = 0;
  int32_t max_top_experts = 0;  // experts of a row
  int32_t max_gated = 0;        // floats of one row's gated products
  int32_t max_moe_k = 0;        // widest input of their products
  int32_t threads = 1;
};

inline constexpr int64_t kAlign = 64;  // one cache line; every buffer and scratch part starts on one
static constexpr int64_t align_up(int64_t size) { return (size + kAlign - 1) / kAlign * kAlign; }

}  // namespace headrace
