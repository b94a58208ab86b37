// Attention of a ragged batch over pages: those of the KV pool, or the step's own (encoders).
//
// Work is cut into items: one kv head of one sequence and a tile of its rows. All query heads of that kv head and all
// rows of the tile ("queries") share each read of a page. Per query the positions are cut into fixed slices of
// kSliceTokens, computed by ops/attention_slice.h, and slices are merged in order. Every step of a
// query depends on nothing but the query and its visible positions, so a row has the same bits whatever the tile
// height, the chunking of its prompt, its batch mates and the number of threads. When few long items would leave
// threads idle, items of one row are divided between threads at slice borders, which changes who computes a slice and
// nothing else.
#pragma once

#include <cstdint>

#include "core/limits.h"
#include "core/pool.h"
#include "core/step.h"
#include "ops/attention_slice.h"

namespace headrace {

namespace attention {

// Slices that all split items of a step may hand over, per thread: 256 are 131,072 positions. Beyond, nothing is split.
inline constexpr int32_t kHandedSlices = 256;

static constexpr int32_t tile_rows(int32_t group) { return group < kItemQueries ? kItemQueries / group : 1; }
// Floats of one handed-over slice: per query head maximum and sum, then the accumulators.
static constexpr int64_t partial_floats(int32_t group, int32_t head_size) {
  return round_up(2 * int64_t{group}, kLanes) + int64_t{group} * head_size;
}

}  // namespace attention

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
  using Span = attention::Span;

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
        tile_rows_(attention::tile_rows(group_)),
        slice_(record, context.scratch, tile_rows_ * group_) {}

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
  // What any row of an item sees.
  Span visible_to(const Item& item) const {
    return {visible(item.seq, item.position).start, visible(item.seq, item.position + item.rows - 1).stop};
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
          const Item item{seq, head, row, rows, step_.positions[static_cast<size_t>(row)]};
          fn(item, visible_to(item));
        }
    }
  }

  // The thread whose share of the total cost holds the middle of this piece of work.
  int32_t owner(int64_t before, int64_t piece, int64_t total) const {
    return static_cast<int32_t>((before + piece / 2) * context_.threads / total);
  }

  // Of an item's rows, how many belong to threads before `thread`: where the share of the total ends, rows are divided,
  // so that few items keep all threads busy. `before` is the cost of all earlier work.
  int32_t rows_before(int32_t thread, int32_t rows, int64_t before, int64_t piece, int64_t total) const {
    const int64_t end = total * thread / context_.threads - before;
    if (end <= 0) return 0;
    return end >= piece ? rows : static_cast<int32_t>((end * rows + piece / 2) / piece);
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
        const int32_t first = rows_before(context_.thread, item.rows, before, piece, plan.total);
        const int32_t stop = rows_before(context_.thread + 1, item.rows, before, piece, plan.total);
        if (first < stop) whole({item.seq, item.head, item.row + first, stop - first, item.position + first});
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
          attend(item, part);
          if (who == first) merge(item, slice == first_slice(span));
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
    for (int32_t q = 0; q < group_; ++q) to[q] = slice_.max()[q], to[group_ + q] = slice_.norm()[q];
    float* sums = to + attention::round_up(2 * group_, kLanes);
    for (int64_t i = 0; i < int64_t{group_} * size_; i += kLanes) Isa::store(sums + i, Isa::load(slice_.sums() + i));
  }
  void finish_held() {
    if (held_slices_ == 0) return;
    for (int64_t i = 0; i < held_slices_; ++i) {
      const float* from = partial(held_start_ + i);
      slice_.merge(group_, false, from, from + group_, from + attention::round_up(2 * group_, kLanes));
    }
    finish(held_);
  }

  // --- one item ------------------------------------------------------------------------------------------------------

  void whole(const Item& item) {
    const Span span = visible_to(item);
    begin(item);
    for (int32_t slice = first_slice(span); slice <= last_slice(span); ++slice) {
      attend(item, slice_of(span, slice));
      merge(item, slice == first_slice(span));
    }
    finish(item);
  }

  int64_t query_offset(const Item& item, int32_t query) const {
    return int64_t{item.row + query / group_} * record_.heads * size_ +
           (int64_t{item.head} * group_ + query % group_) * size_;
  }
  void begin(const Item& item) {
    const float* q = context_.buffer<float>(record_.q);
    for (int32_t query = 0; query < item.rows * group_; ++query) slice_.put_query(query, q + query_offset(item, query));
  }

  // One slice, or what is visible of it, for all queries of the item.
  void attend(const Item& item, Span part) {
    Span seen[attention::kItemQueries];
    for (int32_t row = 0; row < item.rows; ++row) {
      const Span all = visible(item.seq, item.position + row);
      seen[row] = {all.start > part.start ? all.start : part.start, all.stop < part.stop ? all.stop : part.stop};
    }
    attention::Pages pages{};
    for (int32_t page = part.start / kBlockTokens; page * kBlockTokens < part.stop; ++page) {
      const int32_t block = pages_.block(item.seq, page);
      pages.k[page % attention::kSlicePages] = pages_.k(block, item.head);
      pages.v[page % attention::kSlicePages] = pages_.v(block, item.head);
    }
    if (part.stop % attention::kSliceTokens == 0 && part.stop < visible_to(item).stop)
      pages.next = pages_.k(pages_.block(item.seq, part.stop / kBlockTokens), item.head);
    slice_.attend(part, seen, item.rows, pages);
  }
  void merge(const Item& item, bool is_first) {
    slice_.merge(item.rows * group_, is_first, slice_.max(), slice_.norm(), slice_.sums());
  }

  void finish(const Item& item) const {
    float* out = context_.buffer<float>(record_.out);
    for (int32_t query = 0; query < item.rows * group_; ++query) slice_.finish(query, out + query_offset(item, query));
  }

  const AttentionRecord& record_;
  const ThreadContext& context_;
  const StepView& step_;
  const LayerPages pages_;
  const int32_t group_, size_, tile_rows_;
  AttentionSlice<Isa, kIsBf16> slice_;
  Item held_{};  // item that other threads continue
  int64_t held_start_ = 0, held_slices_ = 0;
};

template <class Isa>
void op_attention(const Record& record, const ThreadContext& context) {
  const auto fields = record.as<AttentionRecord>();
  if (context.kv->type == KvType::kBf16) Attention<Isa, true>(fields, context).run();
  else Attention<Isa, false>(fields, context).run();
}

}  // namespace headrace
