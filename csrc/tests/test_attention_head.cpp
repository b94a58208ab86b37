// Attention and head called directly, each thread with scratch of exactly the size that the ops ask for, so that the
// sanitizers see every step over its end: ragged steps, long contexts divided between threads, more kept rows than
// there is room for. Any number of threads must give the bits that one gives.
#include <cstring>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "core/kernels.h"
#include "core/limits.h"
#include "ops/attention.h"
#include "ops/head.h"
#include "pack.h"
#include "probe.h"
#include "tests/check.h"

namespace headrace::tests {
namespace {

struct Random {
  uint64_t state = 0x9e3779b97f4a7c15u;
  uint32_t next() {
    state ^= state >> 12, state ^= state << 25, state ^= state >> 27;
    return static_cast<uint32_t>((state * 0x2545f4914f6cdd1du) >> 32);
  }
  float real() { return static_cast<float>(next() >> 8) * 0x1p-23f - 1.0f; }
};

// Memory of exactly this size, aligned, filled with NaN: nothing may rely on what is in it.
struct Block {
  explicit Block(int64_t size) : data(static_cast<uint8_t*>(operator new(static_cast<size_t>(size), kLine))) {
    std::memset(data, 0xff, static_cast<size_t>(size));
  }
  Block(Block&& other) noexcept : data(std::exchange(other.data, nullptr)) {}
  ~Block() { operator delete(data, kLine); }
  static constexpr std::align_val_t kLine{64};
  uint8_t* data;
};

// Runs one record on threads of its own; the first of them may come late.
void run(const KernelTable& kernels, const Record& record, const ThreadContext& shared, const Limits& limits,
         int64_t own_bytes, int64_t shared_bytes, std::chrono::milliseconds late = {}) {
  Barrier barrier(limits.threads);
  std::vector<Taken> parts(static_cast<size_t>(limits.threads));
  std::vector<Rounds> rounds(static_cast<size_t>(limits.threads));
  Block shared_scratch(shared_bytes + 64), shared_rows(shared_rows_bytes(limits));
  std::vector<Block> scratch, own_rows;
  std::vector<std::thread> threads;
  for (int32_t t = 0; t < limits.threads; ++t) {
    scratch.emplace_back(own_bytes);
    own_rows.emplace_back(own_rows_bytes(limits));
  }
  for (int32_t t = 0; t < limits.threads; ++t) {
    threads.emplace_back([&, t] {
      ThreadContext context = shared;
      context.thread = t;
      context.threads = limits.threads;
      context.scratch = scratch[static_cast<size_t>(t)].data;
      context.scratch_bytes = own_bytes;
      context.shared_scratch = shared_scratch.data;
      context.shared_scratch_bytes = shared_bytes;
      context.shared_rows = shared_rows.data;
      context.own_rows = own_rows[static_cast<size_t>(t)].data;
      context.limits = &limits;
      context.barrier = &barrier;
      context.parts = parts.data();
      context.rounds = &rounds[static_cast<size_t>(t)];
      if (t == 0) std::this_thread::sleep_for(late);
      kernels.ops[static_cast<int32_t>(record.opcode())](record, context);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

template <typename T>
Record record_of(const T& fields) {
  Record record{};
  std::memcpy(record.bytes, &fields, sizeof fields);
  return record;
}

// --- attention -------------------------------------------------------------------------------------------------------

struct Shape {
  int32_t heads, kv_heads, head_size, window;
};
struct Part {
  int32_t start, rows;  // position of the first row
};

std::vector<float> attend(const KernelTable& kernels, KvType type, const Shape& shape, const std::vector<Part>& parts,
                          int32_t threads) {
  Random random;
  std::vector<int32_t> positions, starts{0}, row_seq, tables;
  int32_t blocks = 0, max_blocks = 0;
  for (const Part& part : parts) max_blocks = std::max(max_blocks, (part.start + part.rows + 31) / 32);
  for (size_t seq = 0; seq < parts.size(); ++seq) {
    for (int32_t i = 0; i < parts[seq].rows; ++i) positions.push_back(parts[seq].start + i);
    row_seq.resize(positions.size(), static_cast<int32_t>(seq));
    starts.push_back(static_cast<int32_t>(positions.size()));
    const int32_t used = (parts[seq].start + parts[seq].rows + 31) / 32;
    for (int32_t i = 0; i < max_blocks; ++i) tables.push_back(i < used ? blocks++ : -1);
  }
  KvPool kv{type, 1, shape.kv_heads, shape.head_size, blocks, nullptr};
  // Pages hold NaN but where the sequences have written.
  Block pages(kv.blocks * kv.block_bytes());
  kv.data = pages.data;
  for (size_t seq = 0; seq < parts.size(); ++seq)
    for (int32_t position = 0; position < parts[seq].start + parts[seq].rows; ++position)
      for (int32_t head = 0; head < shape.kv_heads; ++head) {
        const int32_t block = tables[seq * static_cast<size_t>(max_blocks) + static_cast<size_t>(position / 32)];
        const int64_t slot = position % 32, size = shape.head_size;
        for (int64_t d = 0; d < size; ++d) {
          const float k = random.real(), v = random.real();
          if (type == KvType::kF32) {
            reinterpret_cast<float*>(kv.k_page(0, block, head))[d * 32 + slot] = k;
            reinterpret_cast<float*>(kv.v_page(0, block, head))[slot * size + d] = v;
          } else {
            reinterpret_cast<uint16_t*>(kv.k_page(0, block, head))[(d / 2 * 32 + slot) * 2 + d % 2] =
                scalar::f32_to_bf16(k);
            reinterpret_cast<uint16_t*>(kv.v_page(0, block, head))[(slot / 2 * size + d) * 2 + slot % 2] =
                scalar::f32_to_bf16(v);
          }
        }
      }

  const auto rows = static_cast<int32_t>(positions.size());
  const int64_t width = int64_t{shape.heads} * shape.head_size;
  Block arena(2 * rows * width * 4);
  auto* q = reinterpret_cast<float*>(arena.data);
  for (int64_t i = 0; i < rows * width; ++i) q[i] = random.real() * 4.0f;
  StepView step{};
  step.tokens = step.positions = positions;
  step.seq_starts = starts;
  step.row_seq = row_seq;
  step.block_tables = tables;
  step.max_blocks = max_blocks;
  ThreadContext context;
  context.arena = arena.data;
  context.step = &step;
  context.kv = &kv;
  Limits limits;
  limits.max_rows = rows;
  limits.max_sequences = static_cast<int32_t>(parts.size());
  limits.max_outputs = 1;
  limits.max_k = 32;
  limits.max_positions = max_blocks * 32;
  limits.max_heads = shape.heads;
  limits.max_kv_heads = shape.kv_heads;
  limits.max_head_size = shape.head_size;
  limits.threads = threads;
  AttentionRecord fields{};
  fields.opcode = static_cast<int32_t>(Opcode::kAttention);
  fields.out = rows * width * 4;
  fields.heads = shape.heads;
  fields.kv_heads = shape.kv_heads;
  fields.head_size = shape.head_size;
  fields.scale = 0.2f;
  fields.window = shape.window;
  run(kernels, record_of(fields), context, limits, attention_scratch_bytes(limits), attention_shared_bytes(limits));
  const float* out = q + rows * width;
  return {out, out + rows * width};
}

void attention_is_the_same_on_any_number_of_threads(const KernelTable& kernels) {
  const Shape shapes[] = {{3, 1, 32, 0}, {9, 3, 64, 0},  {4, 4, 32, 70},
                          {8, 1, 96, 0}, {2, 2, 256, 0}, {50, 1, 32, 600}};
  const std::vector<Part> batches[] = {
      {{1100, 1}},                                                // one row, divided by slices
      {{0, 1}, {1050, 1}, {30, 3}, {511, 1}, {512, 1}, {0, 40}},  // ragged, with one long row
      {{510, 50}, {0, 33}},                                       // chunks
  };
  const bool is_slow = std::string(kernels.isa) == "scalar";  // under a sanitizer minutes: two shapes must do
  for (const KvType type : {KvType::kF32, KvType::kBf16})
    for (const Shape& shape : std::span(shapes).first(is_slow ? 2 : 6))
      for (const auto& batch : batches) {
        const std::vector<float> alone = attend(kernels, type, shape, batch, 1);
        bool is_finite = true;
        for (const float value : alone) is_finite &= std::isfinite(value);
        check(is_finite, std::string(kernels.isa) + ": attention sees only what was written");
        for (const int32_t threads : {2, 7})
          check(attend(kernels, type, shape, batch, threads) == alone,
                std::string(kernels.isa) + ": attention on " + std::to_string(threads) + " threads");
      }
}

// --- head ------------------------------------------------------------------------------------------------------------

constexpr int32_t kVocab = 2003, kWidth = 64, kRows = 90, kMaxTop = 20;

struct Chosen {
  std::vector<ResultRow> results;
  std::vector<int32_t> ids;
};

// `columns` different ones come again and again: all logits are tied, and the lowest id of a tie is the better one.
Chosen choose(const KernelTable& kernels, int32_t threads, int32_t rows, int32_t columns = kVocab,
              std::chrono::milliseconds late = {}) {
  Random random;
  std::vector<float> raw(kVocab * kWidth);
  for (int32_t i = 0; i < kVocab * kWidth; ++i) {
    const auto at = static_cast<size_t>(i);
    raw[at] = i < columns * kWidth ? random.real() * 0.2f : raw[at - static_cast<size_t>(columns * kWidth)];
  }
  Block packed(packed_bytes(Layout::kQ8, kVocab, kWidth));
  pack(Layout::kQ8, Source::kF32, reinterpret_cast<const uint8_t*>(raw.data()), kVocab, kWidth, 1, packed.data);
  const Weight weight{Layout::kQ8, kVocab, kWidth, packed.data, packed_bytes(Layout::kQ8, kVocab, kWidth)};
  Block arena(kRows * kWidth * 4);
  for (int32_t i = 0; i < kRows * kWidth; ++i) reinterpret_cast<float*>(arena.data)[i] = random.real();

  std::vector<int32_t> count_ids, counts;
  std::vector<uint32_t> masks((kVocab + 31) / 32);
  for (int32_t id = 0; id < kVocab; id += 7) count_ids.push_back(id), counts.push_back(id % 5 - 2);
  for (uint32_t& word : masks) word = random.next();
  const std::vector<int32_t> bias_ids{0, 15, 16, kVocab - 1};
  const std::vector<float> bias_values{0.5f, -1.0f, 2.0f, 1.0f};
  std::vector<OutputRow> outputs;
  for (int32_t i = 0; i < rows; ++i) {
    OutputRow o{};
    o.seed = static_cast<uint64_t>(i);
    o.row = i % kRows;
    o.temperature = i % 6 == 0 ? 0.0f : 0.9f;
    o.top_k = i % 7 == 3 ? 300 : i % 7 == 4 ? 20 : 0;
    o.top_p = i % 3 == 1 ? 0.9f : 1.0f;
    o.min_p = i % 5 == 2 ? 0.3f : 0.0f;
    o.repetition = i % 4 == 1 ? 1.3f : 1.0f;
    o.frequency = 0.1f;
    o.position = i;
    o.num_logprobs = i % 8 == 0 ? kMaxTop : -1;
    o.target = i % 11 == 10 ? i : -1;
    o.counts_len = i % 4 == 1 ? static_cast<int32_t>(count_ids.size()) : 0;
    o.bias_len = i % 4 == 2 ? 4 : 0;
    o.mask = i % 9 == 5 ? 0 : -1;
    outputs.push_back(o);
  }
  Chosen chosen{std::vector<ResultRow>(static_cast<size_t>(rows)),
                std::vector<int32_t>(static_cast<size_t>(rows * kMaxTop))};
  std::vector<float> logprobs(chosen.ids.size());
  StepView step{};
  step.outputs = outputs;
  step.results = chosen.results;
  step.top_ids = chosen.ids;
  step.top_logprobs = logprobs;
  step.max_top = kMaxTop;
  step.count_ids = count_ids;
  step.counts = counts;
  step.bias_ids = bias_ids;
  step.bias_values = bias_values;
  step.masks = masks;
  step.mask_words = static_cast<int32_t>(masks.size());
  ThreadContext context;
  context.arena = arena.data;
  context.weights = &weight;
  context.step = &step;
  Limits limits;
  limits.max_rows = kRows;
  limits.max_outputs = rows;
  limits.max_top = kMaxTop;
  limits.max_k = kWidth;
  limits.max_vocab = kVocab;
  limits.threads = threads;
  HeadRecord fields{};
  fields.opcode = static_cast<int32_t>(Opcode::kHead);
  fields.k = kWidth;
  fields.vocab = kVocab;
  fields.norm = static_cast<int32_t>(Norm::kRms);
  fields.norm_weight = -1;
  fields.norm_eps = 1e-5f;
  fields.scale = 1.0f;
  fields.softcap = 30.0f;
  run(kernels, record_of(fields), context, limits, head_scratch_bytes(limits), head_shared_bytes(limits), late);
  return chosen;
}

void choices_are_the_same_on_any_number_of_threads(const KernelTable& kernels) {
  // 300 rows: more of them may need their whole row than the head keeps.
  for (const int32_t rows : {1, 2, 9, 300}) {
    const Chosen alone = choose(kernels, 1, rows);
    for (int32_t i = 0; i < rows; ++i) {
      const ResultRow& result = alone.results[static_cast<size_t>(i)];
      check(result.status == 0 && result.token >= 0 && result.token < kVocab, "row " + std::to_string(i) + " chooses");
    }
    for (const int32_t threads : {2, 3, 7}) {
      const Chosen other = choose(kernels, threads, rows);
      check(std::memcmp(other.results.data(), alone.results.data(), alone.results.size() * sizeof(ResultRow)) == 0 &&
                other.ids == alone.ids,
            std::string(kernels.isa) + ": head of " + std::to_string(rows) + " rows on " + std::to_string(threads) +
                " threads");
    }
  }
}

void ties_are_the_same_when_slices_come_in_another_order(const KernelTable& kernels) {
  const Chosen alone = choose(kernels, 1, 9, 61);
  // The first thread's slices, of the lowest ids, are taken by the others behind their own.
  const Chosen other = choose(kernels, 3, 9, 61, std::chrono::milliseconds(5));
  check(std::memcmp(other.results.data(), alone.results.data(), alone.results.size() * sizeof(ResultRow)) == 0 &&
            other.ids == alone.ids,
        std::string(kernels.isa) + ": ties of the head with a late thread");
}

}  // namespace
}  // namespace headrace::tests

int main() {
  using namespace headrace::tests;
  for (const headrace::KernelTable* kernels : headrace::available_kernels()) {
    attention_is_the_same_on_any_number_of_threads(*kernels);
    choices_are_the_same_on_any_number_of_threads(*kernels);
    ties_are_the_same_when_slices_come_in_another_order(*kernels);
  }
  return report("attention and head");
}
