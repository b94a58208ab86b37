// HEAD: final norm, vocabulary product and the choice of a token, for the output rows only.
//
// The vocabulary is cut into kSlices slices, a fixed number, and each slice into blocks. Threads share the slices;
// logits of a block live in its scratch until the rows have taken what they need of them: log-sum-exp, the best, the
// ranked candidates. Per-slice results are merged in slice order: the number of threads changes nothing. A draw from
// the whole distribution recomputes one slice, with the same bits. Only a row whose filters may reach past kCandidates
// ids is kept whole; past kWholeRows such rows, the few that turn out to need it are recomputed.
//
// For each row: penalties, bias, mask, temperature, top_k, top_p, min_p, draw (see sample.h). Log-probabilities are of
// the distribution before all of these.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "core/limits.h"
#include "core/pool.h"
#include "core/step.h"
#include "ops/linear.h"
#include "ops/math.h"
#include "ops/philox.h"
#include "ops/product.h"
#include "ops/prologue.h"
#include "ops/sample.h"
#include "ops/sweep.h"

namespace headrace {

namespace head {

// Slices divide evenly among 2, 4, … 64 threads, and one slice is under a hundredth of the vocabulary to recompute.
inline constexpr int32_t kSlices = 128;
// Column tiles whose logits are held at a time: 128 columns; at k = 576 the int8 weights of a block are 78 KB of L2.
inline constexpr int32_t kBlockTiles = 8;
inline constexpr int32_t kBlockColumns = kBlockTiles * kLanes;
// Rows that a block is swept for at a time: their logits are 32 KB.
inline constexpr int32_t kRowBlock = 64;
// Rows kept whole: 12.6 MB at a vocabulary of 49,152. More rows are recomputed, in turns of as many.
inline constexpr int32_t kWholeRows = 64;
inline constexpr int32_t kEntryBytes = 8;
inline constexpr int32_t kCandidates = 256;
inline constexpr int32_t kBins = 2048;
inline constexpr int32_t kSumColumns = 128;

static constexpr int64_t whole_rows(int32_t max_outputs) { return max_outputs < kWholeRows ? max_outputs : kWholeRows; }
// static, not inline: see attention.h.
static constexpr int64_t line(int64_t bytes) { return (bytes + 63) / 64 * 64; }
static constexpr int64_t columns(int32_t vocab) { return (int64_t{vocab} + kLanes - 1) / kLanes * kLanes; }

}  // namespace head

// Bytes of one thread's scratch: logits of a block, running numbers and places of the rows, the merged list, and what
// the slow way needs for one row.
static constexpr int64_t head_scratch_bytes(const Limits& limits) {
  const int64_t rows = limits.max_outputs, columns = head::columns(limits.max_vocab);
  return head::line(int64_t{head::kRowBlock} * head::kBlockColumns * 4) + head::line(rows * 4 * 4) +
         head::line(rows * head::kEntryBytes) + head::line(rows * 4) +
         head::line(int64_t{head::kCandidates} * head::kEntryBytes) + head::line(int64_t{head::kBins} * 8) +
         2 * head::line(columns * 4) + head::line((columns / head::kSumColumns + 1) * 8);
}

// Bytes of the scratch that the threads share: per row and slice four numbers; per thread and row the best entry and
// the ranked lists; rows kept whole.
static constexpr int64_t head_shared_bytes(const Limits& limits) {
  if (limits.max_vocab == 0) return 0;
  const int64_t rows = limits.max_outputs;
  const int64_t lists = rows * limits.threads;
  return head::line(rows * head::kSlices * 4 * 4) + head::line(rows * 4) + head::line(lists * head::kEntryBytes) +
         2 * head::line(lists * 4) + head::line(lists * head::kCandidates * head::kEntryBytes) +
         head::line(lists * limits.max_top * head::kEntryBytes) +
         head::whole_rows(limits.max_outputs) * head::line(head::columns(limits.max_vocab) * 4);
}

template <class Isa>
class Head {
  using F = typename Isa::F;
  using S = Sample<Isa>;
  using Entry = typename S::Entry;
  using Best = typename S::Best;
  static_assert(S::kCandidates == head::kCandidates && S::kBins == head::kBins && sizeof(Entry) == head::kEntryBytes &&
                S::kSumColumns == head::kSumColumns);

