#include "core/vm.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <stdexcept>
#include <string>

#include "core/fail.h"
#include "ops/attention.h"
#include "ops/head.h"
#include "ops/moe.h"
#include "ops/product.h"
#include "ops/prologue.h"
#include "ops/qkv.h"

namespace headrace {
namespace {

constexpr int32_t kMaxThreads = 256;

int64_t weight_bytes(const Weight& w) {
  switch (w.layout) {
    case Layout::kVectorF32: return w.n * 4;
    case Layout::kRopeF32: return w.n * w.k * 4;
    default: return num_tiles(w.n) * tile_bytes(w.layout, w.k);
  }
}

constexpr int64_t kMaxSide = int64_t{1} << 31;  // no weight is wider; products of two sides stay in 64 bits

}  // namespace

Vm::Vm(std::span<const Record> records, std::vector<Weight> weights, const VmConfig& config, const KernelTable& kernels)
    : kernels_(&kernels),
      weights_(std::move(weights)),
      records_(records.begin(), records.end()),
      kv_(config.kv),
      pool_([&] {
        if (config.threads < 1 || config.threads > kMaxThreads) {
          fail("threads is ", config.threads, ", the limit is ", kMaxThreads);
        }
        return config.threads;
      }()) {
  const auto between = [](const char* what, int64_t value, int64_t low, int64_t high) {
    if (value < low || value > high) fail(what, " is ", value, ", it must lie in ", low, " to ", high);
  };
  between("max_rows", config.max_rows, 1, 1 << 20);
  between("max_sequences", config.max_sequences, 1, config.max_rows);
  between("max_outputs", config.max_outputs, 1, config.max_rows);
  between("max_top", config.max_top, 0, kMaxLogprobs);
  between("arena_bytes", config.arena_bytes, 0, int64_t{1} << 44);
  between("kv layers", kv_.layers, 0, 1 << 16);
  between("kv heads", kv_.kv_heads, 1, 1 << 16);
  between("kv blocks", kv_.blocks, 0, std::numeric_limits<int32_t>::max() / kBlockTokens);
  between("head_size", kv_.head_size, kGroup, 4096);
  if (kv_.head_size % kGroup != 0) fail("head_size is ", kv_.head_size, ", it must be a multiple of ", kGroup);
  if (kv_.type != KvType::kF32 && kv_.type != KvType::kBf16) fail("the KV type is unknown");
  if (records_.empty()) fail("the program has no records");
  // Bounds of 2^16 layers, 2^26 blocks and 2^42 bytes a block may not be multiplied blindly.
  const double kv_size = static_cast<double>(kv_.layers) * kv_.blocks * static_cast<double>(kv_.block_bytes());
  if (kv_size > 0x1p46) fail("the KV pool would take ", kv_size, " bytes");

  limits_ = {.max_rows = config.max_rows,
             .max_sequences = config.max_sequences,
             .max_outputs = config.max_outputs,
             .max_top = config.max_top,
             .max_positions = std::numeric_limits<int32_t>::max(),
             .threads = config.threads};
  for (size_t i = 0; i < weights_.size(); ++i) {
    const Weight& w = weights_[i];
    if (w.layout != Layout::kVectorF32 && w.layout != Layout::kRopeF32 && !is_matrix(w.layout))
      fail("weight ", i, ": the layout is unknown");
    if (w.n < 1 || w.n >= kMaxSide || w.k < 0 || w.k >= kMaxSide) {
      fail("weight ", i, ": a shape of ", w.n, " x ", w.k, " is out of range");
    }
    if (is_matrix(w.layout) && (w.k == 0 || w.k % kGroup != 0)) {
      fail("weight ", i, ": k is ", w.k, ", it must be a multiple of ", kGroup);
    }
    if (weight_bytes(w) != w.size_bytes) {
      fail("weight ", i, " holds ", w.size_bytes, " bytes, its shape ", w.n, " x ", w.k, " needs ", weight_bytes(w));
    }
    if (reinterpret_cast<uintptr_t>(w.data) % kAlign != 0) fail("weight ", i, " is not aligned to ", kAlign, " bytes");
  }
  arena_ = Memory(config.arena_bytes);
  int32_t phase = std::numeric_limits<int32_t>::min();
  for (size_t i = 0; i < records_.size(); ++i) {
    if (records_[i].phase() < phase) fail("record ", i, ": phases must not fall");
    // Ops of one phase still share prepared rows and scratch: only where one of two has neither may they follow freely.
    const auto is_plain = [&](size_t j) {
      const Opcode opcode = records_[j].opcode();
      return opcode == Opcode::kEmbed || opcode == Opcode::kNorm || opcode == Opcode::kPool;
    };
    has_barrier_.push_back(i > 0 && (records_[i].phase() != phase || !is_plain(i) || !is_plain(i - 1)));
    phase = records_[i].phase();
    try {
      check_record(records_[i]);
    } catch (const std::invalid_argument& error) {
      fail("record ", i, " (opcode ", static_cast<int32_t>(records_[i].opcode()), "): ", error.what());
    }
  }

  kv_memory_ = Memory(kv_.layers * (kv_.blocks * kv_.block_bytes()));
  kv_.data = kv_memory_.data();
  // Each sequence starts on a page of its own: the last one of each may be all but empty.
  step_kv_ = kv_;
  step_kv_.layers = has_step_pages_ ? 1 : 0;
  step_kv_.blocks = limits_.max_rows / kBlockTokens + limits_.max_sequences;
  step_kv_memory_ = Memory(step_kv_.layers * (step_kv_.blocks * step_kv_.block_bytes()));
  step_kv_.data = step_kv_memory_.data();
  const int64_t own = align_up(std::max({attention_scratch_bytes(limits_), head_scratch_bytes(limits_),
                                         qkv_scratch_bytes(limits_), moe_scratch_bytes(limits_)}));
  const int64_t shared =
      align_up(std::max({attention_shared_bytes(limits_), head_shared_bytes(limits_), moe_shared_bytes(limits_)}));
  const int64_t own_rows = align_up(own_rows_bytes(limits_)), shared_rows = align_up(shared_rows_bytes(limits_));
  scratch_ = Memory(shared + shared_rows + limits_.threads * (own + own_rows));
  row_seq_.resize(static_cast<size_t>(limits_.max_rows));
  const auto sequences = static_cast<size_t>(limits_.max_sequences);
  step_pages_.resize(sequences);
  decode_tokens_.resize(sequences);
  decode_positions_.resize(sequences);
  decode_outputs_.resize(sequences);
  parts_ = std::vector<Taken>(static_cast<size_t>(limits_.threads));
  rounds_.resize(static_cast<size_t>(limits_.threads));
  for (int32_t thread = 0; thread < limits_.threads; ++thread) {
    uint8_t* base = scratch_.data() + shared + shared_rows + thread * (own + own_rows);
    contexts_.push_back({.thread = thread,
                         .threads = limits_.threads,
                         .arena = arena_.data(),
                         .shared_scratch = scratch_.data(),
                         .shared_scratch_bytes = shared,
                         .scratch = base,
                         .scratch_bytes = own,
                         .shared_rows = scratch_.data() + shared,
                         .own_rows = base + own,
                         .limits = &limits_,
                         .weights = weights_.data(),
                         .step = &step_,
                         .kv = &kv_,
                         .step_kv = &step_kv_,
                         .barrier = &pool_.barrier(),
                         .parts = parts_.data(),
                         .rounds = &rounds_[static_cast<size_t>(thread)]});
  }
}

void Vm::step(StepView step, int64_t num_records) {
  check_step(step);
  const auto all = static_cast<int64_t>(records_.size());
  if (num_records > all || num_records < -1) fail("num_records is ", num_records, ", the program has ", all);
  num_records_ = num_records < 0 ? all : num_records;
  step.row_seq = std::span<const int32_t>(row_seq_).first(step.tokens.size());
  step.step_pages = step_pages_;
  step_ = step;
  for (Taken& part : parts_) part.units.store(0, std::memory_order_relaxed);
  for (Rounds& rounds : rounds_) rounds.count = 0;
  pool_.run([](void* vm, int32_t thread) { static_cast<Vm*>(vm)->run_thread(thread); }, this);
}

void Vm::set_threads(int32_t threads) {
  if (threads < 1 || threads > limits_.threads) fail("threads is ", threads, ", the VM has ", limits_.threads);
  for (ThreadContext& context : contexts_) context.threads = threads;
  pool_.set_active(threads);
}

void Vm::time_records(bool is_on) {
  times_.assign(is_on ? static_cast<size_t>(limits_.threads) * records_.size() : 0, {});
}

void Vm::run_thread(int32_t thread) {
  using std::chrono::nanoseconds, std::chrono::steady_clock;
  const ThreadContext& context = contexts_[static_cast<size_t>(thread)];
  RecordTime* times = times_.empty() ? nullptr : times_.data() + static_cast<size_t>(thread) * records_.size();
  auto before = times == nullptr ? steady_clock::time_point() : steady_clock::now();
  const auto note = [&](int64_t& ns) {
    const auto now = steady_clock::now();
    ns += nanoseconds(now - before).count();
    before = now;
  };
  for (int64_t i = 0; i < num_records_; ++i) {
    const auto index = static_cast<size_t>(i);
    if (has_barrier_[index]) context.barrier->wait();
    if (times != nullptr) note(times[i].waiting_ns);
    const Record& record = records_[index];
    kernels_->ops[static_cast<int32_t>(record.opcode())](record, context);
    if (times != nullptr) note(times[i].working_ns);
  }
}

}  // namespace headrace
