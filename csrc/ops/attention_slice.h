// The arithmetic of attention: some queries of one kv head against one slice of positions.
//
// A slice is met in blocks of kBlockPositions. Per block: scores of all queries (q · k), then per query the block's
// largest score, e^(score - largest so far) and their sum, then the sums of values weighed by them. Per query all of it
// is the same sequence of operations whatever queries stand beside it: dimensions and positions are added one by one,
// in order, into one sum.
//
// Many queries share what a block's pages cost: sixteen columns of it are widened once into a panel in the first-level
// cache, and every tile of queries runs over that. Few queries take pages as they lie. A widened number is the same
// number, so both give the same bits.
//
// Positions that a query does not see contribute nothing, even where a page holds NaN: their scores are replaced, and
// their values are not multiplied.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include "core/limits.h"
#include "gen/opcodes.h"
#include "ops/math.h"

namespace headrace {

namespace attention {

inline constexpr int32_t kSliceTokens = 512;
inline constexpr int32_t kSlicePages = kSliceTokens / kBlockTokens;
// Positions between two looks at the maximum: fewer cost a reduction and a rescaling of the sums more often, more would
// not fit into the first-level cache with their queries.
inline constexpr int32_t kBlockPositions = 128;
inline constexpr int32_t kBlockPages = kBlockPositions / kBlockTokens;
// Queries of one item: enough to pay for the panels, few enough that what belongs to them stays in the second-level
// cache (96 × (3 × 128 + 128) × 4 B = 196 KB).
inline constexpr int32_t kItemQueries = 96;
// From so many queries on a panel pays: below, its making costs more than widening again for each tile of queries.
inline constexpr int32_t kPanelQueries = 48;
// Vectors of a panel beside each other, at most.
inline constexpr int32_t kPanelVectors = 2;

struct Span {
  int32_t start, stop;
};  // positions, half-open

// Pages of a slice, k and v of one kv head. `next` is the k page that is read after the slice, if any.
struct Pages {
  const uint8_t *k[kSlicePages], *v[kSlicePages], *next;
};

// static, not inline: translation units with different instruction sets must not share one copy.
static constexpr int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

}  // namespace attention

// Bytes of one thread's scratch. An item has at most max(kItemQueries, heads) queries, whatever the group.
static constexpr int64_t attention_scratch_bytes(const Limits& limits) {
  const int64_t queries = attention::kItemQueries > limits.max_heads ? attention::kItemQueries : limits.max_heads;
  const int64_t panel =
      limits.max_head_size > attention::kBlockPositions ? limits.max_head_size : attention::kBlockPositions;
  const int64_t floats = queries * (3 * limits.max_head_size + attention::kBlockPositions) +
                         5 * attention::round_up(queries, kLanes) + panel * attention::kPanelVectors * kLanes;
  return 4 * floats;
}

template <class Isa, bool kIsBf16>
class AttentionSlice {
  using F = typename Isa::F;
  using Span = attention::Span;
  using Element = std::conditional_t<kIsBf16, uint16_t, float>;  // of the pool
  // Where the pair product is two fused steps, a pair is split once for all queries, and their side is kept in f32.
  static constexpr bool kIsSplit = kIsBf16 && requires(const uint16_t* w) { Isa::even_bf16(w); };
  static constexpr bool kIsPaired = kIsBf16 && !kIsSplit;
  using Factor = std::conditional_t<kIsPaired, uint32_t, float>;  // a broadcast operand: bf16 pair, or f32
  using Wide = std::conditional_t<kIsPaired, uint16_t, float>;    // of a panel

  static constexpr int kPair = kIsBf16 ? 2 : 1;                 // dimensions or tokens of one unit of a page
  static constexpr int kFactors = kIsSplit ? 2 : 1;             // operands, and vectors of a panel, that a unit becomes
  static constexpr int kVector = kLanes * (kIsPaired ? 2 : 1);  // elements of Wide in a vector
  static constexpr int32_t kBlock = attention::kBlockPositions, kBlockPages = attention::kBlockPages;
  // Queries of a register tile: on AVX2 their sums take 12 of 16 registers, a vector, its mask and an operand the rest.
  static constexpr int kTile = Isa::kTileRows >= 8 ? 8 : 6;
  static constexpr int kPanelColumns = kTile >= 8 ? attention::kPanelVectors : 1;
  // Vectors of a register tile beside each other: few queries alone have too few independent sums to fill the pipes.
  static constexpr int columns(int queries) { return kTile >= 8 || queries < 4 ? 2 : 1; }
  static constexpr float kMinusInf = -std::numeric_limits<float>::infinity();