  static constexpr float kMinusInf = -std::numeric_limits<float>::infinity();
  // In `choices_`: an id, −1 for none, or this.
  static constexpr int32_t kWholeRow = S::kNotCovered;
  // In `places_`: the row may be needed whole, but there is no room to keep it.
  static constexpr int32_t kNoPlace = -2;

  // A maximum and the sum of exponentials relative to it.
  struct Mass {
    float max, sum;
  };

 public:
  Head(const HeadRecord& record, const ThreadContext& context)
      : record_(record),
        context_(context),
        step_(*context.step),
        weight_(record.weight < 0 ? nullptr : &context.weights[record.weight]),
        rows_(step_.num_outputs()),
        vocab_(record.vocab),
        tiles_(num_tiles(record.vocab)),
        max_top_(step_.max_top) {
    const Limits& limits = *context.limits;
    const int64_t rows = limits.max_outputs, lists = rows * limits.threads;
    uint8_t* at = context.scratch;
    const auto take = [&](int64_t bytes) {
      uint8_t* part = at;
      at += head::line(bytes);
      return part;
    };
    logits_ = reinterpret_cast<float*>(take(int64_t{head::kRowBlock} * head::kBlockColumns * 4));
    running_ = reinterpret_cast<Mass*>(take(rows * 4 * 4));
    greedy_ = reinterpret_cast<Entry*>(take(rows * head::kEntryBytes));
    places_ = reinterpret_cast<int32_t*>(take(rows * 4));
    merged_ = reinterpret_cast<Entry*>(take(int64_t{head::kCandidates} * head::kEntryBytes));
    const int64_t columns = head::columns(limits.max_vocab);
    row_.bins = reinterpret_cast<double*>(take(int64_t{head::kBins} * 8));
    row_.weights = reinterpret_cast<float*>(take(columns * 4));
    row_.ids = reinterpret_cast<int32_t*>(take(columns * 4));
    row_.sums = reinterpret_cast<double*>(take((columns / head::kSumColumns + 1) * 8));
    row_.count = static_cast<int32_t>(head::columns(vocab_));
    at = context.shared_scratch;
    masses_ = reinterpret_cast<Mass*>(take(rows * head::kSlices * 4 * 4));
    choices_ = reinterpret_cast<int32_t*>(take(rows * 4));
    bests_ = reinterpret_cast<Entry*>(take(lists * head::kEntryBytes));
    candidate_sizes_ = reinterpret_cast<int32_t*>(take(lists * 4));
    top_sizes_ = reinterpret_cast<int32_t*>(take(lists * 4));
    candidates_ = reinterpret_cast<Entry*>(take(lists * head::kCandidates * head::kEntryBytes));
    tops_ = reinterpret_cast<Entry*>(take(lists * limits.max_top * head::kEntryBytes));
    row_floats_ = head::line(columns * 4) / 4;
    whole_ = reinterpret_cast<float*>(take(head::whole_rows(limits.max_outputs) * row_floats_ * 4));
    top_stride_ = limits.max_top;
    held_rows_ = static_cast<int32_t>(head::whole_rows(limits.max_outputs));
  }

  void run() {
    if (rows_ == 0) return;
    if (weight_ != nullptr) {
      const Prologue prologue = prologue_of(record_, weight_->layout, context_);
      input_ = prepare_rows<Isa>(
          prologue, rows_, [&](int32_t i) { return step_.outputs[static_cast<size_t>(i)].row; }, context_);
    }
    int32_t whole = 0;
    for (int32_t i = 0; i < rows_; ++i)
      places_[i] = !S::can_reach_past(output(i), vocab_) ? -1 : whole < held_rows_ ? whole++ : kNoPlace;
    sweep_vocabulary();
    context_.barrier->wait();
    bool has_no_place = false;
    for (int32_t i = 0; i < rows_; ++i) {
      has_no_place |= places_[i] == kNoPlace;
      if (i % context_.threads == context_.thread) settle(i);
    }
    if (!has_no_place) return;
    context_.barrier->wait();
    settle_whole_rows();
  }

