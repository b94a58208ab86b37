// A tiny random encoder through the VM: the row that is left of a sequence has the same bits alone and in company, on
// one and two threads and on every instruction set. Run under asan, ubsan and tsan by scripts/sanitize.
#include <cmath>
#include <string>
#include <vector>

#include "core/vm.h"
#include "probe.h"
#include "tests/check.h"
#include "tests/model.h"

namespace headrace::tests {
namespace {

constexpr int32_t kWidth = 64, kHeads = 4, kHeadSize = 32, kVocab = 100, kTypes = 2, kLayers = 2;
constexpr int32_t kMaxRows = 150, kMaxSequences = 6;

struct Encoder {
  Model model{kMaxRows};
  int64_t result = 0;
};

Encoder make_encoder(Layout layout) {
  Encoder encoder;
  Model& model = encoder.model;
  Random random;
  const int64_t x = model.buffer(kWidth), q = model.buffer(kHeads * kHeadSize),
                mixed = model.buffer(kHeads * kHeadSize);
  encoder.result = model.buffer(kWidth);
  const int32_t ones = model.ones(kWidth);
  const auto norm = [&](auto& fields) {
    fields.norm = static_cast<int32_t>(Norm::kLayer), fields.norm_eps = 1e-5f;
    fields.norm_weight = ones, fields.norm_bias = ones;
  };
  EmbedRecord embed{};
  embed.out = x, embed.table = model.random_matrix(random, layout, kVocab, kWidth), embed.width = kWidth;
  embed.scale = 1.0f, embed.positions = model.random_matrix(random, layout, kMaxRows, kWidth);
  embed.types = model.random_matrix(random, layout, kTypes, kWidth);
  model.emit(Opcode::kEmbed, embed);
  for (int32_t layer = 0; layer < kLayers; ++layer) {
    QkvRecord qkv{};
    norm(qkv);
    qkv.input = x, qkv.q_out = q, qkv.weight = model.random_matrix(random, layout, 3 * kHeads * kHeadSize, kWidth);
    qkv.bias = qkv.q_norm = qkv.k_norm = qkv.rope = -1, qkv.k = kWidth, qkv.heads = qkv.kv_heads = kHeads;
    qkv.head_size = kHeadSize, qkv.layer = kStepPages;
    model.emit(Opcode::kQkv, qkv);
    AttentionRecord attention{};
    attention.q = q, attention.out = mixed, attention.heads = attention.kv_heads = kHeads;
    attention.head_size = kHeadSize, attention.layer = kStepPages, attention.is_bidirectional = 1;
    attention.scale = 0.2f, attention.window = 20 * layer;
    model.emit(Opcode::kAttention, attention);
    LinearRecord o{};
    o.norm_weight = o.norm_bias = o.bias = -1, o.input = mixed, o.out = x, o.n = kWidth, o.k = kHeads * kHeadSize;
    o.weight = model.random_matrix(random, layout, kWidth, kHeads * kHeadSize);
    o.epilogue = static_cast<int32_t>(Epilogue::kAdd);
    model.emit(Opcode::kLinear, o);
  }
  PoolRecord pool{};
  norm(pool);
  pool.input = x, pool.out = encoder.result, pool.k = kWidth, pool.is_normalised = 1;
  pool.pooling = static_cast<int32_t>(Pooling::kMean);
  model.emit(Opcode::kPool, pool);
  return encoder;
}

Vm make_vm(const Encoder& encoder, const KernelTable& kernels, int32_t threads, KvType kv_type) {
  return Vm(encoder.model.records, encoder.model.weights,
            {.arena_bytes = encoder.model.arena_bytes,
             .threads = threads,
             .max_rows = kMaxRows,
             .max_sequences = kMaxSequences,
             .max_outputs = 1,
             .max_top = 0,
             .kv = {kv_type, 0, kHeads, kHeadSize, 0, nullptr}},
            kernels);
}

struct Text {
  std::vector<int32_t> tokens, types;
};

std::vector<Text> make_texts() {
  Random random;
  std::vector<Text> texts;
  for (const int32_t length : {1, 40, 31, 33, 2, 32}) {
    Text& text = texts.emplace_back();
    for (int32_t i = 0; i < length; ++i) {
      text.tokens.push_back(random.below(kVocab));
      text.types.push_back(random.below(kTypes));
    }
  }
  return texts;
}

// One step over the texts; the row that is left of each. `start` is the position that they claim to begin at.
std::vector<std::vector<float>> run(Vm& vm, const Encoder& encoder, const std::vector<Text>& texts, int32_t start = 0) {
  std::vector<int32_t> tokens, types, positions, starts{0};
  for (const Text& text : texts) {
    for (size_t i = 0; i < text.tokens.size(); ++i) positions.push_back(start + static_cast<int32_t>(i));
    tokens.insert(tokens.end(), text.tokens.begin(), text.tokens.end());
    types.insert(types.end(), text.types.begin(), text.types.end());
    starts.push_back(static_cast<int32_t>(tokens.size()));
  }
  StepView step;
  step.tokens = tokens, step.token_types = types, step.positions = positions, step.seq_starts = starts;
  vm.step(step);
  std::vector<std::vector<float>> rows;
  const auto* left = reinterpret_cast<const float*>(vm.arena() + encoder.result);
  for (size_t i = 0; i < texts.size(); ++i) rows.emplace_back(left + i * kWidth, left + (i + 1) * kWidth);
  return rows;
}

void company_and_threads_change_no_bit(Layout layout, KvType kv_type) {
  const Encoder encoder = make_encoder(layout);
  const std::vector<Text> texts = make_texts();
  std::vector<std::vector<float>> scalar_rows;
  for (const KernelTable* kernels : available_kernels()) {
    const std::string name = "layout " + std::to_string(static_cast<int>(layout)) + ", " + kernels->isa;
    Vm one = make_vm(encoder, *kernels, 1, kv_type), two = make_vm(encoder, *kernels, 2, kv_type);
    const auto together = run(two, encoder, texts);
    for (size_t i = 0; i < texts.size(); ++i) {
      check(run(one, encoder, {texts[i]})[0] == together[i], name + ": alone or in company, text " + std::to_string(i));
      float length = 0.0f;
      for (const float value : together[i]) length += value * value;
      check(std::fabs(length - 1.0f) < 1e-5f, name + ": a row has length 1");
    }
    // The bf16 instruction may round differently (see scalar.h); all else is one definition.
    if (scalar_rows.empty()) scalar_rows = together;
    else if (std::string(kernels->isa) != "avx512bf16") check(scalar_rows == together, name + ": like scalar");
  }
}

void wrong_inputs_are_refused() {
  const Encoder encoder = make_encoder(Layout::kQ8);
  Vm vm = make_vm(encoder, *kernels_scalar(), 1, KvType::kBf16);
  check_refused([&] { run(vm, encoder, make_texts(), 1); }, "whole");
  std::vector<Text> texts = make_texts();
  texts[1].types[3] = kTypes;
  check_refused([&] { run(vm, encoder, texts); }, "token type");
}

}  // namespace
}  // namespace headrace::tests

int main() {
  using namespace headrace;
  for (const Layout layout : {Layout::kF32, Layout::kBf16, Layout::kQ8, Layout::kQ4m}) {
    tests::company_and_threads_change_no_bit(layout, layout == Layout::kF32 ? KvType::kF32 : KvType::kBf16);
  }
  tests::wrong_inputs_are_refused();
  return tests::report("encoder");
}
