#include "probe.h"

#include <algorithm>
#include <atomic>
#include <chrono>

#include "core/memory.h"
#include "core/pool.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace headrace {
namespace {

using SteadyClock = std::chrono::steady_clock;

double seconds_since(SteadyClock::time_point start) {
  return std::chrono::duration<double>(SteadyClock::now() - start).count();
}

// Sums the buffer as 64-bit words in eight independent chains: enough loads in flight for a plain build.
uint64_t read_all(const uint64_t* data, int64_t words) {
  uint64_t sums[8] = {};
  for (int64_t i = 0; i + 8 <= words; i += 8)
    for (int j = 0; j < 8; ++j) sums[j] += data[i + j];
  uint64_t total = 0;
  for (const uint64_t sum : sums) total += sum;
  return total;
}

#if defined(__x86_64__)
// Which register files the operating system saves (XCR0).
uint64_t saved_state() {
  uint32_t low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return uint64_t{high} << 32 | low;
}
#endif

struct Features {
  bool avx2 = false, fma = false, f16c = false;
  bool avx512 = false;  // F, BW, VL, DQ
  bool avx512vnni = false, avx512bf16 = false;
};

Features read_features() {
  Features f;
#if defined(__x86_64__)
  uint32_t a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return f;
  const auto bit = [](uint32_t word, int index) { return (word >> index & 1u) != 0; };
  if (!bit(c, 27)) return f;  // OSXSAVE: xgetbv exists
  const uint64_t state = saved_state();
  const bool has_ymm = (state & 0x6) == 0x6, has_zmm = (state & 0xe6) == 0xe6;
  f.fma = has_ymm && bit(c, 12);
  f.f16c = has_ymm && bit(c, 29);
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return f;
  f.avx2 = has_ymm && bit(b, 5);
  f.avx512 = has_zmm && bit(b, 16) && bit(b, 17) && bit(b, 30) && bit(b, 31);
  f.avx512vnni = f.avx512 && bit(c, 11);
  if (__get_cpuid_count(7, 1, &a, &b, &c, &d)) f.avx512bf16 = f.avx512 && bit(a, 5);
#endif
  return f;
}

}  // namespace

std::vector<std::pair<std::string, bool>> cpu_features() {
  const Features f = read_features();
  return {{"avx2", f.avx2},
          {"fma", f.fma},
          {"f16c", f.f16c},
          {"avx512", f.avx512},
          {"avx512vnni", f.avx512vnni},
          {"avx512bf16", f.avx512bf16}};
}

std::vector<const KernelTable*> available_kernels() {
  const Features f = read_features();
  std::vector<const KernelTable*> tables{kernels_scalar()};
  const auto add = [&](const KernelTable* table, bool is_offered) {
    if (table != nullptr && is_offered) tables.push_back(table);
  };
  const bool has_avx2 = f.avx2 && f.fma && f.f16c;
  add(kernels_avx2(), has_avx2);
#ifdef HEADRACE_EMULATE_AVX512
  const bool has_vnni = has_avx2, has_bf16 = has_avx2;
#else
  const bool has_vnni = has_avx2 && f.avx512vnni, has_bf16 = has_vnni && f.avx512bf16;
#endif
  add(kernels_avx512(), has_vnni);
  add(kernels_avx512bf16(), has_bf16);
  return tables;
}

const KernelTable* find_kernels(const std::string& isa) {
  for (const KernelTable* table : available_kernels()) {
    if (isa == table->isa) return table;
  }
  return nullptr;
}

double probe_bandwidth(int64_t size_bytes, int32_t threads, double seconds) {
  Memory memory(align_up(std::max<int64_t>(size_bytes, 1 << 20)));
  Pool pool(threads);
  struct Job {
    uint64_t* data;
    int64_t words;
    int32_t threads;
    bool is_writing;
    std::atomic<uint64_t> sink;
  } job{reinterpret_cast<uint64_t*>(memory.data()), memory.size_bytes() / 8, threads, true, 0};
  const Pool::Task task = [](void* context, int32_t thread) {
    Job& j = *static_cast<Job*>(context);
    const Range range = share(j.words, thread, j.threads);
    if (j.is_writing) {  // first touch, by the thread that will read
      for (int64_t i = range.start; i < range.stop; ++i) j.data[i] = static_cast<uint64_t>(i);
    } else {
      j.sink += read_all(j.data + range.start, range.stop - range.start);
    }
  };
  pool.run(task, &job);
  job.is_writing = false;
  double best = 0.0;
  const auto start = SteadyClock::now();
  do {
    const auto pass = SteadyClock::now();
    pool.run(task, &job);
    best = std::max(best, static_cast<double>(memory.size_bytes()) / seconds_since(pass));
  } while (seconds_since(start) < seconds);
  return best;
}

double probe_peak(const KernelTable& kernels, Arithmetic kind, int32_t threads, double seconds) {
  struct Job {
    const KernelTable& kernels;
    Arithmetic kind;
    std::atomic<int64_t> operations = 0;
  } job{kernels, kind};
  // A pass of about a millisecond: long beside a barrier, short enough that one of them is undisturbed.
  constexpr int64_t kRounds = 200'000;
  Pool pool(threads);
  double best = 0.0;
  const auto start = SteadyClock::now();
  do {
    job.operations = 0;
    const auto pass = SteadyClock::now();
    pool.run(
        [](void* context, int32_t) {
          auto& j = *static_cast<Job*>(context);
          j.operations += j.kernels.burn(j.kind, kRounds);
        },
        &job);
    best = std::max(best, static_cast<double>(job.operations) / seconds_since(pass));
  } while (seconds_since(start) < seconds);
  return best;
}

double probe_barrier(int32_t threads) {
  constexpr int kBatch = 1000, kBatches = 15;
  Pool pool(threads);
  std::vector<double> batches;
  for (int batch = 0; batch < kBatches; ++batch) {
    const auto start = SteadyClock::now();
    pool.run(
        [](void* context, int32_t) {
          for (int i = 0; i < kBatch; ++i) static_cast<Pool*>(context)->barrier().wait();
        },
        &pool);
    batches.push_back(seconds_since(start) / kBatch);
  }
  std::nth_element(batches.begin(), batches.begin() + kBatches / 2, batches.end());
  return batches[kBatches / 2];
}

}  // namespace headrace