 public:
  AttentionSlice(const AttentionRecord& record, uint8_t* scratch, int32_t max_queries)
      : group_(record.heads / record.kv_heads), size_(record.head_size), scale_(record.scale), cap_(record.softcap) {
    auto* floats = reinterpret_cast<float*>(scratch);
    const auto take = [&](int64_t count) { return std::exchange(floats, floats + count); };
    panel_ = reinterpret_cast<Wide*>(take(int64_t{size_ > kBlock ? size_ : kBlock} * kPanelColumns * kLanes));
    q_ = reinterpret_cast<Factor*>(take(int64_t{max_queries} * size_));
    scores_ = take(int64_t{max_queries} * kBlock);
    sum_ = take(int64_t{max_queries} * size_);
    run_ = take(int64_t{max_queries} * size_);
    const int64_t lanes = attention::round_up(max_queries, kLanes);
    max_ = take(lanes), norm_ = take(lanes), shrink_ = take(lanes);
    run_max_ = take(lanes), run_norm_ = take(lanes);
  }

  // Of the slice computed last: largest score and sum of weights per query, [queries], and sums of values, [queries,
  // D].
  const float* max() const { return max_; }
  const float* norm() const { return norm_; }
  const float* sums() const { return sum_; }

  // Takes a query, [D], in the form that the products broadcast.
  void put_query(int32_t query, const float* from) {
    for (int32_t d = 0; d < size_; d += kLanes) {
      const F value = Isa::load(from + d);
      if constexpr (kIsPaired)
        Isa::store_bf16(reinterpret_cast<uint16_t*>(q_ + int64_t{query} * q_stride()) + d, value);
      else Isa::store(q_ + int64_t{query} * q_stride() + d, kIsSplit ? Isa::round_bf16(value) : value);
    }
  }

  // Attends to the positions of slice `part`. seen: [rows] what each row sees of it, rising from row to row.
  void attend(Span part, const Span* seen, int32_t rows, const attention::Pages& pages) {
    const int32_t queries = rows * group_;
    const int64_t floats = int64_t{queries} * size_;
    for (int32_t q = 0; q < queries; ++q) max_[q] = kMinusInf, norm_[q] = 0.0f;
    for (float *to = sum_, *end = to + floats; to < end; to += kLanes) Isa::store(to, Isa::zero());
    for (int32_t start = part.start / kBlock * kBlock; start < part.stop; start += kBlock) {
      Block block;
      const Span met = cut(block, start, seen, rows);
      if (met.start >= met.stop) continue;
      point(block, start, part, pages);
      const int32_t query = met.start * group_, count = (met.stop - met.start) * group_;
      if (count >= attention::kPanelQueries) {
        ask_for(block.v, front(block), behind(block));
        panel_scores(block, query, count);
        weigh(block, query, count);
        // What follows within the slice, or one page of the next.
        const int32_t next = page_in_slice(start) + kBlockPages, end = page_in_slice(part.stop - 1) + 1;
        if (next < end) ask_for(pages.k, next, end < next + kBlockPages ? end : next + kBlockPages);
        else ask_for(block.v, behind(block), behind(block) + 1);
        panel_values(block, query, count);
      } else {
        each_tile(query, count, [&]<int M>(int32_t at) { scores<M>(block, at); });
        weigh(block, query, count);
        each_tile(query, count, [&]<int M>(int32_t at) { page_values<M>(block, at); });
      }
    }
  }

