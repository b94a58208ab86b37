// What happens to input rows before a product: norm, then the form the weight's layout wants (f32, bf16, or int8 with
// a scale per 32). Few rows: every thread prepares them all for itself. Many: the threads share them, with a barrier.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "core/pool.h"
#include "core/step.h"
#include "isa/scalar.h"
#include "ops/product.h"
#include "ops/sweep.h"

namespace headrace {

// Up to here preparing all rows on every thread costs less than a barrier (a row of 576 takes about 0.3 us).
inline constexpr int32_t kReplicatedRows = 2;

// Bytes that `rows` prepared rows of `k` inputs take in any form.
static constexpr int64_t prepared_bytes(int64_t rows, int64_t k) {
  return align_up(rows * k * 4) + 4 * align_up(2 * rows * (k / kGroup) * 4) + align_up(rows * 4);
}
static constexpr int64_t shared_rows_bytes(const Limits& limits) {
  const int64_t rows = limits.max_rows > limits.max_outputs ? limits.max_rows : limits.max_outputs;
  const int64_t plain = prepared_bytes(rows, limits.max_k);
  const int64_t pairs = prepared_bytes(int64_t{limits.max_rows} * limits.max_top_experts, limits.max_moe_k);
  return plain > pairs ? plain : pairs;
}
static constexpr int64_t own_rows_bytes(const Limits& limits) {
  return prepared_bytes(kReplicatedRows, limits.max_k) + sweep_bytes(limits.max_k);
}

struct Prologue {
  Layout layout = Layout::kF32;  // of the weight that the rows will meet
  const float* input = nullptr;  // [rows][k]
  int64_t k = 0;
  Norm norm = Norm::kNone;
  const float* norm_weight = nullptr;  // [k], or none
  const float* norm_bias = nullptr;    // [k], or none
  float norm_eps = 0.0f;
};

static inline const float* vector_or_none(const ThreadContext& context, int32_t weight) {
  return weight < 0 ? nullptr : reinterpret_cast<const float*>(context.weights[weight].data);
}

static inline int32_t rows_of(Domain domain, const StepView& step) {
  if (domain == Domain::kOutputs) return step.num_outputs();
  return domain == Domain::kSequences ? step.sequences() : step.rows();
}

// The prologue of a record whose product reads a weight of `layout`.
template <class R>
static inline Prologue prologue_of(const R& r, Layout layout, const ThreadContext& context) {
  return {layout,
          context.buffer<const float>(r.input),
          r.k,
          static_cast<Norm>(r.norm),
          vector_or_none(context, r.norm_weight),
          vector_or_none(context, r.norm_bias),
          r.norm_eps};
}

// 1 / sqrt(mean of squares + eps).
template <class Isa>
static inline float rms_inverse(const float* x, int64_t k, float eps) {
  auto sum = Isa::zero();
  for (int64_t i = 0; i < k; i += kLanes) {
    const auto v = Isa::load(x + i);
    sum = Isa::fma(v, v, sum);
  }
  return 1.0f / std::sqrt(Isa::reduce_add(sum) / static_cast<float>(k) + eps);
}

// What a norm takes from a row: each element becomes (x - mean) · inverse. RMS has no mean.
template <class Isa>
struct RowNorm {
  typename Isa::F mean, inverse;
};

template <class Isa>
inline RowNorm<Isa> row_norm(const Prologue& p, const float* x) {
  if (p.norm == Norm::kNone) return {Isa::zero(), Isa::set1(1.0f)};
  if (p.norm == Norm::kRms) return {Isa::zero(), Isa::set1(rms_inverse<Isa>(x, p.k, p.norm_eps))};
  auto sum = Isa::zero(), squares = Isa::zero();
  for (int64_t i = 0; i < p.k; i += kLanes) sum = Isa::add(sum, Isa::load(x + i));
  const auto mean = Isa::set1(Isa::reduce_add(sum) / static_cast<float>(p.k));
  for (int64_t i = 0; i < p.k; i += kLanes) {
    const auto v = Isa::sub(Isa::load(x + i), mean);
    squares = Isa::fma(v, v, squares);
  }
  return {mean, Isa::set1(1.0f / std::sqrt(Isa::reduce_add(squares) / static_cast<float>(p.k) + p.norm_eps))};
}

// Sixteen elements of the normed row.
template <class Isa>
inline typename Isa::F normed(const Prologue& p, const float* x, int64_t i, const RowNorm<Isa>& norm) {
  auto v = Isa::load(x + i);
  if (p.norm == Norm::kNone) return v;
  if (p.norm == Norm::kLayer) v = Isa::sub(v, norm.mean);
  v = Isa::mul(v, norm.inverse);
  if (p.norm_weight != nullptr) v = Isa::mul(v, Isa::load(p.norm_weight + i));
  return p.norm_bias == nullptr ? v : Isa::add(v, Isa::load(p.norm_bias + i));
}

// A group whose largest element is over this multiple of the row's mean of such maxima has a second term: its scale is
// coarse for the 31 others. About one group in five; it divides the mean KL of SmolLM2 by eight (docs/lab).
inline constexpr float kOutlier = 1.25f;
// Steps of the second term within one of the first: its integers are in −127 … 127.
inline constexpr float kSecondSteps = 254.0f;

// Where one group of 32 goes.
struct GroupSlot {
  int8_t* q;
  float* scale;
  int32_t* sum;
};

// One group of 32: q = round(x · 127 / amax), scale = amax / 127, their sum. A group so small that 127 / amax is not
// finite becomes zeros; one that holds NaN or infinity gets a NaN scale, which spoils every product of the row.
// With a second slot, what rounding left is quantised again, 254 steps to one. Returns whether it was filled.
template <class Isa>
inline bool quantise_group(typename Isa::F low, typename Isa::F high, float amax, GroupSlot to, GroupSlot second,
                           bool wants_second) {
  using F = typename Isa::F;
  const F zero = Isa::zero();
  // x · 0 is 0 for every finite x: a maximum may lose a NaN, this cannot.
  const bool is_poisoned = Isa::has_nan(Isa::fma(high, zero, Isa::mul(low, zero)));
  const float inverse = 127.0f / amax;
  if (is_poisoned || !std::isfinite(inverse)) {
    for (int i = 0; i < kGroup; ++i) to.q[i] = 0;
    *to.scale = is_poisoned ? std::numeric_limits<float>::quiet_NaN() : amax / 127.0f;
    *to.sum = 0;
    return false;
  }
  const F factor = Isa::set1(inverse);
  const F x0 = Isa::mul(low, factor), x1 = Isa::mul(high, factor);
  const F q0 = Isa::round(x0), q1 = Isa::round(x1);
  *to.sum = Isa::narrow(q0, q1, to.q);
  *to.scale = amax / 127.0f;
  if (!wants_second) return false;
  const F steps = Isa::set1(kSecondSteps);
  *second.sum = Isa::narrow(Isa::round(Isa::mul(Isa::sub(x0, q0), steps)),
                            Isa::round(Isa::mul(Isa::sub(x1, q1), steps)), second.q);
  *second.scale = *to.scale / kSecondSteps;
  return true;
}

// The same for rows that are wide: 32 whole numbers of 16 bits, of both terms where a second is wanted.
template <class Isa>
inline void quantise_wide(typename Isa::F low, typename Isa::F high, float amax, int16_t* q, float* scale, int32_t* sum,
                          bool wants_second) {
  using F = typename Isa::F;
  const F zero = Isa::zero();
  const bool is_poisoned = Isa::has_nan(Isa::fma(high, zero, Isa::mul(low, zero)));
  const float inverse = 127.0f / amax;
  if (is_poisoned || !std::isfinite(inverse)) {
    for (int i = 0; i < kGroup; ++i) q[i] = 0;
    *scale = is_poisoned ? std::numeric_limits<float>::quiet_NaN() : amax / 127.0f;
    *sum = 0;
    return;
  }
  const F factor = Isa::set1(inverse);
  const F x0 = Isa::mul(low, factor), x1 = Isa::mul(high, factor);
  F q0 = Isa::round(x0), q1 = Isa::round(x1);
  *scale = amax / 127.0f;
  if (wants_second) {
    // At most 254 · 127 + 127 = 32385, exact in f32 as is the sum of 32 of them.
    const F steps = Isa::set1(kSecondSteps);
    q0 = Isa::fma(q0, steps, Isa::round(Isa::mul(Isa::sub(x0, q0), steps)));
    q1 = Isa::fma(q1, steps, Isa::round(Isa::mul(Isa::sub(x1, q1), steps)));
    *scale /= kSecondSteps;
  }
  *sum = Isa::narrow_wide(q0, q1, q);
}

// Prepares one row at index `row` of `to`.
template <class Isa>
void prepare_row(const Prologue& p, const float* x, int64_t row, const Activations& to) {
  const int64_t k = p.k;
  const RowNorm<Isa> norm = row_norm<Isa>(p, x);
  if (is_plain(p.layout)) {
    float* out = const_cast<float*>(to.f32) + row * k;
    for (int64_t i = 0; i < k; i += kLanes) Isa::store(out + i, normed<Isa>(p, x, i, norm));
  } else if (p.layout == Layout::kBf16 && HasFloatDot<Isa>) {
    float* out = const_cast<float*>(to.f32) + row * k;
    alignas(kAlign) uint16_t rounded[kLanes];
    for (int64_t i = 0; i < k; i += kLanes) {
      Isa::store_bf16(rounded, normed<Isa>(p, x, i, norm));
      Isa::store(out + i, Isa::load_bf16(rounded));
    }
  } else if (p.layout == Layout::kBf16) {
    uint16_t* out = const_cast<uint16_t*>(to.bf16) + row * k;
    for (int64_t i = 0; i < k; i += kLanes) Isa::store_bf16(out + i, normed<Isa>(p, x, i, norm));
  } else {
    const int64_t groups = k / kGroup;
    const auto slot = [&](int64_t at, int64_t g) {
      return GroupSlot{const_cast<int8_t*>(to.q8) + at * k + g * kGroup,
                       const_cast<float*>(to.scales) + at * groups + g,
                       const_cast<int32_t*>(to.sums) + at * groups + g};
    };
    // The maxima wait where the scales will stand.
    float total = 0.0f;
    for (int64_t g = 0; g < groups; ++g) {
      const auto low = Isa::abs(normed<Isa>(p, x, g * kGroup, norm));
      const auto high = Isa::abs(normed<Isa>(p, x, g * kGroup + kLanes, norm));
      *slot(row, g).scale = Isa::reduce_max(Isa::max(low, high));
      total += *slot(row, g).scale;
    }
    const float limit = kOutlier * total;
    if constexpr (HasWideRows<Isa>) {
      if (p.layout == Layout::kQ8) {
        int16_t* q = const_cast<int16_t*>(to.q16) + row * k;
        for (int64_t g = 0; g < groups; ++g) {
          const GroupSlot group = slot(row, g);
          const float amax = *group.scale;
          quantise_wide<Isa>(normed<Isa>(p, x, g * kGroup, norm), normed<Isa>(p, x, g * kGroup + kLanes, norm), amax,
                             q + g * kGroup, group.scale, group.sum, amax * static_cast<float>(groups) > limit);
        }
        const_cast<int32_t*>(to.num_seconds)[row] = 0;
        return;
      }
    }
    const auto settle = [&](const GroupSlot& group) {
      const auto sum = static_cast<float>(*group.sum);
      const_cast<float*>(to.offsets)[group.scale - to.scales] =
          p.layout == Layout::kQ4 ? 8.0f * sum : *group.scale * sum;
    };
    int32_t num_seconds = 0;
    for (int64_t g = 0; g < groups; ++g) {
      const GroupSlot first = slot(row, g), second = slot(to.rows + row, g);
      const float amax = *first.scale;
      const bool has_second =
          quantise_group<Isa>(normed<Isa>(p, x, g * kGroup, norm), normed<Isa>(p, x, g * kGroup + kLanes, norm), amax,
                              first, second, amax * static_cast<float>(groups) > limit);
      settle(first);
      if (!has_second) continue;
      settle(second);
      const_cast<int32_t*>(to.seconds)[row * groups + num_seconds++] = static_cast<int32_t>(g);
    }
    const_cast<int32_t*>(to.num_seconds)[row] = num_seconds;
  }
}

static inline Activations place_rows(uint8_t* memory, int64_t rows, int64_t k) {
  Activations a;
  a.k = k;
  a.rows = rows;
  a.f32 = reinterpret_cast<const float*>(memory);
  a.bf16 = reinterpret_cast<const uint16_t*>(memory);
  a.q8 = reinterpret_cast<const int8_t*>(memory);
  a.q16 = reinterpret_cast<const int16_t*>(memory);
  const int64_t groups_size = align_up(2 * rows * (k / kGroup) * 4);
  memory += align_up(rows * k * 4);
  a.scales = reinterpret_cast<const float*>(memory);
  a.sums = reinterpret_cast<const int32_t*>(memory + groups_size);
  a.offsets = reinterpret_cast<const float*>(memory + 2 * groups_size);
  a.seconds = reinterpret_cast<const int32_t*>(memory + 3 * groups_size);
  a.num_seconds = reinterpret_cast<const int32_t*>(memory + 4 * groups_size);
  return a;
}

// Floats of a row that PREPARE writes: prepared_bytes of any number of rows fits them (8·k + 512 bytes a row, of which
// at most 5·k + 4 and once 315 are used).
static constexpr int64_t prepared_width(int64_t k) { return 2 * k + 128; }

// Prepares `rows` rows; the i-th is input row row_of(i). Called by all threads of the record; the result is valid
// until the record ends. Holds a barrier when there are many rows. Rows that PREPARE has prepared are taken as they
// are.
template <class Isa, class RowOf>
Activations prepare_rows(const Prologue& p, int32_t rows, RowOf row_of, const ThreadContext& context) {
  if (p.norm == Norm::kPrepared) {
    // Written by another record of this program; only read here.
    auto* prepared = const_cast<uint8_t*>(reinterpret_cast<const uint8_t*>(p.input));
    Activations a = place_rows(prepared, rows, p.k);
    a.own = context.own_rows + prepared_bytes(kReplicatedRows, context.limits->max_k);
    return a;
  }
  const bool is_replicated = rows <= kReplicatedRows || context.threads == 1;
  // With one thread there is no sharing, but many rows need the larger memory.
  uint8_t* memory = rows <= kReplicatedRows ? context.own_rows : context.shared_rows;
  Activations a = place_rows(memory, rows, p.k);
  a.own = context.own_rows + prepared_bytes(kReplicatedRows, context.limits->max_k);
  const Range range = is_replicated ? Range{0, rows} : share(rows, context.thread, context.threads);
  for (int64_t i = range.start; i < range.stop; ++i) prepare_row<Isa>(p, p.input + row_of(i) * p.k, i, a);
  if (!is_replicated) context.barrier->wait();
  return a;
}

}  // namespace headrace
