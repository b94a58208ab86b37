// Threads that run a step, and the barrier between its phases. The caller is thread 0. A step may use fewer than all:
// the others stay parked.
//
// Waiting costs: spin for the usual case (peers finish within microseconds), then yield (a peer has lost its core),
// and between steps park on a futex (nothing to do). Pure spinning was 40x slower when other processes run. All threads
// ask for the shortest scheduler slices: a peer that has lost its core comes back soon.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "core/limits.h"

namespace headrace {

inline void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// All `threads` must arrive before any leaves. Reusable; orders memory between the phases.
class Barrier {
 public:
  explicit Barrier(int32_t threads) : threads_(threads) {}
  void wait();
  // Only while nobody waits.
  void set_threads(int32_t threads) { threads_ = threads; }

 private:
  int32_t threads_;
  alignas(kAlign) std::atomic<int32_t> arrived_{0};
  alignas(kAlign) std::atomic<uint32_t> epoch_{0};
};

class Pool {
 public:
  using Task = void (*)(void* context, int32_t thread);

  explicit Pool(int32_t threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // Runs task(context, t) on the active threads and returns when all have finished. One caller at a time.
  void run(Task task, void* context);
  // Threads 0 … active − 1 run from now on. Between runs only.
  void set_active(int32_t active);
  int32_t threads() const { return threads_; }
  Barrier& barrier() { return barrier_; }

 private:
  void serve(int32_t thread);
  uint32_t wait_for_work(uint32_t seen);

  const int32_t threads_;
  int32_t active_;
  Barrier barrier_;
  Task task_ = nullptr;
  void* context_ = nullptr;
  std::atomic<bool> is_stopping_{false};  // a thread that sits a run out may look while the pool ends
  // One word, so that a thread that comes late never takes the count of another run: the number of the run in the upper
  // bits, its active threads below. Runs of one thread do not count.
  alignas(kAlign) std::atomic<uint32_t> epoch_{0};
  alignas(kAlign) std::atomic<int32_t> running_{0};  // workers that have not finished the run
  alignas(kAlign) std::atomic<int32_t> parked_{0};   // workers in, or about to enter, the futex
  std::vector<std::thread> workers_;
};

}  // namespace headrace