  // Adds a slice to the running result of the queries.
  void merge(int32_t queries, bool is_first, const float* max, const float* norm, const float* sums) {
    if (is_first) {
      for (int32_t q = 0; q < queries; ++q) run_max_[q] = max[q], run_norm_[q] = norm[q];
      float* run = run_;
      const int64_t floats = int64_t{queries} * size_;
      for (int64_t i = 0; i < floats; i += kLanes) Isa::store(run + i, Isa::load(sums + i));
      return;
    }
    const int32_t size = size_;
    for (int32_t first = 0; first < queries; first += kLanes) {
      const int32_t count = queries - first < kLanes ? queries - first : kLanes;
      const F old = Isa::load_n(run_max_ + first, count), add = Isa::load_n(max + first, count);
      const F now = Isa::select(add, old, add, old);
      float before[kLanes], after[kLanes], top[kLanes];
      Isa::store(before, Math<Isa>::exp_weight(Isa::sub(old, now)));
      Isa::store(after, Math<Isa>::exp_weight(Isa::sub(add, now)));
      Isa::store(top, now);
      for (int32_t l = 0; l < count; ++l) {
        const int32_t q = first + l;
        // A row of a tile may see nothing of a slice that another row sees: as if it were not there.
        if (norm[q] == 0.0f && max[q] == kMinusInf) continue;
        float* run = run_ + int64_t{q} * size_;
        const float* from = sums + int64_t{q} * size_;
        if (run_norm_[q] == 0.0f && run_max_[q] == kMinusInf) {
          run_max_[q] = max[q], run_norm_[q] = norm[q];
          for (int32_t d = 0; d < size_; d += kLanes) Isa::store(run + d, Isa::load(from + d));
          continue;
        }
        run_max_[q] = top[l];
        run_norm_[q] = __builtin_fmaf(norm[q], after[l], run_norm_[q] * before[l]);
        const F a = Isa::set1(before[l]), b = Isa::set1(after[l]);
        for (int32_t d = 0; d < size; d += kLanes)
          Isa::store(run + d, Isa::fma(Isa::load(from + d), b, Isa::mul(Isa::load(run + d), a)));
      }
    }
  }

  // Writes the running result of a query, [D].
  void finish(int32_t query, float* to) const {
    const F factor = Isa::set1(1.0f / run_norm_[query]);
    const float* from = run_ + int64_t{query} * size_;
    for (int32_t d = 0, size = size_; d < size; d += kLanes) Isa::store(to + d, Isa::mul(Isa::load(from + d), factor));
  }

 private:
  // Positions of a block count from its start.
  struct Block {
    Span all;                            // what any of its queries sees
    bool is_ragged;                      // whether some see less
    Span seen[attention::kItemQueries];  // by row
    // Its pages, and behind them the page that is read next: k of the block is followed by v, that by k of another.
    const Element *k[kBlockPages + 1], *v[kBlockPages + 1];
  };

  static int32_t front(const Block& block) { return block.all.start / kBlockTokens; }  // its first page
  static int32_t behind(const Block& block) { return (block.all.stop - 1) / kBlockTokens + 1; }
  static int32_t page_in_slice(int32_t position) { return position % attention::kSliceTokens / kBlockTokens; }

  // Says what the block that begins at `start` shows to whom; returns the rows that see any of it.
  static Span cut(Block& block, int32_t start, const Span* seen, int32_t rows) {
    block.all = {kBlock, 0};
    Span met{0, 0};
    for (int32_t row = 0; row < rows; ++row) {
      Span& span = block.seen[row];
      span = {seen[row].start > start ? seen[row].start - start : 0,
              seen[row].stop - start < kBlock ? seen[row].stop - start : kBlock};
      if (span.start >= span.stop) continue;
      if (met.stop == 0) met.start = row;
      met.stop = row + 1;
      if (span.start < block.all.start) block.all.start = span.start;
      if (span.stop > block.all.stop) block.all.stop = span.stop;
    }
    block.is_ragged = false;
    for (int32_t row = met.start; row < met.stop; ++row)
      block.is_ragged |= block.seen[row].start != block.all.start || block.seen[row].stop != block.all.stop;
    return met;
  }
  // Finds the block's pages.
  static void point(Block& block, int32_t start, Span part, const attention::Pages& pages) {
    const int32_t page = page_in_slice(start), first = front(block), stop = behind(block);
    for (int32_t i = first; i < stop; ++i) {
      block.k[i] = reinterpret_cast<const Element*>(pages.k[page + i]);
      block.v[i] = reinterpret_cast<const Element*>(pages.v[page + i]);
    }
    const uint8_t* next = start + kBlock >= part.stop ? pages.next : pages.k[page + kBlockPages];
    block.k[stop] = block.v[first];
    block.v[stop] = next != nullptr ? reinterpret_cast<const Element*>(next) : block.k[first];
  }

