// MOE: each row goes through the experts that a router picks for it, and their weighted sum is added to the output.
//
// Rows are grouped by expert, so that an expert's weights are read once in a step, and the threads share the columns of
// every expert. A pair (row, expert) is computed as any row of a product, whoever its neighbours are, and a row adds
// its experts in rising order: its result depends on nothing but the row.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "core/pool.h"
#include "core/step.h"
#include "ops/math.h"
#include "ops/product.h"
#include "ops/prologue.h"
#include "ops/sweep.h"

namespace headrace {

namespace moe {

static constexpr int64_t logit_stride(int64_t experts) { return num_tiles(experts) * kLanes; }

}  // namespace moe

// Bytes of one thread's scratch: where each expert's pairs start, and row and share of each pair.
static constexpr int64_t moe_scratch_bytes(const Limits& limits) {
  const int64_t pairs = int64_t{limits.max_rows} * limits.max_top_experts;
  return align_up((int64_t{limits.max_experts} + 1) * 4) + 2 * align_up(pairs * 4);
}
// Bytes of the scratch that the threads share: logits, the experts of each row and their shares, the gated products.
static constexpr int64_t moe_shared_bytes(const Limits& limits) {
  const int64_t rows = limits.max_rows, pairs = rows * limits.max_top_experts;
  return align_up(rows * moe::logit_stride(limits.max_experts) * 4) + 2 * align_up(pairs * 4) +
         align_up(rows * limits.max_gated * 4);
}

template <class Isa>
class Moe {
  using F = typename Isa::F;

 public:
  Moe(const MoeRecord& record, const ThreadContext& context)
      : r_(record),
        context_(context),
        rows_(context.step->rows()),
        pairs_(rows_ * record.top_k),
        stride_(moe::logit_stride(record.experts)) {
    uint8_t* at = context.shared_scratch;
    const auto take = [&at](int64_t size_bytes) {
      uint8_t* part = at;
      at += align_up(size_bytes);
      return part;
    };
    logits_ = reinterpret_cast<float*>(take(int64_t{rows_} * stride_ * 4));
    ids_ = reinterpret_cast<int32_t*>(take(int64_t{pairs_} * 4));
    shares_ = reinterpret_cast<float*>(take(int64_t{pairs_} * 4));
    gated_ = reinterpret_cast<float*>(take(int64_t{pairs_} * record.hidden * 4));
    at = context.scratch;
    starts_ = reinterpret_cast<int32_t*>(take((int64_t{record.experts} + 1) * 4));
    pair_rows_ = reinterpret_cast<int32_t*>(take(int64_t{pairs_} * 4));
    pair_shares_ = reinterpret_cast<float*>(take(int64_t{pairs_} * 4));
  }

  void run() const {
    ask_router();
    context_.barrier->wait();
    const Range mine = share(rows_, context_.thread, context_.threads);
    for (int64_t row = mine.start; row < mine.stop; ++row) choose(row);
    context_.barrier->wait();
    group();
    up();
    context_.barrier->wait();
    down();
  }

 private:
  void ask_router() const {
    const Weight& router = context_.weights[r_.router];
    const Activations a =
        prepare_rows<Isa>(prologue_of(r_, router.layout, context_), rows_, [](int32_t row) { return row; }, context_);
    sweep<Isa, 1>(
        router, a, rows_, SharedUnits{context_, num_tiles(r_.experts)}, [](int64_t unit, int) { return unit; },
        [this](int64_t unit, int32_t row, const F(&y)[1]) {
          F logits = y[0];
          const int64_t existing = r_.experts - unit * kLanes;
          if (existing < kLanes) {
            const F none = Isa::set1(-std::numeric_limits<float>::infinity());
            logits = Isa::blend(~((1u << existing) - 1u) & 0xffffu, logits, none);
          }
          Isa::store(logits_ + row * stride_ + unit * kLanes, logits);
        });
  }

  // The row's experts, ascending, and their shares.
  void choose(int64_t row) const {
    float* logits = logits_ + row * stride_;
    int32_t* ids = ids_ + row * r_.top_k;
    // The largest so far, best first; an equal one of higher id stands behind.
    int32_t found = 0;
    for (int32_t e = 0; e < r_.experts; ++e) {
      int32_t at = found;
      while (at > 0 && logits[e] > logits[ids[at - 1]]) --at;
      if (at == r_.top_k) continue;
      found = std::min(found + 1, r_.top_k);
      for (int32_t i = found - 1; i > at; --i) ids[i] = ids[i - 1];
      ids[at] = e;
    }
    F top = Isa::load(logits), sums = Isa::zero();
    for (int64_t i = kLanes; i < stride_; i += kLanes) top = Isa::max(top, Isa::load(logits + i));
    const F max = Isa::set1(Isa::reduce_max(top));
    for (int64_t i = 0; i < stride_; i += kLanes) {
      const F e = Math<Isa>::exp_nonpositive(Isa::sub(Isa::load(logits + i), max));
      sums = Isa::add(sums, e);
      Isa::store(logits + i, e);
    }
    const float sum = Isa::reduce_add(sums);
    // Not a number anywhere spoils the sum, hence the row; its experts only have to exist.
    if (std::isnan(sum)) {
      for (int32_t i = 0; i < r_.top_k; ++i) ids[i] = i;
    } else {
      ascend(ids, r_.top_k);
    }
    float* shares = shares_ + row * r_.top_k;
    float total = 0.0f;
    for (int32_t i = 0; i < r_.top_k; ++i) {
      shares[i] = logits[ids[i]] / sum;
      total += shares[i];
    }
    if (r_.is_renormalised != 0) {
      for (int32_t i = 0; i < r_.top_k; ++i) shares[i] /= total;
    }
  }

