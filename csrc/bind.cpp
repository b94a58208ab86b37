// The Python module headrace.kernels._native. Thin: shapes and types here, meaning in vm.py and in the classes bound.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <iterator>
#include <memory>
#include <stdexcept>

#include "core/vm.h"
#include "isa/scalar.h"
#include "ops/product.h"
#include "pack.h"
#include "probe.h"

namespace nb = nanobind;

namespace headrace {
namespace {

template <typename T, size_t kDims>
using In = nb::ndarray<const T, nb::ndim<kDims>, nb::c_contig, nb::device::cpu>;
template <typename T, size_t kDims>
using Out = nb::ndarray<T, nb::ndim<kDims>, nb::c_contig, nb::device::cpu>;
using Bytes = In<uint8_t, 1>;

template <typename Array>
auto view(const Array& array) {
  return std::span(array.data(), array.size());
}
// Rows of a struct arrive as their bytes.
template <typename T>
std::span<const T> rows_of(const Bytes& bytes) {
  if (bytes.size() % sizeof(T) != 0 || reinterpret_cast<uintptr_t>(bytes.data()) % alignof(T) != 0) {
    throw std::invalid_argument("an array of rows has the wrong size or alignment");
  }
  return {reinterpret_cast<const T*>(bytes.data()), bytes.size() / sizeof(T)};
}

Layout layout_of(int32_t value) {
  const auto layout = static_cast<Layout>(value);
  if (!is_matrix(layout)) throw std::invalid_argument("layout " + std::to_string(value) + " is not a matrix layout");
  return layout;
}
Source source_of(const std::string& name) {
  for (size_t i = 0; i < std::size(kSourceNames); ++i) {
    if (name == kSourceNames[i]) return static_cast<Source>(i);
  }
  throw std::invalid_argument("source type " + name + " is unknown");
}
void check_shape(int64_t n, int64_t k) {
  if (n < 1 || k < kGroup || k % kGroup != 0 || n > (1 << 30) || k > (1 << 30)) {
    throw std::invalid_argument("a shape of " + std::to_string(n) + " x " + std::to_string(k) +
                                " cannot be packed: k must be a positive multiple of 32");
  }
}
void check_block(const std::string& source, int64_t k) {
  const int64_t block = block_values(source_of(source));
  if (k % block != 0) {
    throw std::invalid_argument("rows of " + std::to_string(k) + " are no multiple of " + source + "'s block of " +
                                std::to_string(block));
  }
}
void check_size(const char* what, size_t have, int64_t want) {
  if (static_cast<int64_t>(have) != want) {
    throw std::invalid_argument(std::string(what) + " holds " + std::to_string(have) + " bytes, its shape needs " +
                                std::to_string(want));
  }
}
void check_threads(int32_t threads) {
  if (threads < 1 || threads > 256) throw std::invalid_argument("threads must lie in 1 to 256");
}

using PyWeight = std::tuple<int32_t, int64_t, int64_t, Bytes>;  // layout, n, k, data

// A VM and the arrays that its weights lie in.
class PyVm {
 public:
  PyVm(const nb::bytes& records, int64_t arena_bytes, std::vector<PyWeight> weights, int32_t threads,
       const std::string& isa, int32_t max_rows, int32_t max_sequences, int32_t max_outputs, int32_t max_top,
       int32_t kv_type, int32_t kv_layers, int32_t kv_heads, int32_t head_size, int32_t kv_blocks)
      : weights_(std::move(weights)) {
    const KernelTable* kernels = find_kernels(isa);
    if (kernels == nullptr) throw std::invalid_argument("this machine or build has no kernels named " + isa);
    if (records.size() % kRecordBytes != 0) throw std::invalid_argument("records are not whole 128-byte records");
    std::vector<Record> program(records.size() / kRecordBytes);
    std::memcpy(program.data(), records.c_str(), records.size());
    std::vector<Weight> table;
    for (const auto& [layout, n, k, data] : weights_) {
      table.push_back({static_cast<Layout>(layout), n, k, data.data(), static_cast<int64_t>(data.size())});
    }
    const VmConfig config{
        .arena_bytes = arena_bytes,
        .threads = threads,
        .max_rows = max_rows,
        .max_sequences = max_sequences,
        .max_outputs = max_outputs,
        .max_top = max_top,
        .kv = {static_cast<KvType>(kv_type), kv_layers, kv_heads, head_size, kv_blocks, nullptr},
    };
    vm_ = std::make_unique<Vm>(program, std::move(table), config, *kernels);
  }