  // Asks for pages that are read after the arithmetic which follows. The processor guesses what is read next within
  // 4 KB at most, and a page is seldom larger.
  template <class T>
  void ask_for(const T* const* pages, int32_t start, int32_t stop) const {
    const int64_t bytes = int64_t{kBlockTokens} * size_ * static_cast<int64_t>(sizeof(Element));
    for (int32_t page = start; page < stop; ++page)
      for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(reinterpret_cast<const uint8_t*>(pages[page]) + at);
  }
  // Asks for what stands in the next page where this one is read: C vectors.
  template <int C>
  [[gnu::always_inline]] static inline void ask_for_like(const Element* next) {
    constexpr int kBytes = C * kLanes * kPair * static_cast<int>(sizeof(Element));
    unrolled<(kBytes + 63) / 64>([&]<int i>() __attribute__((always_inline)) {
      __builtin_prefetch(reinterpret_cast<const uint8_t*>(next) + 64 * i);
    });
  }

  int32_t q_stride() const { return kIsPaired ? size_ / 2 : size_; }  // operands of a query
  int32_t q_steps() const { return size_ / kPair * kFactors; }

  // Calls fn<M>(query) for tiles of M queries; two halves rather than a full tile and a few queries.
  template <typename Fn>
  [[gnu::always_inline]] static inline void each_tile(int32_t query, int32_t count, Fn fn) {
    for (const int32_t stop = query + count; query < stop;) {
      const int32_t left = stop - query;
      const int32_t tile = left <= kTile ? left : left < 2 * kTile ? (left + 1) / 2 : kTile;
      switch (tile) {
        case 1: fn.template operator()<1>(query); break;
        case 2: fn.template operator()<2>(query); break;
        case 3: fn.template operator()<3>(query); break;
        case 4: fn.template operator()<4>(query); break;
        case 5: fn.template operator()<5>(query); break;
        case 6: fn.template operator()<6>(query); break;
        default:
          if constexpr (kTile >= 8) {
            if (tile == 7) fn.template operator()<7>(query);
            else fn.template operator()<8>(query);
          }
      }
      query += tile;
    }
  }

  // --- products ------------------------------------------------------------------------------------------------------

  // Calls fn<0>() … fn<N - 1>(): loops that index sums by constants only, or gcc keeps them in memory.
  template <int N, class Fn>
  [[gnu::always_inline]] static inline void unrolled(Fn fn) {
    [&]<int... I>(std::integer_sequence<int, I...>)
        __attribute__((always_inline)) { (fn.template operator()<I>(), ...); }(std::make_integer_sequence<int, N>{});
  }
  template <int N>
  [[gnu::always_inline]] static inline void clear(F (&acc)[N]) {
    unrolled<N>([&]<int i>() __attribute__((always_inline)) { acc[i] = Isa::zero(); });
  }
  // Stores acc[column][query], queries `stride` apart.
  template <int M, int C>
  [[gnu::always_inline]] static inline void put(const F (&acc)[C * M], float* to, int64_t stride) {
    unrolled<C * M>([&]<int i>()
                        __attribute__((always_inline)) { Isa::store(to + i % M * stride + i / M * kLanes, acc[i]); });
  }
  // acc[0 … M - 1] += a vector times each query's operand, queries `stride` apart.
  template <int M>
  [[gnu::always_inline]] static inline void add_vector(F* sums, F values, const float* x, int64_t stride) {
    unrolled<M>([&]<int m>()
                    __attribute__((always_inline)) { Isa::accumulate(sums[m], values, Isa::set1(x[m * stride])); });
  }
  template <int M>
  [[gnu::always_inline]] static inline void add_pairs(F* sums, const uint16_t* w, const uint32_t* x, int64_t stride) {
    unrolled<M>([&]<int m>() __attribute__((always_inline)) {
      uint32_t pair;  // the memory was written as bf16
      std::memcpy(&pair, x + m * stride, sizeof pair);
      sums[m] = Isa::dot_bf16(sums[m], w, pair);
    });
  }
  template <int M>
  [[gnu::always_inline]] static inline void add_wide(F* sums, const Wide* w, const Factor* x, int64_t stride) {
    if constexpr (kIsPaired) add_pairs<M>(sums, w, x, stride);
    else add_vector<M>(sums, Isa::load(w), x, stride);
  }
  // acc[column][query] += a vector of units at w times each query's operands, queries `stride` apart.
  template <int M, int C>
  [[gnu::always_inline]] static inline void add_unit(F (&acc)[C * M], const Element* w, const Factor* x,
                                                     int64_t stride) {
    unrolled<C>([&]<int c>() __attribute__((always_inline)) {
      const Element* column = w + c * kLanes * kPair;
      // The operands are loaded anew for each column: kept, they would push sums out of the registers.
      if (c > 0) asm("" : "+r"(x));
      if constexpr (kIsSplit) {
        add_vector<M>(acc + c * M, Isa::even_bf16(column), x, stride);
        add_vector<M>(acc + c * M, Isa::odd_bf16(column), x + 1, stride);
      } else {
        add_wide<M>(acc + c * M, column, x, stride);
      }
    });
  }
  // acc += `steps` vectors of a panel of C columns.
  template <int M, int C>
  [[gnu::always_inline]] static inline void add_panel(F (&acc)[C * M], const Wide* w, int32_t steps, const Factor* x,
                                                      int64_t stride) {
    for (int32_t step = 0; step < steps; ++step, ++x, w += C * kVector)
      unrolled<C>([&]<int c>()
                      __attribute__((always_inline)) { add_wide<M>(acc + c * M, w + c * kVector, x, stride); });
  }

