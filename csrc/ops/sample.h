// How a token is chosen, on plain arrays: ranked entries, the filters, and the draw. What the filters mean:
//
//   temperature   logits are divided by it before anything else; 0 takes the best id and ends here
//   top_k         the k best remain
//   top_p         of what remains, renormalised: the shortest best-first prefix whose mass reaches top_p
//   min_p         of what remains: those with at least min_p times the probability of the best
//
// Best first means larger logit first, equal logits by lower id. The draw is the inverse of the cumulative distribution
// at one uniform number.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "core/step.h"
#include "ops/math.h"

namespace headrace {

template <class Isa>
struct Sample {
  // Ranked ids that a row keeps. A filter that needs more goes the slow way over the whole row.
  static constexpr int32_t kCandidates = 256;
  static constexpr float kMinusInf = -__builtin_inff();
  // Below this, (logit - best) / temperature overflows where it matters: greedy.
  static constexpr float kMinTemperature = 1e-5f;

  struct Entry {
    float key;
    int32_t id;
  };
  static bool is_better(Entry a, Entry b) { return a.key > b.key || (a.key == b.key && a.id < b.id); }

  // The best `capacity` entries offered so far, as a heap whose root is the worst of them.
  struct Best {
    Entry* entries;
    int32_t size, capacity;
    // An offer must beat this key, or equal it with a lower id than the worst.
    float threshold() const { return size < capacity ? kMinusInf : capacity == 0 ? -kMinusInf : entries[0].key; }

    void offer(Entry entry) {
      if (size < capacity) {
        int32_t at = size++;
        while (at > 0 && is_better(entries[(at - 1) / 2], entry)) {
          entries[at] = entries[(at - 1) / 2];
          at = (at - 1) / 2;
        }
        entries[at] = entry;
      } else if (capacity > 0 && is_better(entry, entries[0])) {
        sink(entry, size);
      }
    }
    // Places `entry` at the root of the first `count` entries and restores the heap.
    void sink(Entry entry, int32_t count) {
      int32_t at = 0;
      while (true) {
        int32_t child = 2 * at + 1;
        if (child >= count) break;
        if (child + 1 < count && is_better(entries[child], entries[child + 1])) ++child;
        if (!is_better(entry, entries[child])) break;
        entries[at] = entries[child];
        at = child;
      }
      entries[at] = entry;
    }
    // Best first. The heap is used up.
    void sort() {
      for (int32_t count = size; count > 1; --count) {
        const Entry worst = entries[0], last = entries[count - 1];
        sink(last, count - 1);
        entries[count - 1] = worst;
      }
    }
  };

  // What a row needs from the sweep over the vocabulary.
  static bool is_scored(const OutputRow& o) { return o.target >= 0; }
  static bool is_greedy(const OutputRow& o) { return !is_scored(o) && !(o.temperature >= kMinTemperature); }
  static bool is_drawn(const OutputRow& o) { return !is_scored(o) && o.temperature >= kMinTemperature; }
  static bool is_filtered(const OutputRow& o, int32_t vocab) {
    return (o.top_k > 0 && o.top_k < vocab) || o.top_p < 1.0f || o.min_p > 0.0f;
  }
  // Ranked ids to keep: what top_k asks for if it is small, else as many as there are.
  static int32_t capacity(const OutputRow& o, int32_t vocab) {
    if (!is_drawn(o) || !is_filtered(o, vocab)) return 0;
    return o.top_k > 0 && o.top_k < kCandidates ? o.top_k : kCandidates;
  }
  // Whether the mass of the whole row at this temperature is needed.
  static bool has_mass(const OutputRow& o, int32_t vocab) {
    if (!is_drawn(o)) return false;
    return is_filtered(o, vocab) ? o.top_p < 1.0f && !(o.top_k > 0 && o.top_k < vocab) : true;
  }

  // Whether the filters may reach past the ranked candidates.
  static bool can_reach_past(const OutputRow& o, int32_t vocab) {
    return is_drawn(o) && is_filtered(o, vocab) && !(o.top_k > 0 && o.top_k <= kCandidates);
  }

  // The first index whose cumulative weight exceeds u · total; the last of weight above zero if rounding hides it.
  template <typename WeightOf>
  static int32_t draw(double target, int32_t count, WeightOf weight_of) {
    double sum = 0.0;
    int32_t last = -1;
    for (int32_t i = 0; i < count; ++i) {
      const double weight = weight_of(i);
      if (!(weight > 0.0)) continue;
      last = i;
      sum += weight;
      if (sum > target) return i;
    }
    return last;
  }

  static constexpr int32_t kNotCovered = -2;