  void set_threads(int32_t threads) {
    if (is_running_) throw std::invalid_argument("a step of this VM is running");
    vm_->set_threads(threads);
  }

  void step(const In<int32_t, 1>& tokens, const In<int32_t, 1>& token_types, const In<int32_t, 1>& positions,
            const In<int32_t, 1>& seq_starts, const In<int32_t, 2>& block_tables, const Bytes& outputs,
            const Out<uint8_t, 1>& results, const Out<int32_t, 2>& top_ids, const Out<float, 2>& top_logprobs,
            const In<int32_t, 1>& count_ids, const In<int32_t, 1>& counts, const In<int32_t, 1>& bias_ids,
            const In<float, 1>& bias_values, const In<uint32_t, 2>& masks, int64_t num_records) {
    StepView view_of_step =
        step_of(tokens, positions, seq_starts, block_tables, outputs, results, top_ids, top_logprobs);
    view_of_step.token_types = view(token_types);
    view_of_step.count_ids = view(count_ids);
    view_of_step.counts = view(counts);
    view_of_step.bias_ids = view(bias_ids);
    view_of_step.bias_values = view(bias_values);
    view_of_step.masks = view(masks);
    view_of_step.mask_words = static_cast<int32_t>(masks.shape(1));
    run([&] { vm_->step(view_of_step, num_records); });
  }

  int32_t decode(const In<int32_t, 1>& tokens, const In<int32_t, 1>& positions, const In<int32_t, 1>& seq_starts,
                 const In<int32_t, 2>& block_tables, const Bytes& outputs, const Out<uint8_t, 1>& results,
                 const Out<int32_t, 2>& top_ids, const Out<float, 2>& top_logprobs, int32_t steps,
                 const In<int32_t, 1>& stop_ids, const In<int32_t, 1>& stop_starts, int32_t wake_fd) {
    const StepView first =
        step_of(tokens, positions, seq_starts, block_tables, outputs, results, top_ids, top_logprobs);
    const DecodeRun wanted{
        .steps = steps, .stop_ids = view(stop_ids), .stop_starts = view(stop_starts), .wake_fd = wake_fd};
    int32_t done = 0;
    run([&] { done = vm_->decode(first, wanted); });
    return done;
  }

  void time_records(bool is_on) {
    if (is_running_) throw std::invalid_argument("a step of this VM is running");
    vm_->time_records(is_on);
  }
  // [threads][records][waiting, working] nanoseconds.
  void read_record_times(const Out<int64_t, 3>& out) const {
    const auto times = vm_->record_times();
    if (out.size() != 2 * times.size()) throw std::invalid_argument("there is room for another number of times");
    for (size_t i = 0; i < times.size(); ++i) {
      out.data()[2 * i] = times[i].waiting_ns;
      out.data()[2 * i + 1] = times[i].working_ns;
    }
  }

  // Copies bytes of the arena.
  void read_arena(int64_t offset, const Out<float, 1>& out) const {
    const auto size = static_cast<int64_t>(out.size() * sizeof(float));
    if (offset < 0 || offset % 4 != 0 || offset > vm_->arena_bytes() || size > vm_->arena_bytes() - offset) {
      throw std::invalid_argument("the range lies outside the arena");
    }
    std::memcpy(out.data(), vm_->arena() + offset, static_cast<size_t>(size));
  }
  // One KV page as its elements in memory order, widened to f32.
  void read_page(int32_t layer, int32_t block, int32_t head, bool is_value, const Out<float, 1>& out) const {
    const KvPool& kv = vm_->kv();
    if (layer < 0 || layer >= kv.layers || block < 0 || block >= kv.blocks || head < 0 || head >= kv.kv_heads ||
        static_cast<int64_t>(out.size()) != int64_t{kBlockTokens} * kv.head_size) {
      throw std::invalid_argument("there is no such page");
    }
    const uint8_t* page = is_value ? kv.v_page(layer, block, head) : kv.k_page(layer, block, head);
    for (size_t i = 0; i < out.size(); ++i) {
      out.data()[i] = kv.type == KvType::kF32 ? reinterpret_cast<const float*>(page)[i]
                                              : scalar::bf16_to_f32(reinterpret_cast<const uint16_t*>(page)[i]);
    }
  }

