// QKV: the three projections of attention, norms of the heads, RoPE on q and k, and the writing of k and v into this
// layer's KV pages. Every KV element has one writer, and no thread needs another's columns.
//
// Usually a unit of work is two column tiles of one head, half a head apart: the pairs that half-split RoPE rotates.
// Where heads are normed, or only their first elements turn, it is a whole head, kept in scratch until it is finished.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/step.h"
#include "isa/scalar.h"
#include "ops/linear.h"
#include "ops/product.h"
#include "ops/prologue.h"
#include "ops/sweep.h"

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

// Writes elements d … d + 15 of token `slot` of a V page. In the bf16 form tokens lie in pairs; where no row of this
// step writes the second half of a pair (`is_last`), it is zeroed with the first, so that a page never shows the values
// of an earlier owner there. No row writes what another does: threads write them in any order.
template <class Isa>
inline void write_v(const KvPool& kv, uint8_t* page, int32_t slot, int64_t d, typename Isa::F value, bool is_last) {
  if (kv.type == KvType::kF32) {  // [32][D]
    Isa::store(reinterpret_cast<float*>(page) + int64_t{slot} * kv.head_size + d, value);
  } else {  // [32/2][D][2]
    alignas(kAlign) uint16_t values[kLanes];
    Isa::store_bf16(values, value);
    uint16_t* to = reinterpret_cast<uint16_t*>(page) + (int64_t{slot / 2} * kv.head_size + d) * 2;
    to += slot % 2;
    for (int l = 0; l < kLanes; ++l) to[2 * l] = values[l];
    if (is_last && slot % 2 == 0) {
      for (int l = 0; l < kLanes; ++l) to[2 * l + 1] = 0;
    }
  }
}

// Whether heads must be finished whole: their norm needs all elements, and pairs that are not half a head apart turn.
static constexpr bool has_whole_heads(const QkvRecord& r) {
  return r.q_norm >= 0 || r.k_norm >= 0 || (r.rope >= 0 && r.rotary_size != r.head_size);
}
// Bytes of a thread's scratch for a head of a chunk of rows.
static constexpr int64_t qkv_scratch_bytes(const Limits& limits) {
  return int64_t{kChunkRows} * limits.max_whole_head * 4;
}

// What becomes of heads of q, k and v behind their product. R is a record with their fields, QKV's or ROTATE's.
template <class Isa, class R>
class HeadWriter {
  using F = typename Isa::F;

 public:
  HeadWriter(const R& record, const ThreadContext& context)
      : r_(record),
        context_(context),
        step_(*context.step),
        pages_(context, record.layer),
        rope_(vector_or_none(context, record.rope)),
        q_out_(context.buffer<float>(record.q_out)) {}

  // What a head is, found once for many rows: it takes divisions.
  struct Head {
    int64_t query;  // its place among the queries, −1 for k and v
    int32_t kv_head;
    bool is_key, is_turned;
  };
  Head head(int64_t index) const {
    const bool is_query = index < r_.heads, is_key = !is_query && index < r_.heads + r_.kv_heads;
    const auto kv_head = static_cast<int32_t>(is_query ? 0 : (index - r_.heads) % r_.kv_heads);
    return {is_query ? index : -1, kv_head, is_key, rope_ != nullptr && (is_query || is_key)};
  }

  // Norms, turns and puts a head of a row; overwrites x, [head_size].
  void finish(int32_t row, const Head& head, float* x) const {
    const bool is_query = head.query >= 0;
    const float* norm = is_query ? vector_or_none(context_, r_.q_norm) : vector_or_none(context_, r_.k_norm);
    if ((is_query || head.is_key) && norm != nullptr) {
      const F inverse = Isa::set1(rms_inverse<Isa>(x, r_.head_size, r_.qk_norm_eps));
      for (int64_t d = 0; d < r_.head_size; d += kLanes) {
        Isa::store(x + d, Isa::mul(Isa::mul(Isa::load(x + d), inverse), Isa::load(norm + d)));
      }
    }
    if (head.is_turned) {
      const int64_t half = r_.rotary_size / 2;
      const float* angles = angles_of(row);
      for (int64_t d = 0; d < half; d += kLanes) {
        const int count = static_cast<int>(std::min<int64_t>(kLanes, half - d));
        F low = Isa::load_n(x + d, count), high = Isa::load_n(x + half + d, count);
        turn(low, high, Isa::load_n(angles + d, count), Isa::load_n(angles + half + d, count));
        Isa::store_n(x + d, low, count);
        Isa::store_n(x + half + d, high, count);
      }
    }
    const Place to = place(row, head);
    for (int64_t d = 0; d < r_.head_size; d += kLanes) put(to, d, Isa::load(x + d));
  }

  const float* angles_of(int32_t row) const { return rope_ + position(row) * r_.rotary_size; }
  [[gnu::always_inline]] static inline void turn(F& low, F& high, F cosine, F sine) {
    const F turned = Isa::sub(Isa::mul(low, cosine), Isa::mul(high, sine));
    high = Isa::add(Isa::mul(high, cosine), Isa::mul(low, sine));
    low = turned;
  }

