// POOL: one row of each sequence, from its normed rows. Threads own sequences.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/step.h"
#include "ops/prologue.h"

namespace headrace {

// A pooled row is divided by no less, as torch's normalize does.
inline constexpr float kMinLength = 1e-12f;

template <class Isa>
void op_pool(const Record& record, const ThreadContext& context) {
  const auto r = record.as<PoolRecord>();
  const StepView& step = *context.step;
  const Prologue prologue = prologue_of(r, Layout::kF32, context);
  const auto pooling = static_cast<Pooling>(r.pooling);
  const Range range = share(step.sequences(), context.thread, context.threads);
  for (int64_t seq = range.start; seq < range.stop; ++seq) {
    const int32_t first = step.seq_starts[static_cast<size_t>(seq)];
    const int32_t behind = step.seq_starts[static_cast<size_t>(seq) + 1];
    const int32_t start = pooling == Pooling::kLast ? behind - 1 : first;
    const int32_t stop = pooling == Pooling::kFirst ? first + 1 : behind;
    float* out = context.buffer<float>(r.out) + seq * r.k;
    for (int32_t row = start; row < stop; ++row) {
      const float* x = prologue.input + int64_t{row} * r.k;
      const RowNorm<Isa> norm = row_norm<Isa>(prologue, x);
      for (int64_t i = 0; i < r.k; i += kLanes) {
        const auto value = normed<Isa>(prologue, x, i, norm);
        Isa::store(out + i, row == start ? value : Isa::add(Isa::load(out + i), value));
      }
    }
    const auto divide = [&](float divisor) {
      const auto all = Isa::set1(divisor);
      for (int64_t i = 0; i < r.k; i += kLanes) Isa::store(out + i, Isa::div(Isa::load(out + i), all));
    };
    if (pooling == Pooling::kMean) divide(static_cast<float>(stop - start));
    if (r.is_normalised == 0) continue;
    auto sum = Isa::zero();
    for (int64_t i = 0; i < r.k; i += kLanes) {
      const auto v = Isa::load(out + i);
      sum = Isa::fma(v, v, sum);
    }
    const float length = std::sqrt(Isa::reduce_add(sum));
    divide(length < kMinLength ? kMinLength : length);  // not a number stays
  }
}

}  // namespace headrace
