// How the threads of a step share the units of a product: each starts on a part of its own, in chunks that halve, and
// then takes what others have not begun. A thread whose core is slower, or taken from it, keeps the others waiting for
// a chunk at most, not for the rest of its part.
//
// Who gets a unit changes from run to run, so nothing may depend on it: a unit writes what no other unit writes, and
// its bits come from its place alone.
#pragma once

#include <atomic>
#include <cstdint>

#include "core/step.h"

namespace headrace {

// How far one thread's part is taken: number of the round in the upper half, units in the lower. In a line of its own.
struct alignas(kAlign) Taken {
  std::atomic<uint64_t> units{0};
};

// Rounds that a thread has begun in this step. All threads begin the same ones, in the same order; a thread may be
// ahead of another by rounds without a barrier between, for it leaves a round only when nothing of it is left to take.
struct alignas(kAlign) Rounds {
  uint32_t count = 0;
};

// One thread's way through one round: `count` units, the same number on all threads.
class Claims {
 public:
  [[gnu::always_inline]] Claims(const ThreadContext& context, int64_t count)
      : parts_(context.parts),
        count_(count),
        threads_(context.threads),
        victim_(context.thread),
        round_(uint64_t{++context.rounds->count} << 32) {}

  // Whether there is more; `units` are then this thread's to compute.
  [[gnu::always_inline]] bool next(Range& units) {
    while (tried_ < threads_) {
      if (take(units)) return true;
      ++tried_;
      victim_ = victim_ + 1 == threads_ ? 0 : victim_ + 1;
    }
    return false;
  }

 private:
  [[gnu::always_inline]] bool take(Range& units) {
    const Range part = share(count_, victim_, threads_);
    const auto size = static_cast<uint64_t>(part.stop - part.start);
    std::atomic<uint64_t>& taken = parts_[victim_].units;
    uint64_t seen = taken.load(std::memory_order_relaxed);
    while (true) {
      // A word of a later round is larger than any part.
      const uint64_t done = seen < round_ ? 0 : seen - round_;
      if (done >= size) return false;
      const uint64_t grabbed = threads_ == 1 ? size : (size - done + 1) / 2;
      // Nothing is passed on by a claim: what the units read was ordered by the barrier before.
      if (taken.compare_exchange_weak(seen, round_ + done + grabbed, std::memory_order_relaxed)) {
        units.start = part.start + static_cast<int64_t>(done);
        units.stop = units.start + static_cast<int64_t>(grabbed);
        return true;
      }
    }
  }

  Taken* parts_;
  int64_t count_;
  int32_t threads_, victim_, tried_ = 0;
  uint64_t round_;
};

// What a sweep goes over: units that this thread has already, or a round of units that all threads share.
struct OwnUnits {
  Range range;
  template <class Fn>
  [[gnu::always_inline]] void each(Fn fn) const {
    fn(range);
  }
};
struct SharedUnits {
  const ThreadContext& context;
  int64_t count;
  template <class Fn>
  [[gnu::always_inline]] void each(Fn fn) const {
    Claims claims(context, count);
    for (Range range; claims.next(range);) fn(range);
  }
};

}  // namespace headrace