 private:
  const OutputRow& output(int32_t i) const { return step_.outputs[static_cast<size_t>(i)]; }
  bool is_modified(const OutputRow& o) const {
    const bool is_penalised = o.counts_len > 0 && (o.repetition != 1.0f || o.presence != 0.0f || o.frequency != 0.0f);
    return is_penalised || o.bias_len > 0 || o.mask >= 0;
  }

  // The distribution to draw from is the unmodified one.
  bool is_plain(const OutputRow& o) const { return o.temperature == 1.0f && !is_modified(o); }

  // --- logits --------------------------------------------------------------------------------------------------------

  // Logits of column tiles [tiles.start, tiles.stop) for rows [first, first + count), to [count][stride] floats.
  // Columns that do not exist are -inf.
  void logits(int32_t first, int32_t count, Range tiles, float* to, int64_t stride) const {
    const F scale = Isa::set1(record_.scale);
    const float cap = record_.softcap;
    const auto emit = [&](int64_t tile, int32_t row, const F(&y)[1]) {
      F x = Isa::mul(y[0], scale);
      if (cap > 0.0f) x = Math<Isa>::soft_cap(x, cap);
      const int64_t existing = vocab_ - tile * kLanes;
      if (existing < kLanes) x = Isa::blend(~((1u << existing) - 1u) & 0xffffu, x, Isa::set1(kMinusInf));
      Isa::store(to + row * stride + (tile - tiles.start) * kLanes, x);
    };
    if (weight_ == nullptr) return stored_logits(first, count, tiles, emit);
    sweep<Isa, 1>(
        *weight_, input_.from_row(first), count, OwnUnits{tiles}, [](int64_t tile, int) { return tile; }, emit);
  }
  // The same where the products stand in the input already.
  template <class Emit>
  void stored_logits(int32_t first, int32_t count, Range tiles, const Emit& emit) const {
    const float* input = context_.buffer<const float>(record_.input) + int64_t{first} * vocab_;
    for (int64_t tile = tiles.start; tile < tiles.stop; ++tile) {
      const int lanes = static_cast<int>(std::min<int64_t>(kLanes, vocab_ - tile * kLanes));
      for (int32_t row = 0; row < count; ++row) {
        const float* from = input + int64_t{row} * vocab_ + tile * kLanes;
        emit(tile, row, {lanes == kLanes ? Isa::load(from) : Isa::load_n(from, lanes)});
      }
    }
  }
  float raw_logit(int32_t i, int32_t id) const {
    float lanes[kLanes];
    const int64_t tile = id / kLanes;
    logits(i, 1, {tile, tile + 1}, lanes, kLanes);
    return lanes[id % kLanes];
  }

  // The first entry of ascending ids[0, count) that is not below `id`.
  static int32_t find(const int32_t* ids, int32_t count, int64_t id) {
    int32_t low = 0;
    while (low < count) {
      const int32_t middle = low + (count - low) / 2;
      if (ids[middle] < id) low = middle + 1;
      else count = middle;
    }
    return low;
  }

  // Applies the row's penalties, bias and mask to the logits of columns [column, column + count).
  void modify(const OutputRow& o, float* x, int64_t column, int32_t count) const {
    if (o.counts_len > 0) {
      const int32_t* ids = step_.count_ids.data() + o.counts_start;
      const int32_t* counts = step_.counts.data() + o.counts_start;
      for (int32_t j = find(ids, o.counts_len, column); j < o.counts_len && ids[j] < column + count; ++j) {
        const bool is_in_prompt = counts[j] < 0;
        const int32_t times = is_in_prompt ? -1 - counts[j] : counts[j];
        float& y = x[ids[j] - column];
        if (is_in_prompt || times > 0) y = y > 0.0f ? y / o.repetition : y * o.repetition;
        if (times > 0) {
          y = __builtin_fmaf(-o.frequency, static_cast<float>(times), y);
          y -= o.presence;
        }
      }
    }
    if (o.bias_len > 0) {
      const int32_t* ids = step_.bias_ids.data() + o.bias_start;
      const float* values = step_.bias_values.data() + o.bias_start;
      for (int32_t j = find(ids, o.bias_len, column); j < o.bias_len && ids[j] < column + count; ++j)
        x[ids[j] - column] += values[j];
    }
    if (o.mask >= 0) {
      const uint32_t* words = step_.masks.data() + int64_t{o.mask} * step_.mask_words;
      for (int32_t i = 0; i < count; i += kLanes) {
        const int64_t word = (column + i) / 32;
        const uint32_t allowed = word < step_.mask_words ? words[word] >> ((column + i) % 32) : 0u;
        if ((allowed & 0xffffu) != 0xffffu)
          Isa::store(x + i, Isa::blend(~allowed & 0xffffu, Isa::load(x + i), Isa::set1(kMinusInf)));
      }
    }
  }