  // Widens `units` units of kPanelColumns columns, `stride` elements apart, to a panel; gives its end.
  static Wide* widen(const Element* from, int64_t stride, int32_t units, Wide* to) {
    for (int32_t unit = 0; unit < units; ++unit, from += stride, to += kFactors * kPanelColumns * kVector)
#pragma GCC unroll 2
      for (int c = 0; c < kPanelColumns; ++c) {
        const Element* w = from + c * kLanes * kPair;
        if constexpr (kIsSplit) {
          Isa::store(to + c * kVector, Isa::even_bf16(w));
          Isa::store(to + (kPanelColumns + c) * kVector, Isa::odd_bf16(w));
        } else {
          std::memcpy(to + c * kVector, w, kVector * sizeof(Wide));
        }
      }
    return to;
  }

  // --- q · k, to scores_ ---------------------------------------------------------------------------------------------
  // The product loops stand in functions of their own, so that their sums are registers.

  void panel_scores(const Block& block, int32_t query, int32_t count) {
    constexpr int32_t kWidth = kPanelColumns * kLanes;
    for (int32_t at = block.all.start / kWidth * kWidth; at < block.all.stop; at += kWidth) {
      const Element* k = block.k[at / kBlockTokens] + at % kBlockTokens * kPair;
      widen(k, kBlockTokens * kPair, size_ / kPair, panel_);
      each_tile(query, count, [&]<int M>(int32_t tile) { panel_score<M>(tile, at); });
    }
  }
  template <int M>
  [[gnu::noinline]] void panel_score(int32_t query, int32_t at) {
    F acc[kPanelColumns * M];
    clear(acc);
    add_panel<M, kPanelColumns>(acc, panel_, q_steps(), q_ + int64_t{query} * q_stride(), q_stride());
    put<M, kPanelColumns>(acc, scores_ + int64_t{query} * kBlock + at, kBlock);
  }

  template <int M>
  [[gnu::noinline]] void scores(const Block& block, int32_t query) {
    constexpr int kColumns = columns(M);
    const int32_t stride = q_stride(), units = size_ / kPair;
    const Factor* q = q_ + int64_t{query} * stride;
    constexpr int32_t kWidth = kColumns * kLanes;
    for (int32_t at = block.all.start / kWidth * kWidth; at < block.all.stop; at += kWidth) {
      F acc[kColumns * M];
      clear(acc);
      const int32_t page = at / kBlockTokens, column = at % kBlockTokens * kPair;
      const Element *w = block.k[page] + column, *next = block.k[page + 1] + column;
      for (int32_t unit = 0; unit < units; ++unit, w += kBlockTokens * kPair, next += kBlockTokens * kPair) {
        ask_for_like<kColumns>(next);
        add_unit<M, kColumns>(acc, w, q + unit * kFactors, stride);
      }
      put<M, kColumns>(acc, scores_ + int64_t{query} * kBlock + at, kBlock);
    }
  }

