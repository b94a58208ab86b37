// Attention of a ragged batch over pages: those of the KV pool, or the step's own (encoders).
//
// Work is cut into items: one kv head of one sequence and a tile of its rows. All query heads of that kv head and all
// rows of the tile ("queries") share each read of a page. Per query the positions are cut into fixed slices of
// kSliceTokens; inside a slice an online softmax goes over the pages, and slices are merged in order. Every step of a
// query depends on nothing but the query and its visible positions, so a row has the same bits whatever the tile
// height, the chunking of its prompt, its batch mates and the number of threads. When few long items would leave
// threads idle, items of one row are divided between threads at slice borders, which changes who computes a slice and
// nothing else.
//
// Positions that a query does not see contribute nothing, even when the page holds NaN there: their scores are
// replaced, and their values are not multiplied.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "core/limits.h"
#include "core/pool.h"
#include "core/step.h"
#include "ops/math.h"

namespace headrace {

namespace attention {

inline constexpr int32_t kSliceTokens = 512;
inline constexpr int32_t kSlicePages = kSliceTokens / kBlockTokens;
// Queries of one item: enough to pay for the page reads, few enough that their accumulators stay in the second-level
// cache (48 × 128 × 4 B × 3 arrays = 74 KB).
inline constexpr int32_t kItemQueries = 48;
// Slices that all split items of a step may hand over, per thread: 256 are 131,072 positions. Beyond, nothing is split.
inline constexpr int32_t kHandedSlices = 256;

// static, not inline: translation units with different instruction sets must not share one copy.
static constexpr int32_t tile_rows(int32_t group) { return group < kItemQueries ? kItemQueries / group : 1; }
static constexpr int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }
// Floats of one handed-over slice: per query head maximum and sum, then the accumulators.
static constexpr int64_t partial_floats(int32_t group, int32_t head_size) {
  return round_up(2 * int64_t{group}, kLanes) + int64_t{group} * head_size;
}

}  // namespace attention

// Bytes of one thread's scratch. An item has at most max(kItemQueries, heads) queries, whatever the group.
static constexpr int64_t attention_scratch_bytes(const Limits& limits) {
  const int64_t queries = attention::kItemQueries > limits.max_heads ? attention::kItemQueries : limits.max_heads;
  const int64_t floats = queries * (3 * limits.max_head_size + kBlockTokens) +
                         4 * attention::round_up(queries, kLanes) + 2 * limits.max_head_size;
  return 4 * floats;
}

// Bytes of the scratch that the threads share. With less (layers of unlike shapes), nothing is split.
static constexpr int64_t attention_shared_bytes(const Limits& limits) {
  if (limits.max_kv_heads == 0) return 0;
  const int64_t slices = limits.max_positions / attention::kSliceTokens + 1;
  const int64_t handed = slices < attention::kHandedSlices ? slices : attention::kHandedSlices;
  return (limits.threads - 1) * handed * 4 *
         attention::partial_floats(limits.max_heads / limits.max_kv_heads, limits.max_head_size);
}

template <class Isa, bool kIsBf16>
class Attention {
  using F = typename Isa::F;
  using Element = std::conditional_t<kIsBf16, uint16_t, float>;  // of the pool
  // Where the pair product is two fused steps, a pair is split once for all queries, and their side is kept in f32.
  static constexpr bool kIsSplit = kIsBf16 && requires(const uint16_t* w) { Isa::even_bf16(w); };
  using Factor = std::conditional_t<kIsBf16 && !kIsSplit, uint32_t, float>;  // a broadcast operand: bf16 pair, or f32

  static constexpr int kPair = kIsBf16 ? 2 : 1;                          // dimensions or tokens of one product
  static constexpr int kFactors = kIsSplit ? 2 : 1;                      // its operands per query
  static constexpr int kTokenFactors = kBlockTokens / kPair * kFactors;  // operands per query of a page
  // Queries of a register tile, one vector each: on AVX2 8 of 16 registers, beside 4 for a split pair.
  static constexpr int kTile = Isa::kTileRows >= 8 ? 8 : 4;
  // Vectors of a register tile beside each other: few queries alone have too few independent sums to fill the pipes.
  static constexpr int columns(int queries) { return kTile >= 8 || queries < 4 ? 2 : 1; }
  static constexpr float kMinusInf = -std::numeric_limits<float>::infinity();

  struct Span {
    int32_t start, stop;
  };  // positions, half-open

