#include "core/pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>

namespace headrace {
namespace {

// About 40 us on the CPUs at hand (a pause is 40 to 140 cycles): longer than any balanced phase's imbalance, shorter
// than a scheduler slice.
constexpr int kSpins = 2000;
// Between steps a worker yields this long before it parks: a decode loop comes back within it.
constexpr auto kYieldTime = std::chrono::microseconds(800);
// Bits of an epoch that say how many threads are active.
constexpr uint32_t kActiveBits = 9;
constexpr uint32_t kActiveMask = (1u << kActiveBits) - 1;

// The least that Linux takes. Its own is 0.7 to 3 ms, and longer than a whole decode step.
constexpr uint64_t kSliceNs = 100'000;

// The kernel's struct sched_attr, which glibc does not declare before 2.41.
struct SchedAttributes {
  uint32_t size = sizeof(SchedAttributes), policy = 0;
  uint64_t flags = 0;
  int32_t nice = 0;
  uint32_t priority = 0;
  uint64_t runtime_ns = 0, deadline_ns = 0, period_ns = 0;
};

// Asks for short slices on the calling thread (Linux 6.12 and later): beside busy neighbours it gets as much of its
// core as before, in pieces that a phase can wait for. Policy and nice value stay. A refusal changes nothing.
void shorten_slice() {
  SchedAttributes attributes;
  if (syscall(SYS_sched_getattr, 0, &attributes, sizeof(attributes), 0) != 0) return;
  if (attributes.policy != SCHED_OTHER && attributes.policy != SCHED_BATCH) return;
  attributes.size = sizeof(attributes);
  attributes.flags &= 1;  // whether children start afresh; what else is reported is of other policies
  attributes.runtime_ns = kSliceNs;
  syscall(SYS_sched_setattr, 0, &attributes, 0);
}

}  // namespace

void Barrier::wait() {
  if (threads_ == 1) return;
  const uint32_t epoch = epoch_.load(std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) == threads_ - 1) {
    arrived_.store(0, std::memory_order_relaxed);
    epoch_.store(epoch + 1, std::memory_order_release);
    return;
  }
  for (int spin = 0; spin < kSpins; ++spin) {
    if (epoch_.load(std::memory_order_acquire) != epoch) return;
    pause_cpu();
  }
  while (epoch_.load(std::memory_order_acquire) == epoch) sched_yield();
}

Pool::Pool(int32_t threads) : threads_(threads), active_(threads), barrier_(threads) {
  // Signals belong to the caller's thread: a handler of the interpreter must never run in here.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    workers_.reserve(static_cast<size_t>(threads - 1));
    for (int32_t thread = 1; thread < threads; ++thread) workers_.emplace_back([this, thread] { serve(thread); });
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    is_stopping_ = true;
    epoch_.fetch_add(1);
    epoch_.notify_all();
    for (auto& worker : workers_) worker.join();
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Pool::~Pool() {
  is_stopping_ = true;
  epoch_.fetch_add(1);
  epoch_.notify_all();
  for (auto& worker : workers_) worker.join();
}

void Pool::set_active(int32_t active) {
  active_ = active;
  barrier_.set_threads(active);
}

void Pool::run(Task task, void* context) {
  thread_local bool has_short_slice = false;
  if (!has_short_slice) {
    shorten_slice();
    has_short_slice = true;
  }
  if (active_ == 1) return task(context, 0);
  task_ = task;
  context_ = context;
  running_.store(active_ - 1, std::memory_order_relaxed);
  const uint32_t number = (epoch_.load(std::memory_order_relaxed) >> kActiveBits) + 1;
  epoch_.store(number << kActiveBits | static_cast<uint32_t>(active_), std::memory_order_seq_cst);
  // Pairs with the increment in wait_for_work: either we see the parked worker, or it sees the new epoch.
  if (parked_.load(std::memory_order_seq_cst) > 0) epoch_.notify_all();
  task(context, 0);
  for (int spin = 0; running_.load(std::memory_order_acquire) != 0; ++spin) {
    if (spin < kSpins) pause_cpu();
    else sched_yield();
  }
}

uint32_t Pool::wait_for_work(uint32_t seen) {
  for (int spin = 0; spin < kSpins; ++spin) {
    const uint32_t epoch = epoch_.load(std::memory_order_acquire);
    if (epoch != seen) return epoch;
    pause_cpu();
  }
  const auto deadline = std::chrono::steady_clock::now() + kYieldTime;
  while (std::chrono::steady_clock::now() < deadline) {
    const uint32_t epoch = epoch_.load(std::memory_order_acquire);
    if (epoch != seen) return epoch;
    sched_yield();
  }
  parked_.fetch_add(1, std::memory_order_seq_cst);
  epoch_.wait(seen, std::memory_order_seq_cst);
  parked_.fetch_sub(1, std::memory_order_relaxed);
  return epoch_.load(std::memory_order_acquire);
}

void Pool::serve(int32_t thread) {
  shorten_slice();
  uint32_t seen = 0;
  while (true) {
    seen = wait_for_work(seen);
    if (is_stopping_) return;
    if (thread >= static_cast<int32_t>(seen & kActiveMask)) continue;
    task_(context_, thread);
    running_.fetch_sub(1, std::memory_order_release);
  }
}

}  // namespace headrace
