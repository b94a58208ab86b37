#include "core/vm.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

#include "ops/attention.h"
#include "ops/head.h"
#include "ops/product.h"
#include "ops/prologue.h"
namespace headrace {
namespace {

constexpr int32_t kMaxThreads = 256;

template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::string message;
  const auto append = [&](const auto& part) {
    if constexpr (std::is_arithmetic_v<std::decay_t<decltype(part)>>) message += std::to_string(part);
    else message += part;
  };
  (append(parts), ...);
  throw std::invalid_argument(message);
}

int64_t weight_bytes(const Weight& w) {
  switch (w.layout) {
    case Layout::kVectorF32: return w.n * 4;
    case Layout::kRopeF32: return w.n * w.k * 4;
    default: return num_tiles(w.n) * tile_bytes(w.layout, w.k);
  }
}

constexpr int64_t kMaxSide = int64_t{1} << 31;  // no weight is wider; products of two sides stay in 64 bits

}  // namespace

const Weight& Vm::check_matrix(const char* what, int32_t index, int64_t n, int64_t k) const {
  if (index < 0 || index >= static_cast<int64_t>(weights_.size())) {
    fail(what, " names weight ", index, ", the program has ", weights_.size());
  }
  const Weight& w = weights_[static_cast<size_t>(index)];
  if (!is_matrix(w.layout)) fail(what, ": weight ", index, " is not a matrix");
  if (w.n != n || w.k != k) {
    fail(what, ": weight ", index, " is ", w.n, " x ", w.k, ", the record wants ", n, " x ", k);
  }
  return w;
}

void Vm::check_vector(const char* what, int32_t index, int64_t n) const {
  if (index == -1) return;
  if (index < 0 || index >= static_cast<int64_t>(weights_.size())) {
    fail(what, " names weight ", index, ", the program has ", weights_.size());
  }
  const Weight& w = weights_[static_cast<size_t>(index)];
  if (w.layout != Layout::kVectorF32) fail(what, ": weight ", index, " is not a vector");
  if (w.n != n) fail(what, ": weight ", index, " has ", w.n, " elements, the record wants ", n);
}

void Vm::check_buffer(const char* what, int64_t offset, int64_t width) const {
  const int64_t size = int64_t{limits_.max_rows} * width * 4;
  if (offset < 0 || offset % kAlign != 0) fail(what, ": offset ", offset, " is not a multiple of ", kAlign);
  if (size > arena_.size_bytes() || offset > arena_.size_bytes() - size) {
    fail(what, ": bytes ", offset, " to ", offset + size, " lie outside the arena of ", arena_.size_bytes());
  }
}

void Vm::check_norm(int32_t norm, int32_t norm_weight, float norm_eps, int64_t k) const {
  if (norm != static_cast<int32_t>(Norm::kNone) && norm != static_cast<int32_t>(Norm::kRms)) {
    fail("norm ", norm, " is unknown");
  }
  check_vector("norm_weight", norm_weight, k);
  if (!(norm_eps >= 0.0f && std::isfinite(norm_eps))) fail("norm_eps must be finite and not negative");
}

