// A tiny random model through the whole VM: ragged steps on one and two threads and on every instruction set must
// choose the same tokens, alone and together. Run under asan, ubsan and tsan by scripts/sanitize.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "core/vm.h"
#include "ops/prologue.h"
#include "probe.h"
#include "tests/check.h"
#include "tests/model.h"

namespace headrace::tests {
namespace {

constexpr int32_t kWidth = 64, kHeads = 4, kKvHeads = 2, kHeadSize = 32, kHidden = 96, kVocab = 205, kLayers = 2;
constexpr int32_t kBlocks = 40, kTableBlocks = 4, kPositions = kTableBlocks * kBlockTokens, kMaxRows = 70, kMaxTop = 5;

// Elements of a head that turn, and which of the options a model has beside Llama's.
struct Options {
  int32_t rotary_size = kHeadSize;
  bool is_rich = false;   // layer norms, learned positions, normed heads, GELU, norms after products, experts
  bool is_apart = false;  // QKV, the gated product and the head in their parts; of a model that is not rich
};
constexpr int32_t kExperts = 5, kTopExperts = 2, kExpertHidden = 32;

int32_t add_rope(Model& model, int32_t rotary_size) {
  std::vector<float> angles;
  for (int32_t p = 0; p < kPositions; ++p)
    for (int32_t i = 0; i < rotary_size; ++i) {
      const int32_t half = rotary_size / 2;
      const float angle =
          static_cast<float>(p) * std::pow(100.0f, -static_cast<float>(i % half) / static_cast<float>(half));
      angles.push_back(i < half ? std::cos(angle) : std::sin(angle));
    }
  return model.add(Layout::kRopeF32, kPositions, rotary_size, angles);
}

Model make_model(Layout layout, const Options& options) {
  Random random;
  Model model(kMaxRows);
  const bool is_rich = options.is_rich;
  const int64_t x = model.buffer(kWidth), q = model.buffer(kHeads * kHeadSize), alone = model.buffer(kWidth);
  const int64_t attended = model.buffer(kHeads * kHeadSize), gated = model.buffer(kHidden);
  const int32_t table = model.random_matrix(random, layout, kVocab, kWidth), ones = model.ones(kWidth);
  const int32_t rope = add_rope(model, options.rotary_size);
  const int32_t head_ones = is_rich ? model.ones(kHeadSize) : -1;
  const auto norm = [&](auto& fields) {
    fields.norm = static_cast<int32_t>(is_rich ? Norm::kLayer : Norm::kRms);
    fields.norm_weight = ones, fields.norm_bias = is_rich ? ones : -1, fields.norm_eps = 1e-5f;
  };

  // Of a program taken apart.
  const int64_t normed = model.buffer(kWidth), prepared = model.buffer(prepared_width(kWidth));
  const int64_t gate = model.buffer(kHidden), up = model.buffer(kHidden), logits = model.buffer(kVocab);
  const int64_t heads = model.buffer((kHeads + 2 * kKvHeads) * kHeadSize), picked = model.buffer(kWidth);
  const auto prepare = [&](int64_t input, int32_t weight, Domain domain) {
    NormRecord apart{};
    norm(apart);
    apart.input = input, apart.out = normed, apart.k = kWidth, apart.domain = static_cast<int32_t>(domain);
    model.emit(Opcode::kNorm, apart);
    PrepareRecord rows{};
    rows.weight = weight, rows.input = normed, rows.out = prepared, rows.k = kWidth;
    rows.domain = static_cast<int32_t>(domain);
    model.emit(Opcode::kPrepare, rows);
  };
  const auto product = [&](int64_t out, int32_t weight, int32_t n, Domain domain) {
    LinearRecord fields{};
    fields.norm = static_cast<int32_t>(Norm::kPrepared);
    fields.norm_weight = fields.norm_bias = fields.bias = -1;
    fields.input = prepared, fields.out = out, fields.weight = weight, fields.n = n, fields.k = kWidth;
    fields.domain = static_cast<int32_t>(domain);
    model.emit(Opcode::kLinear, fields);
  };

  EmbedRecord embed{};
  embed.out = x, embed.table = table, embed.width = kWidth, embed.scale = 2.0f;
  embed.positions = embed.types = -1;
  if (is_rich) embed.positions = model.random_matrix(random, layout, kPositions + 2, kWidth), embed.position_offset = 2;
  model.emit(Opcode::kEmbed, embed);
  for (int32_t layer = 0; layer < kLayers; ++layer) {
    constexpr int32_t kQkv = (kHeads + 2 * kKvHeads) * kHeadSize;
    QkvRecord qkv{};
    norm(qkv);
    qkv.input = x, qkv.q_out = q, qkv.weight = model.random_matrix(random, layout, kQkv, kWidth), qkv.bias = -1;
    qkv.k = kWidth, qkv.heads = kHeads, qkv.kv_heads = kKvHeads, qkv.head_size = kHeadSize;
    qkv.q_norm = head_ones, qkv.k_norm = head_ones, qkv.qk_norm_eps = 1e-6f;
    qkv.rope = rope, qkv.rotary_size = options.rotary_size, qkv.layer = layer;
    if (options.is_apart) {
      prepare(x, qkv.weight, Domain::kRows);
      product(heads, qkv.weight, kQkv, Domain::kRows);
      RotateRecord rotate{};
      rotate.q = heads, rotate.keys = rotate.values = -1, rotate.q_out = q;
      rotate.heads = kHeads, rotate.kv_heads = kKvHeads, rotate.head_size = kHeadSize;
      rotate.q_norm = rotate.k_norm = -1, rotate.rope = rope, rotate.rotary_size = options.rotary_size;
      rotate.layer = layer;
      model.emit(Opcode::kRotate, rotate);
    } else {
      model.emit(Opcode::kQkv, qkv);
    }

    AttentionRecord attention{};
    attention.q = q, attention.out = attended, attention.heads = kHeads, attention.kv_heads = kKvHeads;
    attention.head_size = kHeadSize, attention.layer = layer, attention.scale = 0.25f, attention.window = 50 * layer;
    attention.softcap = is_rich ? 3.0f : 0.0f;
    model.emit(Opcode::kAttention, attention);

    const auto linear = [&](int64_t input, int64_t out, int32_t n, int32_t k, bool has_norm, Epilogue epilogue) {
      LinearRecord fields{};
      fields.norm_weight = fields.norm_bias = fields.bias = -1;
      if (has_norm) norm(fields);
      fields.input = input, fields.out = out, fields.n = n, fields.k = k;
      fields.weight = model.random_matrix(random, layout, n, k);
      fields.epilogue = static_cast<int32_t>(epilogue);
      const Activation gate = is_rich ? Activation::kGeluErf : Activation::kSilu;
      fields.activation = static_cast<int32_t>(epilogue == Epilogue::kGlu ? gate : Activation::kNone);
      model.emit(Opcode::kLinear, fields);
    };
    if (!is_rich) {
      linear(attended, x, kWidth, kHeads * kHeadSize, false, Epilogue::kAdd);
    } else {
      linear(attended, alone, kWidth, kHeads * kHeadSize, false, Epilogue::kStore);
      NormRecord after{};
      norm(after);
      after.input = alone, after.out = x, after.k = kWidth, after.epilogue = static_cast<int32_t>(Epilogue::kAdd);
      model.emit(Opcode::kNorm, after);
    }
    if (is_rich && layer == 1) {
      MoeRecord experts{};
      norm(experts);
      experts.input = experts.out = x, experts.k = kWidth, experts.hidden = kExpertHidden;
      experts.router = model.random_matrix(random, Layout::kBf16, kExperts, kWidth);
      experts.gate_up = model.random_matrix(random, layout, kExperts * 2 * kExpertHidden, kWidth);
      experts.down = model.random_matrix(random, layout, kExperts * kWidth, kExpertHidden);
      experts.experts = kExperts, experts.top_k = kTopExperts, experts.is_renormalised = 1;
      experts.activation = static_cast<int32_t>(Activation::kSilu);
      model.emit(Opcode::kMoe, experts);
      continue;
    }
    if (options.is_apart) {
      const std::vector<float> values = Model::random_values(random, 2 * kHidden, kWidth);
      std::vector<float> sides[2];
      constexpr auto kTile = static_cast<ptrdiff_t>(kLanes) * kWidth;
      for (ptrdiff_t tile = 0; tile < 2 * kHidden / kLanes; ++tile) {
        const auto start = values.begin() + tile * kTile;
        sides[tile % 2].insert(sides[tile % 2].end(), start, start + kTile);
      }
      const int32_t weights[2] = {model.add(layout, kHidden, kWidth, sides[0]),
                                  model.add(layout, kHidden, kWidth, sides[1])};
      prepare(x, weights[0], Domain::kRows);
      product(gate, weights[0], kHidden, Domain::kRows);
      product(up, weights[1], kHidden, Domain::kRows);
      GateRecord both{};
      both.gate = gate, both.up = up, both.out = gated, both.width = kHidden;
      both.activation = static_cast<int32_t>(Activation::kSilu);
      model.emit(Opcode::kGate, both);
    } else {
      linear(x, gated, 2 * kHidden, kWidth, true, Epilogue::kGlu);
    }
    linear(gated, x, kWidth, kHidden, false, Epilogue::kAdd);
  }
  HeadRecord head{};
  norm(head);
  head.input = x, head.weight = table, head.k = kWidth, head.vocab = kVocab, head.scale = 1.0f;
  head.softcap = is_rich ? 30.0f : 0.0f;
  if (options.is_apart) {
    PickRecord pick{};
    pick.input = x, pick.out = picked, pick.k = kWidth;
    model.emit(Opcode::kPick, pick);
    prepare(picked, table, Domain::kOutputs);
    product(logits, table, kVocab, Domain::kOutputs);
    head.input = logits, head.weight = head.norm_weight = head.norm_bias = -1, head.norm = 0, head.k = kVocab;
  }
  model.emit(Opcode::kHead, head);
  return model;
}

Vm make_vm(const Model& model, const KernelTable& kernels, int32_t threads, KvType kv_type) {
  return Vm(model.records, model.weights,
            {.arena_bytes = model.arena_bytes,
             .threads = threads,
             .max_rows = kMaxRows,
             .max_sequences = 8,
             .max_outputs = 8,
             .max_top = kMaxTop,
             .kv = {kv_type, kLayers, kKvHeads, kHeadSize, kBlocks, nullptr}},
            kernels);
}

// One sequence: its tokens so far, how many of them are in the pages, and how its tokens are chosen.
struct Sequence {
  std::vector<int32_t> tokens;
  int32_t stored = 0;
  OutputRow choice{};
};

Sequence make_sequence(Random& random, int32_t id) {
  Sequence sequence;
  for (int32_t i = 1 + random.below(60); i > 0; --i) sequence.tokens.push_back(random.below(kVocab));
  sequence.choice = {.seed = random.next(),
                     .row = 0,
                     .top_k = id % 3 == 1 ? 7 : 0,
                     .temperature = id % 2 == 0 ? 0.0f : 0.8f,
                     .top_p = id % 4 == 3 ? 0.9f : 1.0f,
                     .min_p = id == 5 ? 0.05f : 0.0f,
                     .repetition = 1.0f,
                     .presence = 0.0f,
                     .frequency = 0.0f,
                     .position = 0,
                     .num_logprobs = id % 2 == 0 ? kMaxTop : -1,
                     .target = -1,
                     .counts_start = 0,
                     .counts_len = 0,
                     .bias_start = 0,
                     .bias_len = 0,
                     .mask = -1};
  return sequence;
}

// Runs one ragged step over the sequences named in `parts` (index, rows) and appends what was chosen.
void run_step(Vm& vm, std::vector<Sequence>& all, const std::vector<std::pair<int32_t, int32_t>>& parts) {
  std::vector<int32_t> tokens, positions, starts{0}, tables, chosen_by;
  std::vector<OutputRow> outputs;
  for (const auto& [index, rows] : parts) {
    Sequence& s = all[static_cast<size_t>(index)];
    for (int32_t i = 0; i < rows; ++i) {
      positions.push_back(s.stored + i);
      tokens.push_back(s.tokens[static_cast<size_t>(s.stored + i)]);
    }
    starts.push_back(static_cast<int32_t>(tokens.size()));
    for (int32_t i = 0; i < kTableBlocks; ++i) tables.push_back(index * kTableBlocks + i);
    s.stored += rows;
    if (s.stored < static_cast<int32_t>(s.tokens.size())) continue;
    outputs.push_back(s.choice);
    outputs.back().row = static_cast<int32_t>(tokens.size()) - 1;
    outputs.back().position = s.stored;
    chosen_by.push_back(index);
  }
  std::vector<ResultRow> results(outputs.size());
  std::vector<int32_t> top_ids(outputs.size() * kMaxTop);
  std::vector<float> top_logprobs(outputs.size() * kMaxTop);
  vm.step({.tokens = tokens,
           .positions = positions,
           .seq_starts = starts,
           .row_seq = {},
           .token_types = {},
           .step_pages = {},
           .block_tables = tables,
           .max_blocks = kTableBlocks,
           .outputs = outputs,
           .results = results,
           .top_ids = top_ids,
           .top_logprobs = top_logprobs,
           .max_top = kMaxTop,
           .count_ids = {},
           .counts = {},
           .bias_ids = {},
           .bias_values = {},
           .masks = {},
           .mask_words = 0});
  for (size_t i = 0; i < results.size(); ++i) {
    check(results[i].status == 0 && results[i].token >= 0 && results[i].token < kVocab, "a token is chosen");
    all[static_cast<size_t>(chosen_by[i])].tokens.push_back(results[i].token);
  }
}

std::vector<Sequence> make_sequences() {
  Random random;
  std::vector<Sequence> all;
  for (int32_t id = 0; id < 8; ++id) all.push_back(make_sequence(random, id));
  return all;
}
constexpr size_t kTotal = 90;  // tokens that every sequence ends with

// All sequences together, in ragged steps of random chunks. With `is_restless`, every step on another number of
// threads.
std::vector<Sequence> generate_together(Vm& vm, uint64_t seed, bool is_restless = false) {
  std::vector<Sequence> all = make_sequences();
  Random random{seed};
  while (std::any_of(all.begin(), all.end(), [](const Sequence& s) { return s.tokens.size() < kTotal; })) {
    std::vector<std::pair<int32_t, int32_t>> parts;
    if (is_restless) vm.set_threads(1 + random.below(vm.limits().threads));
    int32_t room = kMaxRows;
    for (int32_t id = 0; id < 8; ++id) {
      const Sequence& s = all[static_cast<size_t>(id)];
      if (s.tokens.size() >= kTotal || room == 0 || random.below(4) == 0) continue;
      const int32_t left = static_cast<int32_t>(s.tokens.size()) - s.stored;
      const int32_t rows = std::min({left, room, 1 + random.below(left)});
      parts.emplace_back(id, rows);
      room -= rows;
    }
    if (!parts.empty()) run_step(vm, all, parts);
  }
  return all;
}

// Each sequence by itself, its prompt in one step where it fits.
std::vector<Sequence> generate_alone(Vm& vm) {
  std::vector<Sequence> all = make_sequences();
  for (int32_t id = 0; id < 8; ++id) {
    Sequence& s = all[static_cast<size_t>(id)];
    while (s.tokens.size() < kTotal) run_step(vm, all, {{id, static_cast<int32_t>(s.tokens.size()) - s.stored}});
  }
  return all;
}

// The same with up to seven tokens a call.
std::vector<Sequence> generate_in_rows(Vm& vm) {
  std::vector<Sequence> all = make_sequences();
  for (int32_t id = 0; id < 8; ++id) {
    Sequence& s = all[static_cast<size_t>(id)];
    run_step(vm, all, {{id, static_cast<int32_t>(s.tokens.size())}});
    while (s.tokens.size() < kTotal) {
      const auto steps = static_cast<int32_t>(std::min<size_t>(7, kTotal - s.tokens.size()));
      const auto count = static_cast<size_t>(steps);
      const int32_t tokens[] = {s.tokens.back()}, positions[] = {s.stored}, starts[] = {0, 1}, stop_starts[] = {0, 0};
      int32_t tables[kTableBlocks];
      for (int32_t i = 0; i < kTableBlocks; ++i) tables[i] = id * kTableBlocks + i;
      OutputRow outputs[] = {s.choice};
      outputs[0].position = s.stored + 1;
      std::vector<ResultRow> results(count);
      std::vector<int32_t> top_ids(count * kMaxTop);
      std::vector<float> top_logprobs(count * kMaxTop);
      StepView first{};
      first.tokens = tokens, first.positions = positions, first.seq_starts = starts, first.block_tables = tables;
      first.max_blocks = kTableBlocks, first.outputs = outputs, first.results = results;
      first.top_ids = top_ids, first.top_logprobs = top_logprobs, first.max_top = kMaxTop;
      check(vm.decode(first, {.steps = steps, .stop_ids = {}, .stop_starts = stop_starts}) == steps, "all steps run");
      for (const ResultRow& result : results) s.tokens.push_back(result.token);
      s.stored += steps;
    }
  }
  return all;
}

void check_same(const std::vector<Sequence>& a, const std::vector<Sequence>& b, const std::string& what) {
  for (size_t i = 0; i < a.size(); ++i) check(a[i].tokens == b[i].tokens, what + ": sequence " + std::to_string(i));
}

void company_and_threads_change_no_token(Layout layout, KvType kv_type, const Options& options) {
  const Model model = make_model(layout, options);
  const std::string name =
      "layout " + std::to_string(static_cast<int>(layout)) + (options.is_rich ? " with every option" : "");
  std::vector<Sequence> scalar_tokens;
  for (const KernelTable* kernels : available_kernels()) {
    Vm one = make_vm(model, *kernels, 1, kv_type), two = make_vm(model, *kernels, 2, kv_type);
    const std::vector<Sequence> alone = generate_alone(one);
    check_same(alone, generate_together(two, 7), name + " together on two threads, " + kernels->isa);
    check_same(alone, generate_together(two, 8), name + " in other chunks, " + kernels->isa);
    Vm three = make_vm(model, *kernels, 3, kv_type);
    check_same(alone, generate_together(three, 9, true), name + " on a changing number of threads, " + kernels->isa);
    Vm four = make_vm(model, *kernels, 2, kv_type);
    check_same(alone, generate_in_rows(four), name + " several steps in a row, " + kernels->isa);
    if (!options.is_rich) {
      const Model apart = make_model(layout, {.rotary_size = options.rotary_size, .is_rich = false, .is_apart = true});
      Vm parts = make_vm(apart, *kernels, 2, kv_type);
      check_same(alone, generate_together(parts, 7), name + " taken apart, " + kernels->isa);
    }
    // The bf16 instruction may round differently (see scalar.h); all else is one definition.
    if (scalar_tokens.empty()) scalar_tokens = alone;
    else if (std::string(kernels->isa) != "avx512bf16") check_same(scalar_tokens, alone, name + " like scalar");
  }
}

void wrong_inputs_are_refused() {
  const Model model = make_model(Layout::kQ4m, {.rotary_size = 10, .is_rich = true});
  const KernelTable& kernels = *kernels_scalar();
  Vm vm = make_vm(model, kernels, 2, KvType::kBf16);
  std::vector<Sequence> all = make_sequences();
  all[0].tokens = {kVocab};
  check_refused([&] { run_step(vm, all, {{0, 1}}); }, "vocabulary");
  check_refused([&] { vm.set_threads(0); }, "threads is 0");
  check_refused([&] { vm.set_threads(3); }, "threads is 3");
  all[1].stored = kPositions, all[1].tokens.resize(kPositions + 1);
  check_refused([&] { run_step(vm, all, {{1, 1}}); }, "limit");
  for (size_t i = 0; i < model.records.size(); ++i) {
    Model broken = make_model(Layout::kQ4m, {.rotary_size = 10, .is_rich = true});
    broken.records[i].bytes[8 + 7] = 0x7f;  // the first buffer offset of every record, far outside
    check_refused([&] { make_vm(broken, kernels, 1, KvType::kBf16); }, "record " + std::to_string(i));
  }
}

void only_active_threads_run() {
  Pool pool(4);
  Random random;
  for (int i = 0; i < 2000; ++i) {
    const int32_t active = 1 + random.below(4);
    pool.set_active(active);
    int32_t ran[4] = {};
    pool.run([](void* context, int32_t thread) { ++static_cast<int32_t*>(context)[thread]; }, ran);
    for (int32_t t = 0; t < 4; ++t) check(ran[t] == (t < active), "thread " + std::to_string(t) + " runs when active");
  }
}

void idle_pools_stop() {
  for (int i = 0; i < 50; ++i) {
    Pool pool(3);
    if (i % 2 == 0) continue;
    int32_t ran[3] = {};
    pool.run([](void* context, int32_t thread) { static_cast<int32_t*>(context)[thread] = thread + 1; }, ran);
    check(ran[0] == 1 && ran[1] == 2 && ran[2] == 3, "every thread runs");
  }
}

}  // namespace
}  // namespace headrace::tests

int main() {
  using namespace headrace;
  for (const Layout layout : {Layout::kF32, Layout::kBf16, Layout::kF16, Layout::kQ8, Layout::kQ4, Layout::kQ4m}) {
    const KvType kv_type = layout == Layout::kF32 ? KvType::kF32 : KvType::kBf16;
    tests::company_and_threads_change_no_token(layout, kv_type, {});
    // Every option once on each kind of product, float and integer: a model takes long under the sanitizers.
    if (layout == Layout::kF32 || layout == Layout::kQ4m) {
      tests::company_and_threads_change_no_token(layout, kv_type, {.rotary_size = 10, .is_rich = true});
    }
  }
  tests::wrong_inputs_are_refused();
  tests::only_active_threads_run();
  tests::idle_pools_stop();
  return tests::report("vm");
}