  // Draws from ranked candidates (best first). `capacity` is what the list could have held; `mass` the weight of the
  // whole row relative to its best logit, where has_mass. Returns an id, −1 when there is none, or kNotCovered.
  static int32_t choose(const OutputRow& o, const Entry* entries, int32_t size, int32_t capacity, double mass,
                        double uniform) {
    if (size == 0) return -1;
    const bool is_complete = size < capacity;  // nothing was left out
    const double inverse = 1.0 / static_cast<double>(o.temperature);
    const auto weight = [&](int32_t i) {
      return std::exp((static_cast<double>(entries[i].key) - static_cast<double>(entries[0].key)) * inverse);
    };
    const bool is_ranked = is_complete || (o.top_k > 0 && o.top_k <= size);  // top_k ends inside the list
    const int32_t limit = o.top_k > 0 && o.top_k < size ? o.top_k : size;
    // min_p ends the list at `kept`; below the end that is final, for every other filter only shortens it.
    int32_t kept = 0;
    double total = 0.0;
    bool is_cut = false;
    for (; kept < limit && !is_cut;) {
      const double w = weight(kept);
      if (w < static_cast<double>(o.min_p)) is_cut = true;
      else total += w, ++kept;
    }
    if (o.top_p < 1.0f) {
      double all = mass;
      if (is_ranked) {
        all = total;
        for (int32_t i = kept; i < limit; ++i) all += weight(i);
      } else if (o.top_k > 0) {
        return kNotCovered;  // the mass of the top k is not known
      }
      const double goal = static_cast<double>(o.top_p) * all;
      double sum = 0.0;
      int32_t i = 0;
      while (i < kept && (i == 0 || sum < goal)) sum += weight(i++);
      if (i == kept && sum < goal && !is_ranked && !is_cut) return kNotCovered;
      kept = i;
      total = sum;
    } else if (!is_ranked && !is_cut) {
      return kNotCovered;
    }
    const int32_t index = draw(uniform * total, kept, weight);
    return index < 0 ? -1 : entries[index].id;
  }

  // --- the slow way: every filter over the whole row, exact for any length -------------------------------------------

  // Columns whose weights are summed as one: the draw finds its block, then its id in there.
  static constexpr int32_t kSumColumns = 128;
  static constexpr int32_t kBins = 2048;
  // Bins per unit of (best - logit) / temperature: 2048 of them reach to e^-128, below every weight.
  static constexpr float kBinsPerUnit = 16.0f;

  // A whole row, and scratch for it. Arrays are padded to whole lanes; keys with -inf.
  struct Row {
    const float* keys;  // [count] logits after penalties, bias and mask
    float* weights;     // [count] e^((key - best) / temperature), 0 once an id is out
    int32_t* ids;       // [count]
    double* sums;       // [count / kSumColumns, rounded up]
    double* bins;       // [kBins]
    int32_t count;      // of ids, padding included
    float best = kMinusInf, inverse = 0.0f;
  };

  static int32_t choose_from_row(const OutputRow& o, Row row, double uniform) {
    auto top = Isa::set1(kMinusInf);
    for (int32_t i = 0; i < row.count; i += kLanes) top = Isa::max(top, Isa::load(row.keys + i));
    row.best = Isa::reduce_max(top);
    if (row.best == kMinusInf) return -1;
    row.inverse = 1.0f / o.temperature;
    const auto shift = Isa::set1(row.best), inverse = Isa::set1(row.inverse);
    for (int32_t i = 0; i < row.count; i += kLanes) {
      const auto x = Isa::mul(Isa::sub(Isa::load(row.keys + i), shift), inverse);
      Isa::store(row.weights + i, Math<Isa>::exp_nonpositive(x));
    }
    if (o.top_k > 0 && o.top_k < row.count) cut(row, o.top_k, [](float weight) { return weight > 0.0f ? 1.0 : 0.0; });
    if (o.top_p < 1.0f) {
      const double goal = static_cast<double>(o.top_p) * sum_from(row, 0.0f);
      cut(row, goal, [](float weight) { return static_cast<double>(weight); });
    }
    const double target = uniform * sum_from(row, o.min_p);
    const int32_t blocks = (row.count + kSumColumns - 1) / kSumColumns;
    const int32_t block = draw(target, blocks, [&](int32_t b) { return row.sums[b]; });
    if (block < 0) return -1;
    double before = 0.0;
    for (int32_t b = 0; b < block; ++b) before += row.sums[b];
    const int32_t start = block * kSumColumns;
    const int32_t columns = row.count - start < kSumColumns ? row.count - start : kSumColumns;
    return start +
           draw(target - before, columns, [&](int32_t i) { return static_cast<double>(row.weights[start + i]); });
  }

  // Takes out the weights below `least`, fills row.sums and returns their total.
  static double sum_from(const Row& row, float least) {
    double total = 0.0;
    const auto limit = Isa::set1(least);
    for (int32_t start = 0; start < row.count; start += kSumColumns) {
      const int32_t stop = start + kSumColumns < row.count ? start + kSumColumns : row.count;
      auto sum = Isa::zero();
      for (int32_t i = start; i < stop; i += kLanes) {
        auto weight = Isa::load(row.weights + i);
        const uint32_t out = Isa::greater(limit, weight);
        if (out != 0) {
          weight = Isa::blend(out, weight, Isa::zero());
          Isa::store(row.weights + i, weight);
        }
        sum = Isa::add(sum, weight);
      }
      row.sums[start / kSumColumns] = static_cast<double>(Isa::reduce_add(sum));
      total += row.sums[start / kSumColumns];
    }
    return total;
  }