  // --- softmax: scores_ become weights, in the form that the products broadcast
  // ---------------------------------------

  // Puts `other` into the lanes of the vector at `at` that lie outside the span.
  [[gnu::always_inline]] static inline void hide(F& value, Span span, int32_t at, float other) {
    if (at >= span.start && at + kLanes <= span.stop) return;
    const int32_t from = span.start > at ? span.start - at : 0, to = span.stop - at < kLanes ? span.stop - at : kLanes;
    value = Isa::blend(((1u << to) - 1u) & (~0u << from), Isa::set1(other), value);
  }
  // Sixteen queries at a time: all largest scores first, so that exponentials need not wait for one.
  void weigh(const Block& block, int32_t first, int32_t count) {
    for (int32_t at = first; at < first + count; at += kLanes) {
      const int32_t n = first + count - at < kLanes ? first + count - at : kLanes;
      if (cap_ > 0.0f) weigh_some<true>(block, at, n);
      else weigh_some<false>(block, at, n);
    }
  }
  template <bool kIsCapped>
  [[gnu::noinline]] void weigh_some(const Block& block, int32_t query, int32_t count) {
    float highest[kLanes] = {}, shift[kLanes], added[kLanes] = {};
    const auto each = [&](auto fn) __attribute__((always_inline)) {
      float* s = scores_ + int64_t{query} * kBlock;
      constexpr Span kWhole{0, kBlock};
      const bool is_whole = !block.is_ragged && block.all.start == 0 && block.all.stop == kBlock;
      for (int32_t q = 0; q < count; ++q, s += kBlock)
        if (is_whole) fn(q, s, kWhole);
        else fn(q, s, block.seen[(query + q) / group_]);
    };
    each([&](int32_t q, float* s, Span span)
             __attribute__((always_inline)) { highest[q] = largest<kIsCapped>(s, span); });
    const float scale = kIsCapped ? 1.0f : scale_;
    const F high = Isa::mul(Isa::load(highest), Isa::set1(scale)), old = Isa::load_n(max_ + query, count);
    const F now = Isa::select(high, old, high, old);
    Isa::store(shift, Isa::sub(Isa::zero(), now));
    each([&](int32_t q, float* s, Span span)
             __attribute__((always_inline)) { added[q] = weights_of(s, span, scale, shift[q]); });
    // Old sums shrink by e^(old maximum - new maximum): 1 when it stays, nothing is there on a slice's first block.
    const F shrink = Math<Isa>::exp_weight(Isa::sub(old, now));
    Isa::store_n(max_ + query, now, count);
    Isa::store_n(shrink_ + query, shrink, count);
    Isa::store_n(norm_ + query, Isa::fma(Isa::load_n(norm_ + query, count), shrink, Isa::load(added)), count);
  }
  // The largest of a query's scores, which are capped first if they are to be.
  template <bool kIsCapped>
  [[gnu::always_inline]] inline float largest(float* s, Span span) const {
    F top = Isa::set1(kMinusInf);
    for (int32_t at = span.start / kLanes * kLanes; at < span.stop; at += kLanes) {
      F value = Isa::load(s + at);
      if (kIsCapped) {
        value = Math<Isa>::soft_cap(Isa::mul(value, Isa::set1(scale_)), cap_);
        Isa::store(s + at, value);
      }
      hide(value, span, at, kMinusInf);
      top = Isa::max(top, value);
    }
    return Isa::reduce_max(top);
  }
  // Makes weights e^(s · scale + shift) of a query's scores; returns their sum.
  [[gnu::always_inline]] static inline float weights_of(float* s, Span span, float scale, float shift) {
    F sum = Isa::zero();
    for (int32_t at = span.start / kLanes * kLanes; at < span.stop; at += kLanes) {
      F p = Math<Isa>::exp_weight(Isa::fma(Isa::load(s + at), Isa::set1(scale), Isa::set1(shift)));
      hide(p, span, at, 0.0f);
      sum = Isa::add(sum, p);
      if constexpr (kIsPaired)
        Isa::store_bf16(reinterpret_cast<uint16_t*>(s) + at, p);  // behind what is yet to be read
      else Isa::store(s + at, kIsSplit ? Isa::round_bf16(p) : p);
    }
    return Isa::reduce_add(sum);
  }

