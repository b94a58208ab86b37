// EMBED: rows from token ids, and learned positions and token types, dequantised from any matrix layout.
#pragma once

#include <cstdint>

#include "core/step.h"
#include "isa/scalar.h"
#include "ops/product.h"

namespace headrace {

// Elements [32·group, 32·group + 32) of row `row` of a packed matrix. Each product and sum is rounded by itself.
static inline void dequantise_group(const Weight& w, int64_t row, int64_t group, float* out) {
  const int64_t lane = row % kLanes;
  const uint8_t* data = w.data + row / kLanes * tile_bytes(w.layout, w.k) + group * group_bytes(w.layout);
  const auto* halves = reinterpret_cast<const uint16_t*>(data);
  switch (w.layout) {
    case Layout::kF32:
      for (int i = 0; i < kGroup; ++i) out[i] = reinterpret_cast<const float*>(data)[i * kLanes + lane];
      return;
    case Layout::kF16:
      for (int i = 0; i < kGroup; ++i) out[i] = scalar::f16_to_f32(halves[i * kLanes + lane]);
      return;
    case Layout::kBf16:
      for (int i = 0; i < kGroup; ++i) {
        out[i] = scalar::bf16_to_f32(halves[i / 2 * 2 * kLanes + 2 * lane + i % 2]);
      }
      return;
    case Layout::kQ8: {
      const float scale = scalar::f16_to_f32(halves[lane]);
      const uint8_t* q = data + 2 * kLanes;
      for (int i = 0; i < kGroup; ++i) {
        out[i] = static_cast<float>(q[i / 4 * 4 * kLanes + 4 * lane + i % 4] - 128) * scale;
      }
      return;
    }
    case Layout::kQ4:
    case Layout::kQ4m: {
      const bool has_min = w.layout == Layout::kQ4m;
      const float scale = scalar::f16_to_f32(halves[lane]);
      const float min = has_min ? scalar::f16_to_f32(halves[kLanes + lane]) : 0.0f;
      const uint8_t* nibbles = data + (has_min ? 4 : 2) * kLanes;
      for (int i = 0; i < kGroup; ++i) {
        const uint8_t byte = nibbles[i / 8 * 4 * kLanes + 4 * lane + i % 4];
        const int nibble = i % 8 < 4 ? byte & 15 : byte >> 4;
        out[i] = has_min ? static_cast<float>(nibble) * scale + min : static_cast<float>(nibble - 8) * scale;
      }
      return;
    }
    default: return;
  }
}

template <class Isa>
void op_embed(const Record& record, const ThreadContext& context) {
  const auto r = record.as<EmbedRecord>();
  const Weight& table = context.weights[r.table];
  const StepView& step = *context.step;
  const int64_t groups = r.width / kGroup;
  const Range range = share(step.rows() * groups, context.thread, context.threads);
  float* out = context.buffer<float>(r.out);
  const auto scale = Isa::set1(r.scale);
  alignas(kAlign) float learned[kGroup];
  for (int64_t item = range.start; item < range.stop; ++item) {
    const int64_t row = item / groups, group = item % groups;
    float* to = out + row * r.width + group * kGroup;
    dequantise_group(table, step.tokens[static_cast<size_t>(row)], group, to);
    for (int i = 0; i < kGroup; i += kLanes) Isa::store(to + i, Isa::mul(Isa::load(to + i), scale));
    const auto add = [&](int32_t weight, int64_t index) {
      dequantise_group(context.weights[weight], index, group, learned);
      for (int i = 0; i < kGroup; i += kLanes) Isa::store(to + i, Isa::add(Isa::load(to + i), Isa::load(learned + i)));
    };
    const auto at = static_cast<size_t>(row);
    if (r.positions >= 0) add(r.positions, int64_t{step.positions[at]} + r.position_offset);
    if (r.types >= 0) add(r.types, step.token_types.empty() ? 0 : step.token_types[at]);
  }
}

}  // namespace headrace