  // Order of floats as unsigned integers; both zeros are one.
  static uint32_t order(float key) {
    const auto bits = std::bit_cast<uint32_t>(key + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  }

  // Bins of sixteen ids by their distance from the best; bin 0 is the best's.
  static void bins_of(const Row& row, int32_t i, uint32_t* bins) {
    const auto distance = Isa::mul(Isa::sub(Isa::set1(row.best), Isa::load(row.keys + i)), Isa::set1(row.inverse));
    // 2^23 + n is the float whose last bits are n.
    auto n = Isa::fma(distance, Isa::set1(kBinsPerUnit), Isa::set1(0x1p23f));
    n = Isa::min(n, Isa::set1(0x1p23f + static_cast<float>(kBins - 1)));
    float numbers[kLanes];
    Isa::store(numbers, n);
    for (int l = 0; l < kLanes; ++l) bins[l] = std::bit_cast<uint32_t>(numbers[l]) - std::bit_cast<uint32_t>(0x1p23f);
  }

  // Ends the best-first list of the ids with weight where the sum of their measures reaches `goal`, and takes out the
  // weights behind it. Radix: by distance first, then within one bin by the bits of the key, then by id.
  template <typename Measure>
  static void cut(const Row& row, double goal, Measure measure) {
    for (int32_t b = 0; b < kBins; ++b) row.bins[b] = 0.0;
    uint32_t bins[kLanes];
    for (int32_t i = 0; i < row.count; i += kLanes) {
      bins_of(row, i, bins);
      for (int l = 0; l < kLanes; ++l) row.bins[bins[l]] += measure(row.weights[i + l]);
    }
    double above = 0.0;  // measure of what is certainly in
    const auto bin = static_cast<uint32_t>(last_bin(row.bins, 0, kBins, 1, goal, above));
    int32_t size = 0;
    for (int32_t i = 0; i < row.count; i += kLanes) {
      bins_of(row, i, bins);
      for (int l = 0; l < kLanes; ++l) {
        row.ids[size] = i + l;
        size += bins[l] == bin && row.weights[i + l] > 0.0f;
      }
    }
    constexpr int kShifts[3] = {21, 10, 0};
    constexpr int32_t kSizes[3] = {2048, 2048, 1024};
    uint32_t prefix = 0, prefix_mask = 0;
    for (int level = 0; level < 3; ++level) {
      const uint32_t digit_mask = static_cast<uint32_t>(kSizes[level] - 1);
      for (int32_t b = 0; b < kSizes[level]; ++b) row.bins[b] = 0.0;
      for (int32_t j = 0; j < size; ++j) {
        const uint32_t rank = order(row.keys[row.ids[j]]);
        if ((rank & prefix_mask) != prefix) continue;
        row.bins[(rank >> kShifts[level]) & digit_mask] += measure(row.weights[row.ids[j]]);
      }
      const int32_t digit = last_bin(row.bins, kSizes[level] - 1, -1, -1, goal, above);
      prefix |= static_cast<uint32_t>(digit) << kShifts[level];
      prefix_mask |= digit_mask << kShifts[level];
    }
    float last = row.best;  // the key at which the list ends
    bool is_any = false;
    for (int32_t j = 0; j < size; ++j) {
      const int32_t id = row.ids[j];
      if (order(row.keys[id]) != prefix) continue;
      last = row.keys[id];
      if (is_any && above >= goal) row.weights[id] = 0.0f;
      else above += measure(row.weights[id]);
      is_any = true;
    }
    const auto limit = Isa::set1(last);
    for (int32_t i = 0; i < row.count; i += kLanes) {
      const uint32_t out = Isa::greater(limit, Isa::load(row.keys + i));
      if (out != 0) Isa::store(row.weights + i, Isa::blend(out, Isa::load(row.weights + i), Isa::zero()));
    }
  }

  // The bin, from `start` on in steps of `step`, in which the running sum reaches `goal`; `above` grows by the bins
  // before it. The last bin that holds anything when rounding keeps the goal out of reach.
  static int32_t last_bin(const double* bins, int32_t start, int32_t stop, int32_t step, double goal, double& above) {
    double before = above, sum = above;
    int32_t last = start;
    for (int32_t b = start; b != stop; b += step) {
      if (!(bins[b] > 0.0)) continue;
      before = sum;
      last = b;
      sum += bins[b];
      if (sum >= goal) break;
    }
    above = before;
    return last;
  }
};

}  // namespace headrace