  // --- sum_ = sum_ · shrink + Σ over the visible positions of p · v
  // ----------------------------------------------------

  // Where values come from; tokens count from the block's start.
  struct FromPages {
    const AttentionSlice& slice;
    const Block& block;
    int32_t d;

    int64_t offset(int32_t at) const { return (int64_t{at % kBlockTokens / kPair} * slice.size_ + d) * kPair; }
    const Element* unit(int32_t at) const { return block.v[at / kBlockTokens] + offset(at); }
    template <int M, int C>
    [[gnu::always_inline]] inline void add(F (&acc)[C * M], Span tokens, const Factor* p) const {
      const int64_t stride = int64_t{slice.size_} * kPair;
      for (int32_t at = tokens.start; at < tokens.stop;) {
        const Element* v = unit(at);
        if (is_half(at, tokens.stop)) {
          add_half<M, C>(acc, v, at, p);
          ++at;
          continue;
        }
        const int32_t page = at / kBlockTokens, page_stop = (page + 1) * kBlockTokens;
        const int32_t stop = page_stop < tokens.stop ? page_stop : tokens.stop / kPair * kPair;
        const Element* next = block.v[page + 1] + offset(at);
        for (; at < stop; at += kPair, v += stride, next += stride) {
          ask_for_like<C>(next);
          add_unit<M, C>(acc, v, p + at / kPair * kFactors, kBlock);
        }
      }
    }
  };
  struct FromPanel {
    const Wide* panel;
    int32_t first;  // token that it starts with

    template <int M, int C>
    [[gnu::always_inline]] inline void add(F (&acc)[C * M], Span tokens, const Factor* p) const {
      if constexpr (!kIsPaired) {  // a vector for each token
        add_panel<M, C>(acc, panel + int64_t{tokens.start - first} * C * kVector, tokens.stop - tokens.start,
                        p + tokens.start, kBlock);
      } else {
        int32_t at = tokens.start;
        const auto half = [&] {
          if (at < tokens.stop && is_half(at, tokens.stop)) add_half<M, C>(acc, unit<C>(at), at, p), ++at;
        };
        half();
        if (at < tokens.stop / kPair * kPair) {
          add_panel<M, C>(acc, unit<C>(at), tokens.stop / kPair - at / kPair, p + at / kPair, kBlock);
          at = tokens.stop / kPair * kPair;
        }
        half();
      }
    }
    template <int C>
    const Wide* unit(int32_t at) const {
      return panel + int64_t{(at - first) / kPair} * C * kVector;
    }
  };

  // Whether only one token of a pair is to be added.
  static bool is_half(int32_t at, int32_t stop) { return kPair == 2 && (at % 2 != 0 || at + 1 == stop); }
  template <int M, int C>
  [[gnu::always_inline]] static inline void add_half(F (&acc)[C * M], const Element* v, int32_t at, const Factor* p) {
    for (int c = 0; c < C; ++c, v += kLanes * kPair) {
      if constexpr (kIsSplit) {
        const F value = at % 2 != 0 ? Isa::odd_bf16(v) : Isa::even_bf16(v);
        for (int m = 0; m < M; ++m) acc[c * M + m] = Isa::fma(value, Isa::set1(p[at + m * kBlock]), acc[c * M + m]);
      } else if constexpr (kIsPaired) {
        uint16_t pairs[kLanes * kPair];  // the other token's half replaced by zeros: it is never multiplied
        for (int i = 0; i < kLanes * kPair; ++i) pairs[i] = i % 2 == at % 2 ? v[i] : uint16_t{0};
        add_pairs<M>(acc + c * M, pairs, p + at / kPair, kBlock);
      }
    }
  }

