// LINEAR: out = epilogue(activation(norm(in) · wᵀ + bias)). Threads share column tiles.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/step.h"
#include "ops/math.h"
#include "ops/product.h"
#include "ops/prologue.h"
#include "ops/sweep.h"

namespace headrace {

// y plus the bias of column tile `tile`, of which `count` columns exist.
template <class Isa>
inline typename Isa::F with_bias(typename Isa::F y, const float* bias, int64_t tile, int count) {
  if (bias == nullptr) return y;
  return Isa::add(y, count == kLanes ? Isa::load(bias + tile * kLanes) : Isa::load_n(bias + tile * kLanes, count));
}

template <class Isa>
void op_linear(const Record& record, const ThreadContext& context) {
  using F = typename Isa::F;
  const auto r = record.as<LinearRecord>();
  const Weight& weight = context.weights[r.weight];
  const int32_t rows = rows_of(static_cast<Domain>(r.domain), *context.step);
  const float* bias = vector_or_none(context, r.bias);
  float* out = context.buffer<float>(r.out);
  const Prologue prologue = prologue_of(r, weight.layout, context);
  const Activations rows_in = prepare_rows<Isa>(prologue, rows, [](int32_t row) { return row; }, context);
  const int64_t tiles = num_tiles(r.n);
  const auto activation = static_cast<Activation>(r.activation);

  if (static_cast<Epilogue>(r.epilogue) == Epilogue::kGlu) {
    const int64_t width = r.n / 2;
    sweep_blocks<Isa, 2>(
        weight, rows_in, rows, SharedUnits{context, tiles / 2}, [](int64_t unit, int t) { return 2 * unit + t; },
        [&](int64_t unit, int32_t row, int32_t count, const float* const(&y)[2]) {
          float* to = out + row * width + unit * kLanes;
          Math<Isa>::with(activation, [&](auto activate) {
            for (int64_t m = 0; m < count; ++m) {
              const F gate = with_bias<Isa>(Isa::load(y[0] + m * kLanes), bias, 2 * unit, kLanes);
              const F up = with_bias<Isa>(Isa::load(y[1] + m * kLanes), bias, 2 * unit + 1, kLanes);
              Isa::store(to + m * width, Isa::mul(activate(gate), up));
            }
          });
        });
    return;
  }
  const bool is_added = static_cast<Epilogue>(r.epilogue) == Epilogue::kAdd;
  sweep_blocks<Isa, 1>(
      weight, rows_in, rows, SharedUnits{context, tiles}, [](int64_t unit, int) { return unit; },
      [&](int64_t unit, int32_t row, int32_t count, const float* const(&y)[1]) {
        const int lanes = static_cast<int>(std::min<int64_t>(kLanes, r.n - unit * kLanes));
        float* to = out + row * int64_t{r.n} + unit * kLanes;
        Math<Isa>::with(activation, [&](auto activate) {
          for (int64_t m = 0; m < count; ++m, to += r.n) {
            F value = activate(with_bias<Isa>(Isa::load(y[0] + m * kLanes), bias, unit, lanes));
            if (lanes == kLanes) {
              if (is_added) value = Isa::add(Isa::load(to), value);
              Isa::store(to, value);
            } else {
              if (is_added) value = Isa::add(Isa::load_n(to, lanes), value);
              Isa::store_n(to, value, lanes);
            }
          }
        });
      });
}

}  // namespace headrace