  // What an item is and where its queries stand.
  struct Item {
    int32_t seq, head, row, rows, position;  // position of the first row
  };

 public:
  Attention(const AttentionRecord& record, const ThreadContext& context)
      : record_(record),
        context_(context),
        step_(*context.step),
        pages_(context, record.layer),
        group_(record.heads / record.kv_heads),
        size_(record.head_size),
        tile_rows_(attention::tile_rows(group_)) {
    const int64_t queries = int64_t{tile_rows_} * group_;
    auto* floats = reinterpret_cast<float*>(context.scratch);
    q_ = reinterpret_cast<Factor*>(floats);
    floats += queries * size_;
    sum_ = floats, floats += queries * size_;
    run_ = floats, floats += queries * size_;
    weights_ = reinterpret_cast<Factor*>(floats), floats += queries * kBlockTokens;
    const int64_t lanes = attention::round_up(queries, kLanes);
    max_ = floats, floats += lanes;
    norm_ = floats, floats += lanes;
    run_max_ = floats, floats += lanes;
    run_norm_ = floats, floats += lanes;
    edges_ = reinterpret_cast<uint16_t*>(floats);
  }

  void run() {
    const Plan plan = make_plan();
    if (plan.total == 0) return;
    walk(plan);
    if (plan.handed == 0) return;
    context_.barrier->wait();
    finish_held();
  }

 private:
  // --- who does what -------------------------------------------------------------------------------------------------

  struct Plan {
    int64_t total = 0;      // cost of the step
    bool is_split = false;  // items of one row are divided at slice borders
    int64_t handed = 0;     // slices that pass through shared scratch
  };

  Span visible(int32_t seq, int32_t position) const {
    if (record_.is_bidirectional != 0) {
      const auto at = static_cast<size_t>(seq);
      const int32_t rows = step_.seq_starts[at + 1] - step_.seq_starts[at];
      const int32_t reach = record_.window > 0 && record_.window < rows ? record_.window : rows;
      return {position > reach ? position - reach : 0, position + reach + 1 < rows ? position + reach + 1 : rows};
    }
    const int32_t start = record_.window > 0 && position >= record_.window ? position - record_.window + 1 : 0;
    return {start, position + 1};
  }
  // Cost of an item or slice: pages times queries, and a constant for its set-up.
  int64_t cost(Span span, int32_t rows) const {
    const int32_t pages = (span.stop + kBlockTokens - 1) / kBlockTokens - span.start / kBlockTokens;
    return int64_t{pages + 2} * rows;
  }
  Span slice_of(Span span, int32_t slice) const {
    const int32_t start = slice * attention::kSliceTokens, stop = start + attention::kSliceTokens;
    return {start > span.start ? start : span.start, stop < span.stop ? stop : span.stop};
  }
  static int32_t first_slice(Span span) { return span.start / attention::kSliceTokens; }
  static int32_t last_slice(Span span) { return (span.stop - 1) / attention::kSliceTokens; }

  // Calls fn(item, span of positions its rows see) for each item, in the order that all threads agree on.
  template <typename Fn>
  void each_item(Fn fn) const {
    for (int32_t seq = 0; seq < step_.sequences(); ++seq) {
      const int32_t start = step_.seq_starts[static_cast<size_t>(seq)];
      const int32_t stop = step_.seq_starts[static_cast<size_t>(seq) + 1];
      for (int32_t head = 0; head < record_.kv_heads; ++head)
        for (int32_t row = start; row < stop; row += tile_rows_) {
          const int32_t rows = stop - row < tile_rows_ ? stop - row : tile_rows_;
          const int32_t position = step_.positions[static_cast<size_t>(row)];
          const Span span{visible(seq, position).start, visible(seq, position + rows - 1).stop};
          fn(Item{seq, head, row, rows, position}, span);
        }
    }
  }

  // The thread whose share of the total cost holds the middle of this piece of work.
  int32_t owner(int64_t before, int64_t piece, int64_t total) const {
    return static_cast<int32_t>((before + piece / 2) * context_.threads / total);
  }

  // Calls fn(slice, span, owner) for the slices of a divided item; `before` is the cost of all earlier work.
  template <typename Fn>
  void each_slice(Span span, int64_t before, int64_t total, Fn fn) const {
    for (int32_t slice = first_slice(span); slice <= last_slice(span); ++slice) {
      const Span part = slice_of(span, slice);
      const int64_t piece = cost(part, 1);
      fn(slice, part, owner(before, piece, total));
      before += piece;
    }
  }
  int64_t divided_cost(Span span) const {
    int64_t sum = 0;
    for (int32_t slice = first_slice(span); slice <= last_slice(span); ++slice) sum += cost(slice_of(span, slice), 1);
    return sum;
  }