  static float max_of(const float* x, int32_t count) {
    F top = Isa::load(x);
    for (int32_t i = kLanes; i < count; i += kLanes) top = Isa::max(top, Isa::load(x + i));
    return Isa::reduce_max(top);
  }
  // Adds Σ e^((x - max) · factor) of a block, `top` being its largest.
  static void add_mass(Mass& mass, const float* x, int32_t count, float top, float factor) {
    if (top > mass.max) {
      if (mass.max != kMinusInf) mass.sum *= Math<Isa>::exp_nonpositive((mass.max - top) * factor);
      mass.max = top;
    }
    const F shift = Isa::set1(mass.max), scale = Isa::set1(factor);
    F sum = Isa::zero();
    for (int32_t i = 0; i < count; i += kLanes)
      sum = Isa::add(sum, Math<Isa>::exp_nonpositive(Isa::mul(Isa::sub(Isa::load(x + i), shift), scale)));
    mass.sum += Isa::reduce_add(sum);
  }

  // Whether an entry of that key may enter the list. One equal to the worst does when its id is lower: slices come in
  // any order.
  static bool may_enter(const Best& best, float key) { return key > kMinusInf && key >= best.threshold(); }
  // Offers all entries of a block that can enter the list.
  static void offer_block(Best& best, const float* x, int32_t count, int64_t column) {
    float threshold = best.threshold();
    for (int32_t i = 0; i < count; i += kLanes) {
      uint32_t mask = Isa::greater(Isa::load(x + i), Isa::set1(__builtin_nextafterf(threshold, kMinusInf)));
      for (; mask != 0; mask &= mask - 1) {
        const int lane = __builtin_ctz(mask);
        best.offer({x[i + lane], static_cast<int32_t>(column + i + lane)});
      }
      threshold = best.threshold();
    }
  }
  static int32_t index_of(const float* x, int32_t count, float value) {
    for (int32_t i = 0; i < count; i += kLanes) {
      const uint32_t below = Isa::greater(Isa::set1(value), Isa::load(x + i));
      if (below != 0xffffu) return i + __builtin_ctz(~below);
    }
    return 0;
  }

  // --- the sweep -----------------------------------------------------------------------------------------------------

  static Range slice_tiles(int32_t slice, int64_t tiles) {
    return {tiles * slice / head::kSlices, tiles * (slice + 1) / head::kSlices};
  }
  Mass& raw_mass(int32_t i, int32_t slice) const { return masses_[(int64_t{i} * head::kSlices + slice) * 2]; }
  Mass& drawn_mass(int32_t i, int32_t slice) const { return masses_[(int64_t{i} * head::kSlices + slice) * 2 + 1]; }
  int64_t list(int32_t i, int32_t thread) const { return int64_t{i} * context_.threads + thread; }
  Best candidates(int32_t i, int32_t thread) const {
    const int64_t index = list(i, thread);
    return {candidates_ + index * head::kCandidates, candidate_sizes_[index], S::capacity(output(i), vocab_)};
  }
  Best tops(int32_t i, int32_t thread) const {
    const int64_t index = list(i, thread);
    const int32_t wanted = output(i).num_logprobs;
    return {tops_ + index * top_stride_, top_sizes_[index], wanted > 0 ? wanted : 0};
  }

  void sweep_vocabulary() {
    for (int32_t i = 0; i < rows_; ++i) {
      candidate_sizes_[list(i, context_.thread)] = top_sizes_[list(i, context_.thread)] = 0;
      greedy_[i] = {kMinusInf, -1};
    }
    SharedUnits{context_, head::kSlices}.each([this](Range slices) {
      for (int64_t slice = slices.start; slice < slices.stop; ++slice) sweep_slice(static_cast<int32_t>(slice));
    });
    for (int32_t i = 0; i < rows_; ++i) bests_[list(i, context_.thread)] = greedy_[i];
  }