void Vm::check_record(const Record& record) {
  const auto opcode = static_cast<int32_t>(record.opcode());
  if (opcode < 1 || opcode >= kOpcodeCount) fail("opcode ", opcode, " is unknown");
  if (kernels_->ops[opcode] == nullptr) fail("opcode ", opcode, " has no kernel for ", kernels_->isa);
  const auto positive = [](const char* what, int64_t value) {
    if (value <= 0) fail(what, " is ", value, ", it must be positive");
  };
  const auto check_heads = [&](int32_t heads, int32_t kv_heads, int32_t head_size, int32_t layer) {
    positive("heads", heads);
    if (kv_heads != kv_.kv_heads || heads % kv_heads != 0) {
      fail("kv_heads ", kv_heads, " must be the pool's ", kv_.kv_heads, " and divide heads ", heads);
    }
    if (head_size != kv_.head_size) fail("head_size ", head_size, " is not the pool's ", kv_.head_size);
    if (layer < 0 || layer >= kv_.layers) fail("layer ", layer, ", the KV pool has ", kv_.layers);
    has_kv_ = true;
    limits_.max_heads = std::max(limits_.max_heads, heads);
    limits_.max_kv_heads = std::max(limits_.max_kv_heads, kv_heads);
    limits_.max_head_size = std::max(limits_.max_head_size, head_size);
  };
  const auto widest = [&](int64_t k) { limits_.max_k = std::max(limits_.max_k, static_cast<int32_t>(k)); };

  switch (record.opcode()) {
    case Opcode::kEmbed: {
      const auto r = record.as<EmbedRecord>();
      if (r.table < 0 || r.table >= static_cast<int64_t>(weights_.size())) fail("embed names weight ", r.table);
      const int64_t n = weights_[static_cast<size_t>(r.table)].n;
      check_matrix("table", r.table, n, r.width);
      check_buffer("out", r.out, r.width);
      const auto rows = static_cast<int32_t>(n);
      vocab_ = vocab_ == 0 ? rows : std::min(vocab_, rows);
      return;
    }
    case Opcode::kLinear: {
      const auto r = record.as<LinearRecord>();
      check_matrix("weight", r.weight, r.n, r.k);
      check_vector("bias", r.bias, r.n);
      check_norm(r.norm, r.norm_weight, r.norm_eps, r.k);
      if (r.epilogue < 0 || r.epilogue > static_cast<int32_t>(Epilogue::kSiluGlu)) {
        fail("epilogue ", r.epilogue, " is unknown");
      }
      const bool is_glu = r.epilogue == static_cast<int32_t>(Epilogue::kSiluGlu);
      if (is_glu && r.n % (2 * kLanes) != 0) fail("a gated product needs n in 32s, n is ", r.n);
      check_buffer("input", r.input, r.k);
      check_buffer("out", r.out, is_glu ? r.n / 2 : r.n);
      widest(r.k);
      return;
    }
    case Opcode::kQkv: {
      const auto r = record.as<QkvRecord>();
      check_heads(r.heads, r.kv_heads, r.head_size, r.layer);
      const int64_t n = (int64_t{r.heads} + 2 * int64_t{r.kv_heads}) * r.head_size;
      check_matrix("weight", r.weight, n, r.k);
      check_vector("bias", r.bias, n);
      check_norm(r.norm, r.norm_weight, r.norm_eps, r.k);
      check_buffer("input", r.input, r.k);
      check_buffer("q_out", r.q_out, int64_t{r.heads} * r.head_size);
      if (r.rope != -1) {
        if (r.rope < 0 || r.rope >= static_cast<int64_t>(weights_.size())) fail("rope names weight ", r.rope);
        const Weight& rope = weights_[static_cast<size_t>(r.rope)];
        if (rope.layout != Layout::kRopeF32 || rope.k != r.head_size) {
          fail("rope: weight ", r.rope, " is not a rotation table of head size ", r.head_size);
        }
        limits_.max_positions = static_cast<int32_t>(std::min<int64_t>(limits_.max_positions, rope.n));
      }
      widest(r.k);
      return;
    }
    case Opcode::kAttention: {
      const auto r = record.as<AttentionRecord>();
      check_heads(r.heads, r.kv_heads, r.head_size, r.layer);
      check_buffer("q", r.q, int64_t{r.heads} * r.head_size);
      check_buffer("out", r.out, int64_t{r.heads} * r.head_size);
      if (r.window < 0) fail("window is ", r.window);
      if (!std::isfinite(r.scale) || !(r.softcap >= 0.0f)) fail("scale or softcap of attention is out of range");
      return;
    }
    case Opcode::kHead: {
      const auto r = record.as<HeadRecord>();
      check_matrix("weight", r.weight, r.vocab, r.k);
      check_norm(r.norm, r.norm_weight, r.norm_eps, r.k);
      check_buffer("input", r.input, r.k);
      if (!std::isfinite(r.scale) || !(r.softcap >= 0.0f)) fail("scale or softcap of the head is out of range");
      limits_.max_vocab = std::max(limits_.max_vocab, r.vocab);
      head_vocab_ = head_vocab_ == 0 ? r.vocab : std::min(head_vocab_, r.vocab);
      widest(r.k);
      return;
    }
  }
}

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
             .max_positions = kv_.blocks * kBlockTokens,
             .threads = config.threads};
  for (size_t i = 0; i < weights_.size(); ++i) {
    const Weight& w = weights_[i];
    if (w.layout < Layout::kVectorF32 || w.layout > Layout::kQ4m) fail("weight ", i, ": the layout is unknown");
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
    // Ops of one phase still share the prepared rows, so only ops without them may run on without a barrier.
    const bool has_rows = records_[i].opcode() != Opcode::kEmbed && records_[i].opcode() != Opcode::kAttention;
    has_barrier_.push_back(i > 0 && (records_[i].phase() != phase || has_rows));
    phase = records_[i].phase();
    try {
      check_record(records_[i]);
    } catch (const std::invalid_argument& error) {
      fail("record ", i, " (opcode ", static_cast<int32_t>(records_[i].opcode()), "): ", error.what());
    }
  }

  kv_memory_ = Memory(kv_.layers * (kv_.blocks * kv_.block_bytes()));
  kv_.data = kv_memory_.data();
  const int64_t own = align_up(std::max(attention_scratch_bytes(limits_), head_scratch_bytes(limits_)));
  const int64_t shared = align_up(std::max(attention_shared_bytes(limits_), head_shared_bytes(limits_)));
  const int64_t own_rows = align_up(own_rows_bytes(limits_)), shared_rows = align_up(shared_rows_bytes(limits_));
  scratch_ = Memory(shared + shared_rows + limits_.threads * (own + own_rows));
  row_seq_.resize(static_cast<size_t>(limits_.max_rows));
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
                         .barrier = &pool_.barrier()});
  }
}

