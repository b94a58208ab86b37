// What the VM refuses: records that do not fit the weights, the arena or the pool, and steps outside the limits.
#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "core/fail.h"
#include "core/vm.h"
#include "ops/product.h"
#include "ops/prologue.h"
#include "ops/qkv.h"

namespace headrace {

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

int32_t Vm::most_rows(Domain domain) const {
  if (domain == Domain::kOutputs) return limits_.max_outputs;
  return domain == Domain::kSequences ? limits_.max_sequences : limits_.max_rows;
}

void Vm::check_buffer(const char* what, int64_t offset, int64_t width, Domain domain) const {
  const int64_t size = int64_t{most_rows(domain)} * width * 4;
  if (offset < 0 || offset % kAlign != 0) fail(what, ": offset ", offset, " is not a multiple of ", kAlign);
  if (size > arena_.size_bytes() || offset > arena_.size_bytes() - size) {
    fail(what, ": bytes ", offset, " to ", offset + size, " lie outside the arena of ", arena_.size_bytes());
  }
}

template <class R>
void Vm::check_prologue(const R& r, Domain domain, bool may_be_prepared) {
  const bool is_prepared = r.norm == static_cast<int32_t>(Norm::kPrepared);
  if (r.norm < 0 || r.norm > static_cast<int32_t>(Norm::kPrepared)) fail("norm ", r.norm, " is unknown");
  if (is_prepared && !may_be_prepared) fail("prepared rows are for LINEAR only");
  check_vector("norm_weight", r.norm_weight, r.k);
  check_vector("norm_bias", r.norm_bias, r.k);
  if (r.norm_bias != -1 && r.norm != static_cast<int32_t>(Norm::kLayer)) fail("norm_bias without a layer norm");
  check_eps("norm_eps", r.norm_eps);
  check_buffer("input", r.input, is_prepared ? prepared_width(r.k) : r.k, domain);
  limits_.max_k = std::max(limits_.max_k, r.k);
}

template <class R>
void Vm::check_heads(const R& r) {
  if (r.heads <= 0) fail("heads is ", r.heads, ", it must be positive");
  if (r.kv_heads != kv_.kv_heads || r.heads % r.kv_heads != 0) {
    fail("kv_heads ", r.kv_heads, " must be the pool's ", kv_.kv_heads, " and divide heads ", r.heads);
  }
  if (r.head_size != kv_.head_size) fail("head_size ", r.head_size, " is not the pool's ", kv_.head_size);
  if (r.layer == kStepPages) {
    has_step_pages_ = true;
  } else {
    if (r.layer < 0 || r.layer >= kv_.layers) fail("layer ", r.layer, ", the KV pool has ", kv_.layers);
    has_kv_ = true;
    limit_positions(int64_t{kv_.blocks} * kBlockTokens);
  }
  limits_.max_heads = std::max(limits_.max_heads, r.heads);
  limits_.max_kv_heads = std::max(limits_.max_kv_heads, r.kv_heads);
  limits_.max_head_size = std::max(limits_.max_head_size, r.head_size);
}

template <class R>
void Vm::check_rotation(const R& r) {
  check_vector("q_norm", r.q_norm, r.head_size);
  check_vector("k_norm", r.k_norm, r.head_size);
  check_eps("qk_norm_eps", r.qk_norm_eps);
  check_buffer("q_out", r.q_out, int64_t{r.heads} * r.head_size);
  if (r.rope == -1) return;
  if (r.rope < 0 || r.rope >= static_cast<int64_t>(weights_.size())) fail("rope names weight ", r.rope);
  const Weight& rope = weights_[static_cast<size_t>(r.rope)];
  if (rope.layout != Layout::kRopeF32 || rope.k != r.rotary_size) {
    fail("rope: weight ", r.rope, " is not a rotation table of ", r.rotary_size, " elements");
  }
  if (r.rotary_size < 2 || r.rotary_size % 2 != 0 || r.rotary_size > r.head_size) {
    fail("rotary_size ", r.rotary_size, " must be even and at most head_size ", r.head_size);
  }
  limit_positions(rope.n);
}

void Vm::check_eps(const char* what, float eps) {
  if (!(eps >= 0.0f && std::isfinite(eps))) fail(what, " must be finite and not negative");
}

void Vm::limit_positions(int64_t positions) {
  limits_.max_positions = static_cast<int32_t>(std::min<int64_t>(limits_.max_positions, positions));
  has_positions_ = true;
}

void Vm::check_record(const Record& record) {
  const auto opcode = static_cast<int32_t>(record.opcode());
  if (opcode < 1 || opcode >= kOpcodeCount) fail("opcode ", opcode, " is unknown");
  if (kernels_->ops[opcode] == nullptr) fail("opcode ", opcode, " has no kernel for ", kernels_->isa);
  const auto positive = [](const char* what, int64_t value) {
    if (value <= 0) fail(what, " is ", value, ", it must be positive");
  };
  const auto check_enum = [](const char* what, int32_t value, auto last) {
    if (value < 0 || value > static_cast<int32_t>(last)) fail(what, " ", value, " is unknown");
  };

  switch (record.opcode()) {
    case Opcode::kEmbed: {
      const auto r = record.as<EmbedRecord>();
      if (r.table < 0 || r.table >= static_cast<int64_t>(weights_.size())) fail("embed names weight ", r.table);
      const int64_t n = weights_[static_cast<size_t>(r.table)].n;
      check_matrix("table", r.table, n, r.width);
      check_buffer("out", r.out, r.width);
      const auto rows = static_cast<int32_t>(n);
      vocab_ = vocab_ == 0 ? rows : std::min(vocab_, rows);
      if (r.types != -1) {
        if (r.types < 0 || r.types >= static_cast<int64_t>(weights_.size())) fail("types is ", r.types);
        const int64_t types = weights_[static_cast<size_t>(r.types)].n;
        check_matrix("types", r.types, types, r.width);
        token_types_ = static_cast<int32_t>(std::min<int64_t>(token_types_ == 0 ? types : token_types_, types));
      }
      if (r.positions == -1) return;
      if (r.positions < 0 || r.positions >= static_cast<int64_t>(weights_.size())) fail("positions is ", r.positions);
      const int64_t learned = weights_[static_cast<size_t>(r.positions)].n;
      check_matrix("positions", r.positions, learned, r.width);
      if (r.position_offset < 0 || r.position_offset >= learned) {
        fail("position_offset is ", r.position_offset, ", there are ", learned, " positions");
      }
      limit_positions(learned - r.position_offset);
      return;
    }
    case Opcode::kLinear: {
      const auto r = record.as<LinearRecord>();
      check_matrix("weight", r.weight, r.n, r.k);
      check_vector("bias", r.bias, r.n);
      check_enum("epilogue", r.epilogue, Epilogue::kGlu);
      check_enum("activation", r.activation, Activation::kTanh);
      check_enum("domain", r.domain, Domain::kOutputs);
      const auto domain = static_cast<Domain>(r.domain);
      check_prologue(r, domain, true);
      if (r.norm == static_cast<int32_t>(Norm::kPrepared)) {
        const auto found = prepared_.find(r.input);
        const Layout layout = weights_[static_cast<size_t>(r.weight)].layout;
        if (found == prepared_.end() || found->second.layout != layout || found->second.k != r.k) {
          fail("the rows at ", r.input, " have not been prepared for this weight");
        }
      }
      const bool is_glu = r.epilogue == static_cast<int32_t>(Epilogue::kGlu);
      if (is_glu && r.n % (2 * kLanes) != 0) fail("a gated product needs n in 32s, n is ", r.n);
      check_buffer("out", r.out, is_glu ? r.n / 2 : r.n, domain);
      return;
    }
    case Opcode::kQkv: {
      const auto r = record.as<QkvRecord>();
      check_heads(r);
      const int64_t n = (int64_t{r.heads} + 2 * int64_t{r.kv_heads}) * r.head_size;
      check_matrix("weight", r.weight, n, r.k);
      check_vector("bias", r.bias, n);
      check_prologue(r);
      check_rotation(r);
      if (has_whole_heads(r)) limits_.max_whole_head = std::max(limits_.max_whole_head, r.head_size);
      return;
    }
    case Opcode::kAttention: {
      const auto r = record.as<AttentionRecord>();
      check_heads(r);
      check_buffer("q", r.q, int64_t{r.heads} * r.head_size);
      check_buffer("out", r.out, int64_t{r.heads} * r.head_size);
      if (r.window < 0) fail("window is ", r.window);
      if (r.is_bidirectional != 0 && (r.is_bidirectional != 1 || r.layer != kStepPages)) {
        fail("is_bidirectional is ", r.is_bidirectional, ", with pages of layer ", r.layer);
      }
      if (!std::isfinite(r.scale) || !(r.softcap >= 0.0f)) fail("scale or softcap of attention is out of range");
      return;
    }
    case Opcode::kHead: {
      const auto r = record.as<HeadRecord>();
      if (r.weight == -1) {
        positive("vocab", r.vocab);
        if (r.k != r.vocab || r.norm != 0) fail("without a weight, k is the vocabulary and there is no norm");
        check_buffer("input", r.input, r.vocab, Domain::kOutputs);
      } else {
        check_matrix("weight", r.weight, r.vocab, r.k);
        check_prologue(r);
      }
      if (!std::isfinite(r.scale) || !(r.softcap >= 0.0f)) fail("scale or softcap of the head is out of range");
      limits_.max_vocab = std::max(limits_.max_vocab, r.vocab);
      head_vocab_ = head_vocab_ == 0 ? r.vocab : std::min(head_vocab_, r.vocab);
      return;
    }
    case Opcode::kNorm: {
      const auto r = record.as<NormRecord>();
      positive("k", r.k);
      if (r.k % kGroup != 0) fail("k is ", r.k, ", it must be a multiple of ", kGroup);
      check_enum("epilogue", r.epilogue, Epilogue::kAdd);
      check_enum("domain", r.domain, Domain::kOutputs);
      const auto domain = static_cast<Domain>(r.domain);
      check_prologue(r, domain);
      check_buffer("out", r.out, r.k, domain);
      if (r.out == r.input) fail("out is the input");
      return;
    }
    case Opcode::kPool: {
      const auto r = record.as<PoolRecord>();
      positive("k", r.k);
      if (r.k % kGroup != 0) fail("k is ", r.k, ", it must be a multiple of ", kGroup);
      check_prologue(r);
      check_enum("pooling", r.pooling, Pooling::kLast);
      check_buffer("out", r.out, r.k, Domain::kSequences);
      if (r.out == r.input) fail("out is the input");
      return;
    }
    case Opcode::kPrepare: {
      const auto r = record.as<PrepareRecord>();
      positive("k", r.k);
      if (r.weight < 0 || r.weight >= static_cast<int64_t>(weights_.size())) fail("weight is ", r.weight);
      const Weight& weight = weights_[static_cast<size_t>(r.weight)];
      check_matrix("weight", r.weight, weight.n, r.k);
      check_enum("domain", r.domain, Domain::kOutputs);
      check_buffer("input", r.input, r.k, static_cast<Domain>(r.domain));
      check_buffer("out", r.out, prepared_width(r.k), static_cast<Domain>(r.domain));
      if (r.out == r.input) fail("out is the input");
      limits_.max_k = std::max(limits_.max_k, r.k);
      prepared_[r.out] = {weight.layout, r.k};
      return;
    }
    case Opcode::kRotate: {
      const auto r = record.as<RotateRecord>();
      check_heads(r);
      check_rotation(r);
      const int64_t kv_width = int64_t{r.kv_heads} * r.head_size;
      if ((r.keys == -1) != (r.values == -1)) fail("keys and values must both be given, or neither");
      check_buffer("q", r.q, int64_t{r.heads} * r.head_size + (r.keys == -1 ? 2 * kv_width : 0));
      if (r.keys != -1) check_buffer("keys", r.keys, kv_width);
      if (r.values != -1) check_buffer("values", r.values, kv_width);
      if (r.q_out == r.q) fail("q_out is q");
      limits_.max_whole_head = std::max(limits_.max_whole_head, r.head_size);
      return;
    }
    case Opcode::kGate: {
      const auto r = record.as<GateRecord>();
      positive("width", r.width);
      if (r.width % kLanes != 0) fail("width is ", r.width, ", it must be a multiple of ", kLanes);
      check_buffer("gate", r.gate, r.width);
      if (r.up != -1) check_buffer("up", r.up, r.width);
      check_buffer("out", r.out, r.width);
      check_enum("activation", r.activation, Activation::kTanh);
      return;
    }
    case Opcode::kPick: {
      const auto r = record.as<PickRecord>();
      positive("k", r.k);
      check_buffer("input", r.input, r.k);
      check_buffer("out", r.out, r.k, Domain::kOutputs);
      if (r.out == r.input) fail("out is the input");
      return;
    }
    case Opcode::kMoe: {
      const auto r = record.as<MoeRecord>();
      for (const auto& [what, value] : {std::pair{"hidden", r.hidden}, {"experts", r.experts}, {"top_k", r.top_k}}) {
        positive(what, value);
      }
      if (r.top_k > r.experts) fail("top_k is ", r.top_k, ", there are ", r.experts, " experts");
      check_matrix("router", r.router, r.experts, r.k);
      check_matrix("gate_up", r.gate_up, int64_t{r.experts} * 2 * r.hidden, r.k);
      check_matrix("down", r.down, int64_t{r.experts} * r.k, r.hidden);
      check_prologue(r);
      check_buffer("out", r.out, r.k);
      check_enum("activation", r.activation, Activation::kTanh);
      if (int64_t{limits_.max_rows} * r.top_k * std::max(r.k, r.hidden) > int64_t{1} << 40 ||
          int64_t{r.top_k} * r.hidden > std::numeric_limits<int32_t>::max()) {
        fail("the rows of a step times top_k ", r.top_k, " times ", std::max(r.k, r.hidden), " are out of range");
      }
      limits_.max_k = std::max(limits_.max_k, r.hidden);
      limits_.max_experts = std::max(limits_.max_experts, r.experts);
      limits_.max_top_experts = std::max(limits_.max_top_experts, r.top_k);
      limits_.max_gated = std::max(limits_.max_gated, r.top_k * r.hidden);
      limits_.max_moe_k = std::max({limits_.max_moe_k, r.k, r.hidden});
      return;
    }
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
  if (!s.token_types.empty() && s.token_types.size() != s.tokens.size()) {
    fail("token_types must have one entry per row, or none");
  }
  for (const int32_t type : s.token_types) {
    if (type < 0 || type >= std::max(1, token_types_)) fail("token type ", type, " is outside the ", token_types_);
  }
  int32_t pages = 0;
  for (int32_t seq = 0; seq < sequences; ++seq) {
    const int32_t start = s.seq_starts[static_cast<size_t>(seq)], stop = s.seq_starts[static_cast<size_t>(seq) + 1];
    if (start < 0 || stop <= start || stop > rows) fail("sequence ", seq, " has rows ", start, " to ", stop);
    const int32_t position = s.positions[static_cast<size_t>(start)];
    if (position < 0) fail("row ", start, ": position ", position, " is negative");
    if (has_step_pages_) {
      if (position != 0) fail("sequence ", seq, " starts at position ", position, ", it must stand in the step whole");
      step_pages_[static_cast<size_t>(seq)] = pages;
      pages += (stop - start + kBlockTokens - 1) / kBlockTokens;
    }
    for (int32_t row = start; row < stop; ++row) {
      if (s.positions[static_cast<size_t>(row)] != position + (row - start)) {
        fail("row ", row, ": positions of a sequence must rise by one");
      }
      row_seq_[static_cast<size_t>(row)] = seq;
    }
    const int64_t last = int64_t{position} + (stop - start) - 1;
    if (has_positions_ && last >= limits_.max_positions) {
      fail("sequence ", seq, ": position ", last, ", the limit is ", limits_.max_positions);
    }
    if (!has_kv_) continue;
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

}  // namespace headrace