  void sweep_slice(int32_t slice) {
    for (int32_t i = 0; i < 2 * rows_; ++i) running_[i] = {kMinusInf, 0.0f};
    const Range tiles = slice_tiles(slice, tiles_);
    for (int64_t tile = tiles.start; tile < tiles.stop; tile += head::kBlockTiles) {
      const int64_t stop = tile + head::kBlockTiles < tiles.stop ? tile + head::kBlockTiles : tiles.stop;
      for (int32_t first = 0; first < rows_; first += head::kRowBlock) {
        const int32_t count = rows_ - first < head::kRowBlock ? rows_ - first : head::kRowBlock;
        logits(first, count, {tile, stop}, logits_, head::kBlockColumns);
        for (int32_t i = 0; i < count; ++i)
          take_block(first + i, logits_ + int64_t{i} * head::kBlockColumns, tile * kLanes,
                     static_cast<int32_t>(stop - tile) * kLanes);
      }
    }
    for (int32_t i = 0; i < rows_; ++i) {
      raw_mass(i, slice) = running_[2 * i];
      drawn_mass(i, slice) = running_[is_plain(output(i)) ? 2 * i : 2 * i + 1];
    }
  }

  // What row i takes of a block of its logits, which it may overwrite.
  void take_block(int32_t i, float* x, int64_t column, int32_t count) {
    const OutputRow& o = output(i);
    float top = max_of(x, count);
    add_mass(running_[2 * i], x, count, top, 1.0f);
    if (o.num_logprobs > 0) {
      Best best = tops(i, context_.thread);
      if (may_enter(best, top)) {
        offer_block(best, x, count, column);
        top_sizes_[list(i, context_.thread)] = best.size;
      }
    }
    if (S::is_scored(o)) return;
    if (is_modified(o)) {
      modify(o, x, column, count);
      top = max_of(x, count);
    }
    if (S::is_greedy(o)) {
      // A slice may come after one of higher ids: of equal logits the lowest id is the best.
      if (top > greedy_[i].key || (top == greedy_[i].key && column < greedy_[i].id))
        greedy_[i] = {top, static_cast<int32_t>(column) + index_of(x, count, top)};
      return;
    }
    if (places_[i] >= 0) {
      float* to = whole_ + places_[i] * row_floats_ + column;
      for (int32_t j = 0; j < count; j += kLanes) Isa::store(to + j, Isa::load(x + j));
    }
    if (S::has_mass(o, vocab_) && !is_plain(o) && top > kMinusInf)
      add_mass(running_[2 * i + 1], x, count, top, 1.0f / o.temperature);
    Best best = candidates(i, context_.thread);
    if (best.capacity > 0 && may_enter(best, top)) {
      offer_block(best, x, count, column);
      candidate_sizes_[list(i, context_.thread)] = best.size;
    }
  }

  // --- the choice ----------------------------------------------------------------------------------------------------

  // log Σ e^x of the unmodified row. Not finite when any logit was not.
  double log_sum(int32_t i) const {
    float max = kMinusInf;
    for (int32_t s = 0; s < head::kSlices; ++s)
      if (raw_mass(i, s).max > max) max = raw_mass(i, s).max;
    double sum = 0.0;
    for (int32_t s = 0; s < head::kSlices; ++s) {
      const Mass mass = raw_mass(i, s);
      const Range tiles = slice_tiles(s, tiles_);
      if (tiles.start == tiles.stop) continue;
      sum += static_cast<double>(mass.sum) * std::exp(static_cast<double>(mass.max) - static_cast<double>(max));
    }
    return static_cast<double>(max) + std::log(sum);
  }

  // All threads' entries of one row, best first, in merged_.
  Best merge(int32_t i, Best (Head::*list_of)(int32_t, int32_t) const) const {
    Best all{merged_, 0, (this->*list_of)(i, 0).capacity};
    for (int32_t thread = 0; thread < context_.threads; ++thread) {
      const Best part = (this->*list_of)(i, thread);
      for (int32_t j = 0; j < part.size; ++j) all.offer(part.entries[j]);
    }
    all.sort();
    return all;
  }

