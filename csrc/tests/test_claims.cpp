// Every unit of every round has one taker, and a thread that does not come leaves its part to the others.
#include <atomic>
#include <thread>
#include <vector>

#include "core/claims.h"
#include "tests/check.h"

namespace headrace::tests {
namespace {

struct Crew {
  explicit Crew(int32_t threads) : threads(threads), parts(static_cast<size_t>(threads)), rounds(parts.size()) {}
  ThreadContext context(int32_t thread) {
    ThreadContext context;
    context.thread = thread;
    context.threads = threads;
    context.parts = parts.data();
    context.rounds = &rounds[static_cast<size_t>(thread)];
    return context;
  }
  const int32_t threads;
  std::vector<Taken> parts;
  std::vector<Rounds> rounds;
};

void each_unit_has_one_taker() {
  // No barrier between the rounds: threads may be rounds apart.
  constexpr int64_t kCounts[] = {0, 1, 2, 3, 17, 96, 1000};
  constexpr int kRepeats = 200;
  for (const int32_t threads : {1, 2, 5}) {
    Crew crew(threads);
    std::vector<std::vector<std::atomic<int>>> takers;
    for (int repeat = 0; repeat < kRepeats; ++repeat)
      for (const int64_t count : kCounts) takers.emplace_back(static_cast<size_t>(count));
    std::vector<std::thread> running;
    for (int32_t t = 0; t < threads; ++t) {
      running.emplace_back([&, t] {
        const ThreadContext context = crew.context(t);
        for (auto& round : takers) {
          Claims claims(context, static_cast<int64_t>(round.size()));
          for (Range range; claims.next(range);)
            for (int64_t unit = range.start; unit < range.stop; ++unit) ++round[static_cast<size_t>(unit)];
        }
      });
    }
    for (std::thread& thread : running) thread.join();
    int wrong = 0;
    for (const auto& round : takers)
      for (const std::atomic<int>& count : round) wrong += count != 1;
    check(wrong == 0, std::to_string(wrong) + " units without one taker, " + std::to_string(threads) + " threads");
  }
}

void the_part_of_an_absent_thread_is_taken() {
  Crew crew(3);
  int64_t taken = 0;
  Claims first(crew.context(1), 90);
  Range range;
  check(first.next(range) && range.start == 30 && range.stop == 45, "a thread starts with half of its own part");
  Claims second(crew.context(2), 90);
  for (; second.next(range);) taken += range.stop - range.start;
  check(taken == 90 - 15, "another takes all that nobody has begun");
  check(!first.next(range), "nothing is left for the first");
  // The absent one comes when the others are a round further.
  Claims third(crew.context(2), 10);
  for (; third.next(range);) continue;
  Claims late(crew.context(0), 90);
  check(!late.next(range), "a round that is over gives nothing");
}

}  // namespace
}  // namespace headrace::tests

int main() {
  using namespace headrace::tests;
  each_unit_has_one_taker();
  the_part_of_an_absent_thread_is_taken();
  return report("claims");
}