  void panel_values(const Block& block, int32_t query, int32_t count) {
    const int32_t first = block.all.start / kPair * kPair;
    for (int32_t d = 0; d < size_; d += kPanelColumns * kLanes) {
      const FromPages pages{*this, block, d};
      Wide* to = panel_;
      for (int32_t at = first; at < block.all.stop;) {
        const int32_t page_stop = (at / kBlockTokens + 1) * kBlockTokens;
        const int32_t stop = page_stop < block.all.stop ? page_stop : block.all.stop;
        to = widen(pages.unit(at), int64_t{size_} * kPair, (stop - at + kPair - 1) / kPair, to);
        at = stop;
      }
      const FromPanel panel{panel_, first};
      each_tile(query, count, [&]<int M>(int32_t at) { tile_values<M, kPanelColumns>(block, at, d, panel); });
    }
  }
  template <int M>
  void page_values(const Block& block, int32_t query) {
    constexpr int kColumns = columns(M);
    for (int32_t d = 0; d < size_; d += kColumns * kLanes)
      tile_values<M, kColumns>(block, query, d, FromPages{*this, block, d});
  }

  template <int M, int C, class From>
  [[gnu::noinline]] void tile_values(const Block& block, int32_t query, int32_t d, const From& from) {
    // What all queries of the tile see; what only some see is added to each alone, before and behind.
    Span same = block.is_ragged ? block.seen[query / group_] : block.all;
    bool is_ragged = false;
    for (int m = 1; m < M && block.is_ragged; ++m) {
      const Span span = block.seen[(query + m) / group_];
      is_ragged |= span.start != same.start || span.stop != same.stop;
      if (span.start > same.start) same.start = span.start;
      if (span.stop < same.stop) same.stop = span.stop;
    }
    float shrink[M];
    for (int m = 0; m < M; ++m) shrink[m] = shrink_[query + m];
    if (M > 1 && is_ragged) {
      // Pairs stay whole: their two products are one operation.
      same.start = (same.start + kPair - 1) / kPair * kPair, same.stop = same.stop / kPair * kPair;
      if (same.stop < same.start) same.stop = same.start;
      for (int m = 0; m < M; ++m) {
        const Span span = block.seen[(query + m) / group_];
        const Span before{span.start, span.stop < same.start ? span.stop : same.start};
        if (before.start >= before.stop) continue;
        add_alone<C>(query + m, d, from, before, shrink[m]);
        shrink[m] = 1.0f;
      }
    }
    float* sums = sum_ + int64_t{query} * size_ + d;
    F acc[C * M];
    unrolled<C * M>([&]<int i>() __attribute__((always_inline)) {
      acc[i] = Isa::mul(Isa::load(sums + int64_t{i % M} * size_ + i / M * kLanes), Isa::set1(shrink[i % M]));
    });
    from.template add<M, C>(acc, same, weights(query));
    put<M, C>(acc, sums, size_);
    if (M > 1 && is_ragged)
      for (int m = 0; m < M; ++m) {
        const Span span = block.seen[(query + m) / group_];
        const Span behind{span.start > same.stop ? span.start : same.stop, span.stop};
        if (behind.start < behind.stop) add_alone<C>(query + m, d, from, behind, 1.0f);
      }
  }
  template <int C, class From>
  [[gnu::noinline]] void add_alone(int32_t query, int32_t d, const From& from, Span tokens, float shrink) {
    float* sums = sum_ + int64_t{query} * size_ + d;
    F acc[C];
    unrolled<C>([&]<int c>() __attribute__((always_inline)) {
      acc[c] = Isa::mul(Isa::load(sums + c * kLanes), Isa::set1(shrink));
    });
    from.template add<1, C>(acc, tokens, weights(query));
    put<1, C>(acc, sums, size_);
  }

  const Factor* weights(int32_t query) const {
    return reinterpret_cast<const Factor*>(scores_ + int64_t{query} * kBlock);
  }

  const int32_t group_, size_;
  const float scale_, cap_;
  // Queries are ordered by row, then head of the group.
  Wide* panel_;                 // [units][kPanelColumns] vectors
  Factor* q_;                   // [queries, q_stride()]
  float* scores_;               // [queries, kBlock], then weights
  float* sum_;                  // [queries, D] of the slice
  float* run_;                  // [queries, D] of the slices so far
  float *max_, *norm_;          // [queries] of the slice
  float* shrink_;               // [queries] of the block: e^(change of the maximum)
  float *run_max_, *run_norm_;  // [queries] of the slices so far
};

}  // namespace headrace
