// The threads of a pool ask for short slices, and keep the policy and the nice value that the process has.
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>

#include "core/pool.h"
#include "tests/check.h"

namespace headrace::tests {
namespace {

struct Attributes {
  uint32_t size = 0, policy = 0;
  uint64_t flags = 0;
  int32_t nice = 0;
  uint32_t priority = 0;
  uint64_t runtime_ns = 0, deadline_ns = 0, period_ns = 0;
};

Attributes mine() {
  Attributes attributes;
  check(syscall(SYS_sched_getattr, 0, &attributes, sizeof(attributes), 0) == 0, "the system tells a thread's slice");
  return attributes;
}

void slices_are_short_and_nothing_else_changes() {
  const Attributes before = mine();
  if (before.policy != SCHED_OTHER) return;
  std::array<Attributes, 3> seen;
  Pool pool(static_cast<int32_t>(seen.size()));
  pool.run([](void* context, int32_t t) { static_cast<Attributes*>(context)[t] = mine(); }, seen.data());
  for (const Attributes& now : seen) {
    // Linux before 6.12 tells none: 0.
    check(now.runtime_ns <= 100'000, "a slice of " + std::to_string(now.runtime_ns) + " ns");
    check(now.policy == before.policy && now.nice == before.nice, "policy and nice value stay");
  }
}

}  // namespace
}  // namespace headrace::tests

int main() {
  headrace::tests::slices_are_short_and_nothing_else_changes();
  return headrace::tests::report("pool");
}