  Plan make_plan() const {
    Plan plan;
    int64_t longest = 0;
    each_item([&](const Item& item, Span span) {
      const int64_t piece = cost(span, item.rows);
      plan.total += piece;
      if (item.rows == 1 && last_slice(span) > first_slice(span) && piece > longest) longest = piece;
    });
    // Dividing costs a barrier: only where one item is more than an eighth of a thread's share.
    if (context_.threads == 1 || longest * 8 * context_.threads <= plan.total) return plan;
    Plan split{0, true, 0};
    each_item([&](const Item& item, Span span) {
      split.total += item.rows == 1 ? divided_cost(span) : cost(span, item.rows);
    });
    int64_t before = 0;
    each_item([&](const Item& item, Span span) {
      if (item.rows > 1) {
        before += cost(span, item.rows);
        return;
      }
      int32_t first = -1;
      each_slice(span, before, split.total, [&](int32_t, Span, int32_t who) {
        if (first < 0) first = who;
        split.handed += who != first;
      });
      before += divided_cost(span);
    });
    const int64_t bytes = split.handed * 4 * attention::partial_floats(group_, size_);
    return bytes <= context_.shared_scratch_bytes ? split : plan;
  }

  void walk(const Plan& plan) {
    int64_t before = 0, handed = 0;
    each_item([&](const Item& item, Span span) {
      if (!plan.is_split || item.rows > 1) {
        const int64_t piece = cost(span, item.rows);
        if (owner(before, piece, plan.total) == context_.thread) whole(item, span);
        before += piece;
        return;
      }
      int32_t first = -1;
      bool is_mine = false;
      int64_t handed_here = 0;
      each_slice(span, before, plan.total, [&](int32_t slice, Span part, int32_t who) {
        if (first < 0) first = who;
        if (who == context_.thread) {
          if (!is_mine) begin(item);
          is_mine = true;
          slice_sums(item, slice, part);
          if (who == first) merge(group_, slice == first_slice(span), max_, norm_, sum_);
          else hand_over(handed);
        }
        if (who != first) ++handed, ++handed_here;
      });
      if (first == context_.thread) {
        // A thread's work is contiguous, so an item that continues elsewhere is its last: it stays in run_.
        if (handed_here == 0) finish(item);
        else held_ = item, held_start_ = handed - handed_here, held_slices_ = handed_here;
      }
      before += divided_cost(span);
    });
  }

  float* partial(int64_t index) const {
    return reinterpret_cast<float*>(context_.shared_scratch) + index * attention::partial_floats(group_, size_);
  }
  void hand_over(int64_t index) const {
    float* to = partial(index);
    for (int32_t q = 0; q < group_; ++q) to[q] = max_[q], to[group_ + q] = norm_[q];
    float* sums = to + attention::round_up(2 * group_, kLanes);
    for (int64_t i = 0; i < int64_t{group_} * size_; i += kLanes) Isa::store(sums + i, Isa::load(sum_ + i));
  }
  void finish_held() {
    if (held_slices_ == 0) return;
    for (int64_t i = 0; i < held_slices_; ++i) {
      const float* from = partial(held_start_ + i);
      merge(group_, false, from, from + group_, from + attention::round_up(2 * group_, kLanes));
    }
    finish(held_);
  }

  // --- one item ------------------------------------------------------------------------------------------------------

  void whole(const Item& item, Span span) {
    begin(item);
    for (int32_t slice = first_slice(span); slice <= last_slice(span); ++slice) {
      slice_sums(item, slice, slice_of(span, slice));
      merge(item.rows * group_, slice == first_slice(span), max_, norm_, sum_);
    }
    finish(item);
  }

  int64_t query_offset(const Item& item, int32_t query) const {
    return int64_t{item.row + query / group_} * record_.heads * size_ +
           (int64_t{item.head} * group_ + query % group_) * size_;
  }