void Vm::check_step(const StepView& s) {
  const int64_t rows = s.rows(), sequences = s.sequences(), outputs = s.num_outputs();
  if (rows < 1 || rows > limits_.max_rows) fail("the step has ", rows, " rows, the limit is ", limits_.max_rows);
  if (s.positions.size() != s.tokens.size()) fail("positions must have one entry per row");
  if (sequences < 1 || sequences > limits_.max_sequences) {
    fail("the step has ", sequences, " sequences, the limit is ", limits_.max_sequences);
  }
  if (outputs > limits_.max_outputs) fail("the step has ", outputs, " outputs, the limit is ", limits_.max_outputs);
  if (s.results.size() != s.outputs.size()) fail("results must have one entry per output");
  if (s.max_top != limits_.max_top) fail("max_top is ", s.max_top, ", the VM was made for ", limits_.max_top);
  const size_t top_size = s.outputs.size() * static_cast<size_t>(s.max_top);
  if (s.top_ids.size() != top_size || s.top_logprobs.size() != top_size) fail("top arrays have the wrong size");
  if (s.block_tables.size() != static_cast<size_t>(sequences) * static_cast<size_t>(s.max_blocks)) {
    fail("block_tables must be [sequences, blocks]");
  }
  if (s.seq_starts.front() != 0 || s.seq_starts.back() != rows) fail("seq_starts must run from 0 to ", rows);
  if (vocab_ > 0) {
    for (const int32_t token : s.tokens) {
      if (token < 0 || token >= vocab_) fail("token id ", token, " is outside the vocabulary of ", vocab_);
    }
  }
  for (int32_t seq = 0; seq < sequences; ++seq) {
    const int32_t start = s.seq_starts[static_cast<size_t>(seq)], stop = s.seq_starts[static_cast<size_t>(seq) + 1];
    if (start < 0 || stop <= start || stop > rows) fail("sequence ", seq, " has rows ", start, " to ", stop);
    const int32_t position = s.positions[static_cast<size_t>(start)];
    if (position < 0) fail("row ", start, ": position ", position, " is negative");
    for (int32_t row = start; row < stop; ++row) {
      if (s.positions[static_cast<size_t>(row)] != position + (row - start)) {
        fail("row ", row, ": positions of a sequence must rise by one");
      }
      row_seq_[static_cast<size_t>(row)] = seq;
    }
    if (!has_kv_) continue;
    const int64_t last = int64_t{position} + (stop - start) - 1;
    if (last >= limits_.max_positions) {
      fail("sequence ", seq, ": position ", last, ", the limit is ", limits_.max_positions);
    }
    const auto blocks = static_cast<int32_t>(last / kBlockTokens + 1);
    if (blocks > s.max_blocks) fail("sequence ", seq, " needs ", blocks, " blocks, its table has ", s.max_blocks);
    for (int32_t i = 0; i < blocks; ++i) {
      const int32_t block = s.block(seq, i);
      if (block < 0 || block >= kv_.blocks) {
        fail("sequence ", seq, ": block ", block, " is outside the pool of ", kv_.blocks);
      }
    }
  }

  if (s.count_ids.size() != s.counts.size()) fail("counts must have one entry per count_ids");
  if (s.bias_ids.size() != s.bias_values.size()) fail("bias_values must have one entry per bias_ids");
  if (outputs == 0) return;
  const int64_t mask_words = (int64_t{head_vocab_} + 31) / 32;
  if (!s.masks.empty() && s.mask_words < std::max<int64_t>(1, mask_words))
    fail("masks need ", mask_words, " words, have ", s.mask_words);
  const int64_t masks = s.masks.empty() ? 0 : static_cast<int64_t>(s.masks.size()) / s.mask_words;
  const auto check_ids = [&](const char* what, std::span<const int32_t> ids, int32_t start, int32_t length) {
    const auto size = static_cast<int64_t>(ids.size());
    if (start < 0 || length < 0 || int64_t{start} + length > size) fail(what, " range is outside its array");
    int32_t before = -1;
    for (const int32_t id : ids.subspan(static_cast<size_t>(start), static_cast<size_t>(length))) {
      if (id <= before || id >= head_vocab_) fail(what, ": ids must rise and lie below ", head_vocab_, ", found ", id);
      before = id;
    }
  };
  for (int32_t i = 0; i < outputs; ++i) {
    const OutputRow& o = s.outputs[static_cast<size_t>(i)];
    const auto check = [&](const char* what, bool is_good) {
      if (!is_good) fail("output ", i, ": ", what, " is out of range");
    };
    check("row", o.row >= 0 && o.row < rows);
    check("top_k", o.top_k >= 0);
    check("temperature", o.temperature >= 0.0f && std::isfinite(o.temperature));
    check("top_p", o.top_p > 0.0f && o.top_p <= 1.0f);
    check("min_p", o.min_p >= 0.0f && o.min_p <= 1.0f);
    check("repetition", o.repetition > 0.0f && std::isfinite(o.repetition));
    check("presence", std::isfinite(o.presence));
    check("frequency", std::isfinite(o.frequency));
    check("position", o.position >= 0);
    check("num_logprobs", o.num_logprobs >= -1 && o.num_logprobs <= limits_.max_top);
    check("target", o.target >= -1 && o.target < head_vocab_);
    check("mask", o.mask >= -1 && o.mask < masks);
    check_ids("count_ids", s.count_ids, o.counts_start, o.counts_len);
    check_ids("bias_ids", s.bias_ids, o.bias_start, o.bias_len);
  }
}

void Vm::step(StepView step, int64_t num_records) {
  check_step(step);
  const auto all = static_cast<int64_t>(records_.size());
  if (num_records > all || num_records < -1) fail("num_records is ", num_records, ", the program has ", all);
  num_records_ = num_records < 0 ? all : num_records;
  step.row_seq = std::span<const int32_t>(row_seq_).first(step.tokens.size());
  step_ = step;
  pool_.run([](void* vm, int32_t thread) { static_cast<Vm*>(vm)->run_thread(thread); }, this);
}

void Vm::run_thread(int32_t thread) {
  const ThreadContext& context = contexts_[static_cast<size_t>(thread)];
  for (int64_t i = 0; i < num_records_; ++i) {
    const auto index = static_cast<size_t>(i);
    if (has_barrier_[index]) context.barrier->wait();
    const Record& record = records_[index];
    kernels_->ops[static_cast<int32_t>(record.opcode())](record, context);
  }
}

}  // namespace headrace
