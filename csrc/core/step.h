// What one call of the VM works on: a ragged batch, its outputs, and the memory that a step may touch.
// Plain views; the Python side owns the memory and has checked every bound (vm.cpp re-checks once per step).
#pragma once

#include <cstdint>
#include <span>

#include "core/limits.h"
#include "gen/opcodes.h"

namespace headrace {

// A packed weight. `data` outlives the VM (the Python handle keeps the array alive).
struct Weight {
  Layout layout = Layout::kVectorF32;
  int64_t n = 0;  // columns that exist; packed layouts are padded to kLanes
  int64_t k = 0;
  const uint8_t* data = nullptr;
  int64_t size_bytes = 0;
};

// The KV pool. A page holds kBlockTokens tokens of one kv head of one layer: K as [D/2][32][2] bf16 (or [D][32] f32),
// V as [32/2][D][2] bf16 (or [32][D] f32). All kv heads of a block of a layer lie together: K page, then V page; and
// all layers of a block, [block][layer][head][K, V]: the system gives huge pages, so blocks that hold nothing cost
// nothing only where those in use lie side by side. Layer by layer, the first token took 2 MiB of each.
struct KvPool {
  KvType type = KvType::kBf16;
  int32_t layers = 0;
  int32_t kv_heads = 0;
  int32_t head_size = 0;
  int32_t blocks = 0;
  uint8_t* data = nullptr;

  int64_t page_bytes() const { return int64_t{kBlockTokens} * head_size * (type == KvType::kF32 ? 4 : 2); }
  int64_t block_bytes() const { return 2 * page_bytes() * kv_heads; }
  uint8_t* k_page(int32_t layer, int32_t block, int32_t head) const {
    return data + (int64_t{block} * layers + layer) * block_bytes() + 2 * page_bytes() * head;
  }
  uint8_t* v_page(int32_t layer, int32_t block, int32_t head) const {
    return k_page(layer, block, head) + page_bytes();
  }
};

// One step's inputs and outputs. R rows, S sequences, L output rows. Rows of a sequence are consecutive and their
// positions rise by one; a sequence's KV before its first row is already in its pages.
struct StepView {
  std::span<const int32_t> tokens;       // [R]
  std::span<const int32_t> positions;    // [R]
  std::span<const int32_t> seq_starts;   // [S + 1] row ranges, seq_starts[0] == 0, seq_starts[S] == R
  std::span<const int32_t> row_seq;      // [R] sequence of each row (derived by the VM)
  std::span<const int32_t> token_types;  // [R], or empty for all 0
  std::span<const int32_t> step_pages;  // [S] first of each sequence's pages in the step's own pool (derived by the VM)
  std::span<const int32_t> block_tables;  // [S][max_blocks]
  int32_t max_blocks = 0;
  std::span<const OutputRow> outputs;  // [L]
  std::span<ResultRow> results;        // [L]
  std::span<int32_t> top_ids;          // [L][max_top]
  std::span<float> top_logprobs;       // [L][max_top]
  int32_t max_top = 0;
  std::span<const int32_t> count_ids;  // ascending within a row's range
  std::span<const int32_t> counts;
  std::span<const int32_t> bias_ids;  // ascending within a row's range
  std::span<const float> bias_values;
  std::span<const uint32_t> masks;  // [M][mask_words], bit t of word t/32: token t allowed
  int32_t mask_words = 0;

  int32_t rows() const { return static_cast<int32_t>(tokens.size()); }
  int32_t sequences() const { return static_cast<int32_t>(seq_starts.size()) - 1; }
  int32_t num_outputs() const { return static_cast<int32_t>(outputs.size()); }
  int32_t block(int32_t seq, int32_t index) const {
    return block_tables[static_cast<size_t>(seq) * max_blocks + index];
  }
};

class Barrier;
struct Taken;   // claims.h
struct Rounds;  // claims.h

// One thread's view of the running step. Everything an op needs; ops keep no state and no globals.
struct ThreadContext {
  int32_t thread = 0;
  int32_t threads = 1;
  uint8_t* arena = nullptr;           // shared activation buffers, 64-byte aligned offsets from the program
  uint8_t* shared_scratch = nullptr;  // shared by the threads within one record (partials, candidates)
  int64_t shared_scratch_bytes = 0;
  uint8_t* scratch = nullptr;  // this thread's own
  int64_t scratch_bytes = 0;
  uint8_t* shared_rows = nullptr;  // where ops/prologue.h puts prepared rows; ops do not touch it themselves
  uint8_t* own_rows = nullptr;     // the same for few rows, this thread's own
  const Limits* limits = nullptr;
  const Weight* weights = nullptr;
  const StepView* step = nullptr;
  const KvPool* kv = nullptr;
  const KvPool* step_kv = nullptr;  // of one layer: pages of the step's own rows (kStepPages)
  Barrier* barrier = nullptr;       // all threads must arrive; see pool.h
  Taken* parts = nullptr;           // [threads], what is taken of each thread's units; see claims.h
  Rounds* rounds = nullptr;         // this thread's own

  template <typename T>
  T* buffer(int64_t offset) const {
    return reinterpret_cast<T*>(arena + offset);
  }
};

// The pages of one record's layer: where they lie, and which belong to a sequence.
struct LayerPages {
  const KvPool& pool;
  const StepView& step;
  int32_t layer;
  bool is_of_step;

  LayerPages(const ThreadContext& context, int32_t record_layer)
      : pool(record_layer == kStepPages ? *context.step_kv : *context.kv),
        step(*context.step),
        layer(record_layer == kStepPages ? 0 : record_layer),
        is_of_step(record_layer == kStepPages) {}

  int32_t block(int32_t seq, int32_t index) const {
    return is_of_step ? step.step_pages[static_cast<size_t>(seq)] + index : step.block(seq, index);
  }
  uint8_t* k(int32_t block, int32_t head) const { return pool.k_page(layer, block, head); }
  uint8_t* v(int32_t block, int32_t head) const { return pool.v_page(layer, block, head); }
};

// The share of `count` items that thread `thread` of `threads` owns: contiguous, and the same for the same numbers.
struct Range {
  int64_t start, stop;
};
static inline Range share(int64_t count, int32_t thread, int32_t threads) {
  return {count * thread / threads, count * (thread + 1) / threads};
}

}  // namespace headrace