  // Copies the queries, in the form that the products broadcast.
  void begin(const Item& item) {
    const float* q = context_.buffer<float>(record_.q);
    for (int32_t query = 0; query < item.rows * group_; ++query) {
      const float* from = q + query_offset(item, query);
      for (int32_t d = 0; d < size_; d += kLanes)
        store_factors(q_ + int64_t{query} * query_factors() + d / kPair * kFactors, Isa::load(from + d));
    }
  }
  int32_t query_factors() const { return size_ / kPair * kFactors; }
  // Sixteen operands in the form that the products broadcast.
  static void store_factors(Factor* to, F values) {
    if constexpr (kIsSplit) {
      uint16_t rounded[kLanes];
      Isa::store_bf16(rounded, values);
      Isa::store(to, Isa::load_bf16(rounded));
    } else if constexpr (kIsBf16) {
      Isa::store_bf16(reinterpret_cast<uint16_t*>(to), values);
    } else {
      Isa::store(to, values);
    }
  }

  // Positions of `part` that a query sees; empty when there are none.
  Span seen(const Item& item, int32_t query, Span part) const {
    const Span all = visible(item.seq, item.position + query / group_);
    return {all.start > part.start ? all.start : part.start, all.stop < part.stop ? all.stop : part.stop};
  }

  // Online softmax over the pages of one slice, for all queries of the item: max_, norm_ and sum_.
  void slice_sums(const Item& item, int32_t, Span part) {
    const int32_t queries = item.rows * group_;
    for (int32_t q = 0; q < queries; ++q) max_[q] = kMinusInf, norm_[q] = 0.0f;
    for (int64_t i = 0; i < int64_t{queries} * size_; i += kLanes) Isa::store(sum_ + i, Isa::zero());
    for (int32_t start = part.start / kBlockTokens * kBlockTokens; start < part.stop; start += kBlockTokens) {
      const int32_t block = pages_.block(item.seq, start / kBlockTokens);
      const auto* k = reinterpret_cast<const Element*>(pages_.k(block, item.head));
      const auto* v = reinterpret_cast<const Element*>(pages_.v(block, item.head));
      for (int32_t query = 0; query < queries;) {
        const Span span = page_span(seen(item, query, part), start);
        // Queries of a register tile see the same positions of the page.
        int32_t same = 1;
        while (query + same < queries && same < kTile + 2) {
          const Span next = page_span(seen(item, query + same, part), start);
          if (next.start != span.start || next.stop != span.stop) break;
          ++same;
        }
        // Two halves rather than a full tile and a lone query.
        const int32_t count = same <= kTile ? same : same == kTile + 1 ? (kTile + 1) / 2 : kTile;
        if (span.start < span.stop) page_of(count, query, span, k, v);
        query += count;
      }
    }
  }
  static Span page_span(Span span, int32_t start) {
    const int32_t from = span.start - start, to = span.stop - start;
    return {from > 0 ? from : 0, to < kBlockTokens ? to : kBlockTokens};
  }

  void page_of(int32_t count, int32_t query, Span span, const Element* k, const Element* v) {
    switch (count) {
      case 1: return page<1>(query, span, k, v);
      case 2: return page<2>(query, span, k, v);
      case 3: return page<3>(query, span, k, v);
      case 4: return page<4>(query, span, k, v);
      default:
        if constexpr (kTile >= 8) {
          switch (count) {
            case 5: return page<5>(query, span, k, v);
            case 6: return page<6>(query, span, k, v);
            case 7: return page<7>(query, span, k, v);
            default: return page<8>(query, span, k, v);
          }
        }
    }
  }

  template <int M>
  void page(int32_t query, Span span, const Element* k, const Element* v) {
    alignas(64) float raw[M * kBlockTokens];
    scores<M>(query, k, raw);
    const uint32_t mask = (span.stop == 32 ? ~0u : (1u << span.stop) - 1u) & (~0u << span.start);
    float change[kLanes] = {}, sums[M];
    const F scale = Isa::set1(record_.scale), none = Isa::set1(kMinusInf);
    for (int m = 0; m < M; ++m) {
      F s0 = Isa::mul(Isa::load(raw + m * kBlockTokens), scale);
      F s1 = Isa::mul(Isa::load(raw + m * kBlockTokens + kLanes), scale);
      if (record_.softcap > 0.0f) {
        s0 = Math<Isa>::soft_cap(s0, record_.softcap);
        s1 = Math<Isa>::soft_cap(s1, record_.softcap);
      }
      if (mask != ~0u) s0 = Isa::blend(mask & 0xffffu, none, s0), s1 = Isa::blend(mask >> 16, none, s1);
      const float top = Isa::reduce_max(Isa::max(s0, s1));
      const float old = max_[query + m];
      const float now = top > old ? top : old;
      max_[query + m] = now;
      change[m] = old - now;
      const F shift = Isa::set1(now);
      F p0 = Math<Isa>::exp_nonpositive(Isa::sub(s0, shift)), p1 = Math<Isa>::exp_nonpositive(Isa::sub(s1, shift));
      if (mask != ~0u) p0 = Isa::blend(mask & 0xffffu, Isa::zero(), p0), p1 = Isa::blend(mask >> 16, Isa::zero(), p1);
      sums[m] = Isa::reduce_add(Isa::add(p0, p1));
      Factor* p = weights_ + int64_t{query + m} * kTokenFactors;
      store_factors(p, p0);
      store_factors(p + kTokenFactors / 2, p1);
    }
    // Old sums shrink by e^(old maximum - new maximum): 1 when it stays, 0 on the slice's first page.
    float shrink[kLanes];
    Isa::store(shrink, Math<Isa>::exp_nonpositive(Isa::load(change)));
    for (int m = 0; m < M; ++m) norm_[query + m] = __builtin_fmaf(norm_[query + m], shrink[m], sums[m]);
    values<M>(query, span, v, shrink);
  }