  int64_t kv_bytes() const { return vm_->kv_bytes(); }
  int64_t scratch_bytes() const { return vm_->scratch_bytes(); }
  int64_t arena_bytes() const { return vm_->arena_bytes(); }
  int32_t max_positions() const { return vm_->limits().max_positions; }
  std::string isa() const { return vm_->isa(); }

 private:
  static StepView step_of(const In<int32_t, 1>& tokens, const In<int32_t, 1>& positions,
                          const In<int32_t, 1>& seq_starts, const In<int32_t, 2>& block_tables, const Bytes& outputs,
                          const Out<uint8_t, 1>& results, const Out<int32_t, 2>& top_ids,
                          const Out<float, 2>& top_logprobs) {
    if (seq_starts.size() < 2) throw std::invalid_argument("seq_starts needs at least two entries");
    const auto results_in = rows_of<ResultRow>(Bytes(results));
    return {
        .tokens = view(tokens),
        .positions = view(positions),
        .seq_starts = view(seq_starts),
        .row_seq = {},
        .token_types = {},
        .step_pages = {},
        .block_tables = view(block_tables),
        .max_blocks = static_cast<int32_t>(block_tables.shape(1)),
        .outputs = rows_of<OutputRow>(outputs),
        .results = {const_cast<ResultRow*>(results_in.data()), results_in.size()},
        .top_ids = view(top_ids),
        .top_logprobs = view(top_logprobs),
        .max_top = static_cast<int32_t>(top_ids.shape(1)),
        .count_ids = {},
        .counts = {},
        .bias_ids = {},
        .bias_values = {},
        .masks = {},
    };
  }

  // Calls work() without the interpreter's lock; a second call meanwhile is refused.
  template <class Work>
  void run(Work work) {
    if (is_running_) throw std::invalid_argument("a step of this VM is running already");
    is_running_ = true;
    try {
      nb::gil_scoped_release release;
      work();
    } catch (...) {
      is_running_ = false;
      throw;
    }
    is_running_ = false;
  }

