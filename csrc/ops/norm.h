// NORM: out = norm(in), or out += norm(in). Threads own rows.
#pragma once

#include <cstdint>

#include "core/step.h"
#include "ops/prologue.h"

namespace headrace {

template <class Isa>
void op_norm(const Record& record, const ThreadContext& context) {
  const auto r = record.as<NormRecord>();
  const Prologue prologue = prologue_of(r, Layout::kF32, context);
  const bool is_added = static_cast<Epilogue>(r.epilogue) == Epilogue::kAdd;
  const Range range = share(rows_of(static_cast<Domain>(r.domain), *context.step), context.thread, context.threads);
  for (int64_t row = range.start; row < range.stop; ++row) {
    const float* x = prologue.input + row * r.k;
    float* out = context.buffer<float>(r.out) + row * r.k;
    const RowNorm<Isa> norm = row_norm<Isa>(prologue, x);
    for (int64_t i = 0; i < r.k; i += kLanes) {
      const auto value = normed<Isa>(prologue, x, i, norm);
      Isa::store(out + i, is_added ? Isa::add(Isa::load(out + i), value) : value);
    }
  }
}

}  // namespace headrace