  // q · k of 32 tokens, to [M][32]. The product loops stand in functions of their own, so that their sums are
  // registers.
  template <int M>
  [[gnu::noinline]] void scores(int32_t query, const Element* k, float* to) const {
    const int32_t stride = query_factors();
    const Factor* q = q_ + int64_t{query} * stride;
    constexpr int kColumns = columns(M);
    for (int column = 0; column < 2; column += kColumns) {
      F acc[kColumns * M];
      for (F& sum : acc) sum = Isa::zero();
      const Element* w = k + column * kLanes * kPair;
      for (int32_t d = 0; d < stride; d += kFactors, w += kBlockTokens * kPair) add_product<M>(acc, w, q + d, stride);
      for (int c = 0; c < kColumns; ++c)
        for (int m = 0; m < M; ++m) Isa::store(to + m * kBlockTokens + (column + c) * kLanes, acc[c * M + m]);
    }
  }

  // acc[column][query] += vectors of pairs (or numbers) at w times each query's operand, queries `stride` apart.
  template <int M, int N>
  [[gnu::always_inline]] static inline void add_product(F (&acc)[N], const Element* w, const Factor* x,
                                                        int32_t stride) {
#pragma GCC unroll 2
    for (int c = 0; c < N / M; ++c, w += kLanes * kPair) {
      F* sums = acc + c * M;
      // The operands are loaded anew for each column: kept, they would push sums out of the registers.
      if (c > 0) asm("" : "+r"(x));
      if constexpr (kIsSplit) {
        const F even = Isa::even_bf16(w);
        for (int m = 0; m < M; ++m) sums[m] = Isa::fma(even, Isa::set1(x[m * stride]), sums[m]);
        const F odd = Isa::odd_bf16(w);
        for (int m = 0; m < M; ++m) sums[m] = Isa::fma(odd, Isa::set1(x[m * stride + 1]), sums[m]);
      } else if constexpr (kIsBf16) {
        for (int m = 0; m < M; ++m) {
          uint32_t pair;  // the memory was written as bf16
          std::memcpy(&pair, x + m * stride, sizeof pair);
          sums[m] = Isa::dot_bf16(sums[m], w, pair);
        }
      } else {
        const F values = Isa::load(w);
        for (int m = 0; m < M; ++m) sums[m] = Isa::fma(values, Isa::set1(x[m * stride]), sums[m]);
      }
    }
  }