  std::vector<PyWeight> weights_;
  std::unique_ptr<Vm> vm_;
  bool is_running_ = false;  // guarded by the interpreter lock
};

using KernelNames = std::vector<std::pair<int32_t, std::optional<std::string>>>;

KernelNames kernel_names(const std::string& isa) {
  const KernelTable* tables[] = {kernels_scalar(), kernels_avx2(), kernels_avx512(), kernels_avx512bf16()};
  for (const KernelTable* table : tables) {
    if (table == nullptr || isa != table->isa) continue;
    KernelNames names;
    for (int32_t opcode = 1; opcode < kOpcodeCount; ++opcode) {
      const char* name = table->names[opcode];
      names.emplace_back(opcode, name == nullptr ? std::nullopt : std::optional<std::string>(name));
    }
    return names;
  }
  throw std::invalid_argument("this build has no kernels named " + isa);
}

}  // namespace

NB_MODULE(_native, m) {
  using namespace nb::literals;
  m.attr("source_digest") = HEADRACE_SOURCE_DIGEST;
  m.def("available_isas", [] {
    std::vector<std::string> names;
    for (const KernelTable* table : available_kernels()) names.emplace_back(table->isa);
    return names;
  });
  m.def("cpu_features", &cpu_features);
  m.def("kernel_names", &kernel_names);
  m.def("packed_bytes", [](int32_t layout, int64_t n, int64_t k) {
    check_shape(n, k);
    return packed_bytes(layout_of(layout), n, k);
  });
  m.def("pack", [](int32_t layout, const std::string& source, const Bytes& raw, int64_t n, int64_t k, int32_t threads,
                   const Out<uint8_t, 1>& out) {
    check_shape(n, k);
    check_threads(threads);
    check_block(source, k);
    check_size("the source", raw.size(), source_bytes(source_of(source), n, k));
    check_size("the packed array", out.size(), packed_bytes(layout_of(layout), n, k));
    nb::gil_scoped_release release;
    pack(layout_of(layout), source_of(source), raw.data(), n, k, threads, out.data());
  });
  m.def("dequantise", [](const std::string& source, const Bytes& raw, int64_t n, int64_t k, const Out<float, 2>& out) {
    check_shape(n, k);
    check_block(source, k);
    check_size("the source", raw.size(), source_bytes(source_of(source), n, k));
    check_size("the output", out.size() * sizeof(float), n * k * 4);
    nb::gil_scoped_release release;
    dequantise(source_of(source), raw.data(), n, k, out.data());
  });
  m.def("unpack", [](int32_t layout, const Bytes& data, int64_t n, int64_t k, const Out<float, 2>& out) {
    check_shape(n, k);
    check_size("the packed array", data.size(), packed_bytes(layout_of(layout), n, k));
    check_size("the output", out.size() * sizeof(float), n * k * 4);
    nb::gil_scoped_release release;
    unpack(layout_of(layout), data.data(), n, k, out.data());
  });
  m.def("probe_bandwidth", [](int64_t size_bytes, int32_t threads, double seconds) {
    check_threads(threads);
    nb::gil_scoped_release release;
    return probe_bandwidth(size_bytes, threads, seconds);
  });
  m.def("probe_peak", [](const std::string& isa, int32_t kind, int32_t threads, double seconds) {
    check_threads(threads);
    if (kind < 0 || kind > 2) throw std::invalid_argument("kind must lie in 0 to 2");
    const KernelTable* kernels = find_kernels(isa);
    if (kernels == nullptr) throw std::invalid_argument("this machine or build has no kernels named " + isa);
    nb::gil_scoped_release release;
    return probe_peak(*kernels, static_cast<Arithmetic>(kind), threads, seconds);
  });
  m.def("probe_barrier", [](int32_t threads) {
    check_threads(threads);
    nb::gil_scoped_release release;
    return probe_barrier(threads);
  });
  nb::class_<PyVm>(m, "Vm")
      .def(nb::init<const nb::bytes&, int64_t, std::vector<PyWeight>, int32_t, const std::string&, int32_t, int32_t,
                    int32_t, int32_t, int32_t, int32_t, int32_t, int32_t, int32_t>())
      // No array may be converted: a converted result would be a copy, and a converted input hides a mistake.
      .def("step", &PyVm::step, "tokens"_a.noconvert(), "token_types"_a.noconvert(), "positions"_a.noconvert(),
           "seq_starts"_a.noconvert(), "block_tables"_a.noconvert(), "outputs"_a.noconvert(), "results"_a.noconvert(),
           "top_ids"_a.noconvert(), "top_logprobs"_a.noconvert(), "count_ids"_a.noconvert(), "counts"_a.noconvert(),
           "bias_ids"_a.noconvert(), "bias_values"_a.noconvert(), "masks"_a.noconvert(), "num_records"_a)
      .def("decode", &PyVm::decode, "tokens"_a.noconvert(), "positions"_a.noconvert(), "seq_starts"_a.noconvert(),
           "block_tables"_a.noconvert(), "outputs"_a.noconvert(), "results"_a.noconvert(), "top_ids"_a.noconvert(),
           "top_logprobs"_a.noconvert(), "steps"_a, "stop_ids"_a.noconvert(), "stop_starts"_a.noconvert(), "wake_fd"_a)
      .def("set_threads", &PyVm::set_threads)
      .def("time_records", &PyVm::time_records)
      .def("read_record_times", &PyVm::read_record_times, "out"_a.noconvert())
      .def("read_arena", &PyVm::read_arena)
      .def("read_page", &PyVm::read_page)
      .def_prop_ro("kv_bytes", &PyVm::kv_bytes)
      .def_prop_ro("scratch_bytes", &PyVm::scratch_bytes)
      .def_prop_ro("arena_bytes", &PyVm::arena_bytes)
      .def_prop_ro("max_positions", &PyVm::max_positions)
      .def_prop_ro("isa", &PyVm::isa);
}

}  // namespace headrace