  // Where a head of a row goes: to the queries, or to the row's slot in a page.
  struct Place {
    float* query;  // nullptr for k and v
    uint8_t* page;
    int32_t slot;
    bool is_key, is_last;
  };
  [[gnu::always_inline]] inline Place place(int32_t row, const Head& head) const {
    if (head.query >= 0)
      return {q_out_ + (int64_t{row} * r_.heads + head.query) * r_.head_size, nullptr, 0, false, false};
    const auto at = static_cast<int32_t>(position(row));
    const int32_t block = pages_.block(step_.row_seq[static_cast<size_t>(row)], at / kBlockTokens);
    uint8_t* page = head.is_key ? pages_.k(block, head.kv_head) : pages_.v(block, head.kv_head);
    return {nullptr, page, at % kBlockTokens, head.is_key, is_last(row)};
  }
  // Sixteen finished elements, from d on.
  [[gnu::always_inline]] inline void put(const Place& to, int64_t d, F value) const {
    if (to.query != nullptr) Isa::store(to.query + d, value);
    else if (to.is_key) write_k<Isa>(pages_.pool, to.page, to.slot, d, value);
    else write_v<Isa>(pages_.pool, to.page, to.slot, d, value, to.is_last);
  }

 private:
  int64_t position(int32_t row) const { return step_.positions[static_cast<size_t>(row)]; }
  // Whether the row is its sequence's last of this step.
  bool is_last(int32_t row) const {
    const auto next = static_cast<size_t>(row) + 1;
    return next == static_cast<size_t>(step_.rows()) || step_.row_seq[next] != step_.row_seq[next - 1];
  }

  const R& r_;
  const ThreadContext& context_;
  const StepView& step_;
  const LayerPages pages_;
  const float* rope_;
  float* q_out_;
};

template <class Isa>
class Qkv {
  using F = typename Isa::F;

 public:
  Qkv(const QkvRecord& record, const ThreadContext& context)
      : r_(record),
        context_(context),
        step_(*context.step),
        weight_(context.weights[record.weight]),
        writer_(record, context),
        bias_(vector_or_none(context, record.bias)),
        half_(record.head_size / 2),
        head_tiles_(record.head_size / kLanes),
        head_units_(head_tiles_ / 2) {}

  void run() const {
    const Prologue prologue = prologue_of(r_, weight_.layout, context_);
    const Activations rows = prepare_rows<Isa>(prologue, step_.rows(), [](int32_t row) { return row; }, context_);
    if (has_whole_heads(r_)) by_heads(rows);
    else by_pairs(rows);
  }

 private:
  int64_t heads() const { return r_.heads + 2 * int64_t{r_.kv_heads}; }
  int64_t tile_of(int64_t unit, int t) const {
    return unit / head_units_ * head_tiles_ + unit % head_units_ + t * head_units_;
  }

  void by_pairs(const Activations& rows) const {
    sweep_blocks<Isa, 2>(
        weight_, rows, step_.rows(), SharedUnits{context_, heads() * head_units_},
        [this](int64_t unit, int t) { return tile_of(unit, t); },
        [this](int64_t unit, int32_t first, int32_t count, const float* const(&y)[2]) {
          const auto head = writer_.head(unit / head_units_);
          const int64_t d = unit % head_units_ * kLanes, low_tile = tile_of(unit, 0), high_tile = tile_of(unit, 1);
          for (int32_t m = 0; m < count; ++m) {
            F low = with_bias<Isa>(Isa::load(y[0] + m * kLanes), bias_, low_tile, kLanes);
            F high = with_bias<Isa>(Isa::load(y[1] + m * kLanes), bias_, high_tile, kLanes);
            if (head.is_turned) {
              const float* angles = writer_.angles_of(first + m) + d;
              writer_.turn(low, high, Isa::load(angles), Isa::load(angles + half_));
            }
            const auto to = writer_.place(first + m, head);
            writer_.put(to, d, low);
            writer_.put(to, d + half_, high);
          }
        });
  }

  // A head at a time, for a chunk of rows, through this thread's scratch.
  void by_heads(const Activations& rows) const {
    auto* scratch = reinterpret_cast<float*>(context_.scratch);
    const int64_t size = r_.head_size;
    const int32_t chunk = chunk_rows<Isa>(weight_.layout, r_.k);
    for (int32_t first = 0; first < step_.rows(); first += chunk) {
      const int32_t count = std::min(chunk, step_.rows() - first);
      const Activations part = rows.from_row(first);
      const auto finish = [&](int64_t head) {
        sweep<Isa, 2>(
            weight_, part, count, OwnUnits{{head * head_units_, (head + 1) * head_units_}},
            [this](int64_t unit, int t) { return tile_of(unit, t); },
            [&](int64_t unit, int32_t row, const F(&y)[2]) {
              float* to = scratch + row * size + unit % head_units_ * kLanes;
              Isa::store(to, with_bias<Isa>(y[0], bias_, tile_of(unit, 0), kLanes));
              Isa::store(to + half_, with_bias<Isa>(y[1], bias_, tile_of(unit, 1), kLanes));
            });
        const auto finished = writer_.head(head);
        for (int32_t row = 0; row < count; ++row) writer_.finish(first + row, finished, scratch + row * size);
      };
      SharedUnits{context_, heads()}.each([&](Range range) {
        for (int64_t head = range.start; head < range.stop; ++head) finish(head);
      });
    }
  }

  const QkvRecord& r_;
  const ThreadContext& context_;
  const StepView& step_;
  const Weight& weight_;
  const HeadWriter<Isa, QkvRecord> writer_;
  const float* bias_;
  const int64_t half_, head_tiles_, head_units_;
};

template <class Isa>
void op_qkv(const Record& record, const ThreadContext& context) {
  const auto fields = record.as<QkvRecord>();
  Qkv<Isa>(fields, context).run();
}

}  // namespace headrace