  // sum_ = sum_ · shrink + Σ over the visible tokens of p · v.
  template <int M>
  [[gnu::noinline]] void values(int32_t query, Span span, const Element* v, const float* shrink) {
    const int64_t stride = int64_t{size_} * kPair;  // elements between tokens, or pairs of them
    int32_t start = span.start / kPair, stop = span.stop / kPair;
    const Element *before = nullptr, *after = nullptr;
    if constexpr (kIsBf16) {
      // A pair of which one token is unseen: its half is replaced by zeros, never multiplied.
      if (span.start % 2) before = half_pair(edges_, v + start * stride, 0xffff0000u), ++start;
      if (span.stop % 2) after = half_pair(edges_ + stride, v + stop * stride, 0x0000ffffu);
    }
    const Factor* p = weights_ + int64_t{query} * kTokenFactors;
    constexpr int kColumns = columns(M);
    for (int32_t d = 0; d < size_; d += kColumns * kLanes) {
      F acc[kColumns * M];
      float* sums = sum_ + int64_t{query} * size_ + d;
      for (int c = 0; c < kColumns; ++c)
        for (int m = 0; m < M; ++m)
          acc[c * M + m] = Isa::mul(Isa::load(sums + int64_t{m} * size_ + c * kLanes), Isa::set1(shrink[m]));
      const Element* column = v + d * kPair;
      if (before) add_product<M>(acc, before + d * kPair, p + (start - 1) * kFactors, kTokenFactors);
      for (int32_t t = start; t < stop; ++t) add_product<M>(acc, column + t * stride, p + t * kFactors, kTokenFactors);
      if (after) add_product<M>(acc, after + d * kPair, p + stop * kFactors, kTokenFactors);
      for (int c = 0; c < kColumns; ++c)
        for (int m = 0; m < M; ++m) Isa::store(sums + int64_t{m} * size_ + c * kLanes, acc[c * M + m]);
    }
  }
  const uint16_t* half_pair(uint16_t* to, const uint16_t* from, uint32_t keep) const {
    for (int32_t d = 0; d < size_; ++d) {
      uint32_t pair;
      std::memcpy(&pair, from + 2 * d, sizeof pair);
      pair &= keep;
      std::memcpy(to + 2 * d, &pair, sizeof pair);
    }
    return to;
  }

  // Adds a slice to the running result of the queries.
  void merge(int32_t queries, bool is_first, const float* max, const float* norm, const float* sums) {
    if (is_first) {
      for (int32_t q = 0; q < queries; ++q) run_max_[q] = max[q], run_norm_[q] = norm[q];
      for (int64_t i = 0; i < int64_t{queries} * size_; i += kLanes) Isa::store(run_ + i, Isa::load(sums + i));
      return;
    }
    for (int32_t q = 0; q < queries; ++q) {
      // A row of a tile may see nothing of a slice that another row sees: as if it were not there.
      if (norm[q] == 0.0f && max[q] == kMinusInf) continue;
      float* run = run_ + int64_t{q} * size_;
      const float* add = sums + int64_t{q} * size_;
      if (run_norm_[q] == 0.0f && run_max_[q] == kMinusInf) {
        run_max_[q] = max[q], run_norm_[q] = norm[q];
        for (int32_t d = 0; d < size_; d += kLanes) Isa::store(run + d, Isa::load(add + d));
        continue;
      }
      const float now = max[q] > run_max_[q] ? max[q] : run_max_[q];
      const float a = Math<Isa>::exp_nonpositive(run_max_[q] - now), b = Math<Isa>::exp_nonpositive(max[q] - now);
      run_max_[q] = now;
      run_norm_[q] = __builtin_fmaf(norm[q], b, run_norm_[q] * a);
      const F fa = Isa::set1(a), fb = Isa::set1(b);
      for (int32_t d = 0; d < size_; d += kLanes)
        Isa::store(run + d, Isa::fma(Isa::load(add + d), fb, Isa::mul(Isa::load(run + d), fa)));
    }
  }

  void finish(const Item& item) const {
    float* out = context_.buffer<float>(record_.out);
    for (int32_t q = 0; q < item.rows * group_; ++q) {
      const F factor = Isa::set1(1.0f / run_norm_[q]);
      float* to = out + query_offset(item, q);
      const float* from = run_ + int64_t{q} * size_;
      for (int32_t d = 0; d < size_; d += kLanes) Isa::store(to + d, Isa::mul(Isa::load(from + d), factor));
    }
  }

  const AttentionRecord& record_;
  const ThreadContext& context_;
  const StepView& step_;
  const LayerPages pages_;
  const int32_t group_, size_, tile_rows_;
  // This thread's scratch. Queries are ordered by row, then head of the group.
  Factor* q_;                                  // [queries, query_factors()]
  float* sum_;                                 // [queries, D] of the slice
  float* run_;                                 // [queries, D] of the slices so far
  Factor* weights_;                            // [queries, kTokenFactors] e^score
  float *max_, *norm_, *run_max_, *run_norm_;  // [queries]
  uint16_t* edges_;                            // [2][D][2] bf16
  Item held_{};                                // item that other threads continue
  int64_t held_start_ = 0, held_slices_ = 0;
};

template <class Isa>
void op_attention(const Record& record, const ThreadContext& context) {
  const auto fields = record.as<AttentionRecord>();
  if (context.kv->type == KvType::kBf16) Attention<Isa, true>(fields, context).run();
  else Attention<Isa, false>(fields, context).run();
}

}  // namespace headrace