  static void ascend(int32_t* ids, int32_t count) {
    for (int32_t i = 1; i < count; ++i) {
      const int32_t id = ids[i];
      int32_t at = i;
      for (; at > 0 && ids[at - 1] > id; --at) ids[at] = ids[at - 1];
      ids[at] = id;
    }
  }

  // Pairs in the order of their experts, rows rising; every thread makes the list for itself.
  void group() const {
    std::fill(starts_, starts_ + r_.experts + 1, 0);
    for (int32_t i = 0; i < pairs_; ++i) ++starts_[ids_[i] + 1];
    for (int32_t e = 0; e < r_.experts; ++e) starts_[e + 1] += starts_[e];
    // Each start moves to its expert's end while it is filled, which is the next one's start: then all shift back.
    for (int32_t i = 0; i < pairs_; ++i) {
      const int32_t to = starts_[ids_[i]]++;
      pair_rows_[to] = i / r_.top_k;
      pair_shares_[to] = shares_[i];
    }
    for (int32_t e = r_.experts; e > 0; --e) starts_[e] = starts_[e - 1];
    starts_[0] = 0;
  }

  void up() const {
    const Weight& weight = context_.weights[r_.gate_up];
    const auto activation = static_cast<Activation>(r_.activation);
    const Activations a = prepare_rows<Isa>(
        prologue_of(r_, weight.layout, context_), pairs_, [this](int32_t i) { return pair_rows_[i]; }, context_);
    const int64_t units = r_.hidden / kLanes;
    each_expert([&](int32_t expert, int32_t start, int32_t count) {
      sweep_blocks<Isa, 2>(
          weight, a.from_row(start), count, SharedUnits{context_, units},
          [=](int64_t unit, int t) { return (expert * units + unit) * 2 + t; },
          [&](int64_t unit, int32_t row, int32_t num_rows, const float* const(&y)[2]) {
            float* to = gated_ + int64_t{start + row} * r_.hidden + unit * kLanes;
            Math<Isa>::with(activation, [&](auto activate) {
              for (int64_t m = 0; m < num_rows; ++m) {
                const F gate = Isa::load(y[0] + m * kLanes), up = Isa::load(y[1] + m * kLanes);
                Isa::store(to + m * r_.hidden, Isa::mul(activate(gate), up));
              }
            });
          });
    });
  }

  void down() const {
    const Weight& weight = context_.weights[r_.down];
    Prologue prologue;
    prologue.layout = weight.layout, prologue.input = gated_, prologue.k = r_.hidden;
    const Activations a = prepare_rows<Isa>(prologue, pairs_, [](int32_t i) { return i; }, context_);
    const int64_t units = r_.k / kLanes;
    float* out = context_.buffer<float>(r_.out);
    // A column's experts follow one another on one thread: a row adds them in rising order.
    SharedUnits{context_, units}.each([&](Range range) {
      each_expert([&](int32_t expert, int32_t start, int32_t count) {
        sweep<Isa, 1>(
            weight, a.from_row(start), count, OwnUnits{range}, [=](int64_t unit, int) { return expert * units + unit; },
            [&](int64_t unit, int32_t row, const F(&y)[1]) {
              float* to = out + int64_t{pair_rows_[start + row]} * r_.k + unit * kLanes;
              Isa::store(to, Isa::fma(Isa::set1(pair_shares_[start + row]), y[0], Isa::load(to)));
            });
      });
    });
  }

  template <class Fn>
  void each_expert(Fn fn) const {
    for (int32_t e = 0; e < r_.experts; ++e) {
      if (starts_[e + 1] > starts_[e]) fn(e, starts_[e], starts_[e + 1] - starts_[e]);
    }
  }

  const MoeRecord& r_;
  const ThreadContext& context_;
  const int32_t rows_, pairs_;
  const int64_t stride_;  // of logits_
  float* logits_;         // [rows][stride_], then e^(logit - largest)
  int32_t* ids_;          // [rows][top_k]
  float* shares_;         // [rows][top_k]
  float* gated_;          // [pairs][hidden]
  int32_t* starts_;       // [experts + 1]
  int32_t* pair_rows_;    // [pairs]
  float* pair_shares_;    // [pairs]
};

template <class Isa>
void op_moe(const Record& record, const ThreadContext& context) {
  const auto fields = record.as<MoeRecord>();
  Moe<Isa>(fields, context).run();
}

}  // namespace headrace