  void settle(int32_t i) const {
    const OutputRow& o = output(i);
    ResultRow& result = step_.results[static_cast<size_t>(i)];
    const double log_sum_exp = log_sum(i);
    result = {o.target >= 0 ? o.target : -1, 0, std::numeric_limits<float>::quiet_NaN(), 0,
              static_cast<float>(log_sum_exp)};
    choices_[i] = -1;
    if (!std::isfinite(log_sum_exp)) {
      result.status = 1;
      return;
    }
    if (o.num_logprobs > 0) {
      const Best best = merge(i, &Head::tops);
      for (int32_t j = 0; j < best.size; ++j) {
        const auto at = static_cast<size_t>(int64_t{i} * max_top_ + j);
        step_.top_ids[at] = best.entries[j].id;
        step_.top_logprobs[at] = static_cast<float>(static_cast<double>(best.entries[j].key) - log_sum_exp);
      }
      result.num_top = best.size;
    }
    choices_[i] = choose(i);
    if (choices_[i] != kWholeRow) finish(i, choices_[i]);
  }

  int32_t choose(int32_t i) const {
    const OutputRow& o = output(i);
    if (S::is_scored(o)) return o.target;
    if (S::is_greedy(o)) {
      Entry best{kMinusInf, -1};
      for (int32_t thread = 0; thread < context_.threads; ++thread) {
        const Entry other = bests_[list(i, thread)];
        if (other.id >= 0 && (best.id < 0 || S::is_better(other, best))) best = other;
      }
      return best.id;
    }
    const double uniform = Philox<Isa>::uniform(o.seed, o.position);
    if (!S::is_filtered(o, vocab_)) return draw_from_all(i, uniform);
    const Best best = merge(i, &Head::candidates);
    if (best.size == 0) return -1;
    double mass = 0.0;
    if (S::has_mass(o, vocab_))
      for (int32_t s = 0; s < head::kSlices; ++s) mass += mass_of(drawn_mass(i, s), best.entries[0].key, o.temperature);
    const int32_t id = S::choose(o, best.entries, best.size, best.capacity, mass, uniform);
    return id == kWholeRow && places_[i] >= 0 ? choose_from_whole(i, places_[i]) : id;
  }
  int32_t choose_from_whole(int32_t i, int32_t place) const {
    const OutputRow& o = output(i);
    typename S::Row row = row_;
    row.keys = whole_ + place * row_floats_;
    return S::choose_from_row(o, row, Philox<Isa>::uniform(o.seed, o.position));
  }

  static double mass_of(Mass mass, float max, float temperature) {
    if (mass.sum == 0.0f) return 0.0;
    return static_cast<double>(mass.sum) *
           std::exp((static_cast<double>(mass.max) - static_cast<double>(max)) / static_cast<double>(temperature));
  }

  // A draw without filters: the slice by the slices' masses, then the id by recomputing that slice.
  int32_t draw_from_all(int32_t i, double uniform) const {
    const OutputRow& o = output(i);
    float max = kMinusInf;
    for (int32_t s = 0; s < head::kSlices; ++s)
      if (drawn_mass(i, s).max > max) max = drawn_mass(i, s).max;
    if (max == kMinusInf) return -1;
    const auto mass = [&](int32_t s) { return mass_of(drawn_mass(i, s), max, o.temperature); };
    double total = 0.0;
    for (int32_t s = 0; s < head::kSlices; ++s) total += mass(s);
    const int32_t slice = S::draw(uniform * total, head::kSlices, mass);
    if (slice < 0) return -1;
    double before = 0.0;
    for (int32_t s = 0; s < slice; ++s) before += mass(s);
    // What is left to pass inside the slice, relative to the slice's own maximum.
    const double share_in = (uniform * total - before) / mass(slice);
    const double target = share_in * static_cast<double>(drawn_mass(i, slice).sum);
    const Range tiles = slice_tiles(slice, tiles_);
    const F shift = Isa::set1(drawn_mass(i, slice).max), factor = Isa::set1(1.0f / o.temperature);
    double sum = 0.0;
    int32_t last = -1;
    for (int64_t tile = tiles.start; tile < tiles.stop; tile += head::kBlockTiles) {
      const int64_t stop = tile + head::kBlockTiles < tiles.stop ? tile + head::kBlockTiles : tiles.stop;
      const int32_t count = static_cast<int32_t>(stop - tile) * kLanes;
      logits(i, 1, {tile, stop}, logits_, head::kBlockColumns);
      if (is_modified(o)) modify(o, logits_, tile * kLanes, count);
      for (int32_t j = 0; j < count; j += kLanes)
        Isa::store(logits_ + j, Math<Isa>::exp_nonpositive(Isa::mul(Isa::sub(Isa::load(logits_ + j), shift), factor)));
      const auto weight = [&](int32_t j) { return static_cast<double>(logits_[j]); };
      const int32_t index = S::draw(target - sum, count, weight);
      if (index < 0) continue;
      last = static_cast<int32_t>(tile * kLanes) + index;
      double block = 0.0;
      for (int32_t j = 0; j < count; ++j) block += weight(j);
      if (sum + block > target) return last;
      sum += block;
    }
    return last;
  }

