// QKV: the three projections of attention, RoPE on q and k, and the writing of k and v into this layer's KV pages.
//
// A unit is two column tiles of one head, half a head apart: the pairs that half-split RoPE rotates. So a thread needs
// no other thread's columns, and every KV element has one writer.
#pragma once

#include <cstdint>

#include "core/step.h"
#include "isa/scalar.h"
#include "ops/linear.h"
#include "ops/product.h"
#include "ops/prologue.h"

namespace headrace {

// Writes elements d … d + 15 of token `slot` of a K page.
template <class Isa>
inline void write_k(const KvPool& kv, uint8_t* page, int32_t slot, int64_t d, typename Isa::F value) {
  if (kv.type == KvType::kF32) {  // [D][32]
    alignas(kAlign) float values[kLanes];
    Isa::store(values, value);
    float* to = reinterpret_cast<float*>(page) + d * kBlockTokens + slot;
    for (int l = 0; l < kLanes; ++l) to[l * kBlockTokens] = values[l];
  } else {  // [D/2][32][2]
    alignas(kAlign) uint16_t values[kLanes];
    Isa::store_bf16(values, value);
    uint16_t* to = reinterpret_cast<uint16_t*>(page) + d * kBlockTokens + 2 * slot;
    for (int l = 0; l < kLanes; l += 2) std::memcpy(to + l * kBlockTokens, values + l, 2 * sizeof(uint16_t));
  }
}

// Writes elements d … d + 15 of token `slot` of a V page. In the bf16 form tokens lie in pairs; the second half of a
// pair is zeroed with the first, so that a page never shows the values of an earlier owner there.
template <class Isa>
inline void write_v(const KvPool& kv, uint8_t* page, int32_t slot, int64_t d, typename Isa::F value) {
  if (kv.type == KvType::kF32) {  // [32][D]
    Isa::store(reinterpret_cast<float*>(page) + int64_t{slot} * kv.head_size + d, value);
  } else {  // [32/2][D][2]
    alignas(kAlign) uint16_t values[kLanes];
    Isa::store_bf16(values, value);
    uint16_t* to = reinterpret_cast<uint16_t*>(page) + (int64_t{slot / 2} * kv.head_size + d) * 2;
    if (slot % 2 == 0) {
      for (int l = 0; l < kLanes; ++l) to[2 * l] = values[l], to[2 * l + 1] = 0;
    } else {
      for (int l = 0; l < kLanes; ++l) to[2 * l + 1] = values[l];
    }
  }
}

template <class Isa>
void op_qkv(const Record& record, const ThreadContext& context) {
  using F = typename Isa::F;
  const auto r = record.as<QkvRecord>();
  const Weight& weight = context.weights[r.weight];
  const StepView& step = *context.step;
  const KvPool& kv = *context.kv;
  const int32_t rows = step.rows();
  const float* bias = vector_or_none(context, r.bias);
  const float* rope = vector_or_none(context, r.rope);
  float* q_out = context.buffer<float>(r.q_out);
  const Prologue prologue{weight.layout,
                          context.buffer<const float>(r.input),
                          r.k,
                          static_cast<Norm>(r.norm),
                          vector_or_none(context, r.norm_weight),
                          r.norm_eps};
  const Activations rows_in = prepare_rows<Isa>(prologue, rows, [](int32_t row) { return row; }, context);

  const int64_t head_size = r.head_size, half = head_size / 2;
  const int64_t head_tiles = head_size / kLanes, head_units = head_tiles / 2;
  const int64_t heads = r.heads + 2 * int64_t{r.kv_heads};
  const auto tile_of = [=](int64_t unit, int t) {
    return unit / head_units * head_tiles + unit % head_units + t * head_units;
  };
  sweep<Isa, 2>(weight, rows_in, rows, share(heads * head_units, context.thread, context.threads), tile_of,
                [&](int64_t unit, int32_t row, const F(&y)[2]) {
                  const int64_t head = unit / head_units, d = unit % head_units * kLanes;
                  const int32_t position = step.positions[static_cast<size_t>(row)];
                  const bool is_value = head >= r.heads + r.kv_heads;
                  F low = with_bias<Isa>(y[0], bias, tile_of(unit, 0), kLanes);
                  F high = with_bias<Isa>(y[1], bias, tile_of(unit, 1), kLanes);
                  if (rope != nullptr && !is_value) {
                    const float* angles = rope + position * head_size;
                    const F cosine = Isa::load(angles + d), sine = Isa::load(angles + half + d);
                    const F turned = Isa::sub(Isa::mul(low, cosine), Isa::mul(high, sine));
                    high = Isa::add(Isa::mul(high, cosine), Isa::mul(low, sine));
                    low = turned;
                  }
                  if (head < r.heads) {
                    float* to = q_out + (int64_t{row} * r.heads + head) * head_size + d;
                    Isa::store(to, low);
                    Isa::store(to + half, high);
                    return;
                  }
                  const int32_t block = step.block(step.row_seq[static_cast<size_t>(row)], position / kBlockTokens);
                  const int32_t slot = position % kBlockTokens;
                  const auto kv_head = static_cast<int32_t>((head - r.heads) % r.kv_heads);
                  if (is_value) {
                    uint8_t* page = kv.v_page(r.layer, block, kv_head);
                    write_v<Isa>(kv, page, slot, d, low);
                    write_v<Isa>(kv, page, slot, d + half, high);
                  } else {
                    uint8_t* page = kv.k_page(r.layer, block, kv_head);
                    write_k<Isa>(kv, page, slot, d, low);
                    write_k<Isa>(kv, page, slot, d + half, high);
                  }
                });
}

}  // namespace headrace
