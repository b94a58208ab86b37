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
    for (; kept < limit && !is_cut; ) {
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

  // Order of floats as unsigned integers, larger first when descending.
  static uint32_t order(float key) {
    const auto bits = std::bit_cast<uint32_t>(key);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  }

  // The entry at which a best-first prefix ends: keys of greater order are in, and the first `equal` ids of this order.
  struct Cut {
    uint32_t order = 0;
    int32_t equal = 0;
  };

  // Finds where the running measure of the best-first list reaches `goal`, by radix on the order in three levels.
  // measure(i) ≥ 0 says what id i adds (0: not in the list). `bins` is scratch of kBins.
  static constexpr int32_t kBins = 2048;
  template <typename Measure>
  static Cut find_cut(const float* keys, int32_t count, double goal, Measure measure, double* bins) {
    constexpr int kShifts[3] = {21, 10, 0};
    constexpr uint32_t kSizes[3] = {2048, 2048, 1024};
    uint32_t prefix = 0, prefix_mask = 0;
    double above = 0.0;  // measure of the keys above the prefix
    for (int level = 0; level < 3; ++level) {
      for (uint32_t b = 0; b < kSizes[level]; ++b) bins[b] = 0.0;
      for (int32_t i = 0; i < count; ++i) {
        const uint32_t rank = order(keys[i]);
        if ((rank & prefix_mask) == prefix) bins[(rank >> kShifts[level]) & (kSizes[level] - 1)] += measure(i);
      }
      // The lowest bin that holds something ends the list when rounding keeps the goal out of reach.
      uint32_t bin = 0, lowest = 0;
      bool is_found = false;
      double sum = above, before = above;
      for (uint32_t b = kSizes[level]; b-- > 0 && !is_found;) {
        if (!(bins[b] > 0.0)) continue;
        before = sum;
        sum += bins[b];
        lowest = b;
        if (sum >= goal) bin = b, is_found = true;
      }
      if (!is_found) bin = lowest;
      above = before;
      prefix |= bin << kShifts[level];
      prefix_mask |= (kSizes[level] - 1) << kShifts[level];
    }
    Cut cut{prefix, 0};
    for (int32_t i = 0; i < count; ++i) {
      if (order(keys[i]) != prefix) continue;
      const double more = measure(i);
      if (!(more > 0.0)) continue;
      if (cut.equal > 0 && above >= goal) break;
      above += more;
      ++cut.equal;
    }
    return cut;
  }

  // Sets to zero the weight of every id outside the cut.
  static void apply_cut(const float* keys, float* weights, int32_t count, Cut cut) {
    int32_t equal = 0;
    for (int32_t i = 0; i < count; ++i) {
      const uint32_t rank = order(keys[i]);
      if (rank > cut.order) continue;
      if (rank == cut.order && weights[i] > 0.0f && equal < cut.equal) {
        ++equal;
        continue;
      }
      weights[i] = 0.0f;
    }
  }

  // Chooses from a whole row of logits (padded to whole lanes with -inf). `weights` and `bins` are scratch.
  static int32_t choose_from_row(const OutputRow& o, const float* keys, int32_t count, double uniform, float* weights,
                                 double* bins) {
    const int32_t padded = (count + kLanes - 1) / kLanes * kLanes;
    auto top = Isa::set1(kMinusInf);
    for (int32_t i = 0; i < padded; i += kLanes) top = Isa::max(top, Isa::load(keys + i));
    const float best = Isa::reduce_max(top);
    if (best == kMinusInf) return -1;
    const auto shift = Isa::set1(best), inverse = Isa::set1(1.0f / o.temperature);
    for (int32_t i = 0; i < padded; i += kLanes) {
      const auto x = Isa::mul(Isa::sub(Isa::load(keys + i), shift), inverse);
      Isa::store(weights + i, Math<Isa>::exp_nonpositive(x));
    }
    const auto mass = [&](int32_t i) { return static_cast<double>(weights[i]); };
    if (o.top_k > 0 && o.top_k < count) {
      const auto one = [&](int32_t i) { return weights[i] > 0.0f ? 1.0 : 0.0; };
      apply_cut(keys, weights, count, find_cut(keys, count, o.top_k, one, bins));
    }
    if (o.top_p < 1.0f) {
      double total = 0.0;
      for (int32_t i = 0; i < count; ++i) total += mass(i);
      apply_cut(keys, weights, count, find_cut(keys, count, static_cast<double>(o.top_p) * total, mass, bins));
    }
    double total = 0.0;
    for (int32_t i = 0; i < count; ++i) {
      if (weights[i] < o.min_p) weights[i] = 0.0f;
      total += mass(i);
    }
    return draw(uniform * total, count, mass);
  }
};

}  // namespace headrace