  void finish(int32_t i, int32_t id) const {
    ResultRow& result = step_.results[static_cast<size_t>(i)];
    result.token = id;
    if (id < 0) {  // the mask allows nothing
      result.status = 1;
      return;
    }
    result.logprob = static_cast<float>(static_cast<double>(raw_logit(i, id)) - log_sum(i));
  }

  // --- the slow way --------------------------------------------------------------------------------------------------

  void settle_whole_rows() {
    int32_t next = 0;
    while (true) {
      int32_t rows[head::kWholeRows];
      int32_t count = 0;
      for (; next < rows_ && count < held_rows_; ++next)
        if (choices_[next] == kWholeRow) rows[count++] = next;
      if (count == 0) return;
      SharedUnits{context_, tiles_}.each([&](Range tiles) {
        for (int64_t tile = tiles.start; tile < tiles.stop; tile += head::kBlockTiles) {
          const int64_t stop = tile + head::kBlockTiles < tiles.stop ? tile + head::kBlockTiles : tiles.stop;
          for (int32_t r = 0; r < count; ++r) {
            float* x = whole_ + r * row_floats_ + tile * kLanes;
            logits(rows[r], 1, {tile, stop}, x, head::kBlockColumns);
            modify(output(rows[r]), x, tile * kLanes, static_cast<int32_t>(stop - tile) * kLanes);
          }
        }
      });
      context_.barrier->wait();
      for (int32_t r = 0; r < count; ++r) {
        if (r % context_.threads == context_.thread) finish(rows[r], choose_from_whole(rows[r], r));
      }
      if (count < held_rows_) return;  // all threads count alike
      context_.barrier->wait();
    }
  }

  const HeadRecord& record_;
  const ThreadContext& context_;
  const StepView& step_;
  const Weight* weight_;  // none: the input is the logits
  const int32_t rows_, vocab_;
  const int64_t tiles_;
  const int32_t max_top_;
  Activations input_;
  // This thread's scratch.
  float* logits_;    // [kRowBlock][kBlockColumns]
  Mass* running_;    // [rows][raw, drawn] of the slice
  Entry* greedy_;    // [rows]
  Entry* merged_;    // [kCandidates]
  int32_t* places_;  // [rows] in whole_, −1 where not needed, or kNoPlace
  typename S::Row row_{};
  // Shared scratch.
  Mass* masses_;                           // [rows][kSlices][raw, drawn]
  int32_t* choices_;                       // [rows]
  Entry* bests_;                           // [rows][threads]
  int32_t *candidate_sizes_, *top_sizes_;  // [rows][threads]
  Entry* candidates_;                      // [rows][threads][kCandidates] heaps
  Entry* tops_;                            // [rows][threads][max_top] heaps
  float* whole_;                           // [kWholeRows][row_floats_] logits after penalties, bias and mask
  int64_t row_floats_ = 0, top_stride_ = 0;
  int32_t held_rows_ = 0;
};

template <class Isa>
void op_head(const Record& record, const ThreadContext& context) {
  const auto fields = record.as<HeadRecord>();
  Head<Isa>(fields, context).run();
}

}  // namespace headrace
