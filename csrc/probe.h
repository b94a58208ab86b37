// What this machine gives: instruction sets, read bandwidth, the cost of a barrier.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "core/kernels.h"

namespace headrace {

// Features that the kernels ask about, with whether the CPU and the operating system offer them.
std::vector<std::pair<std::string, bool>> cpu_features();

// Tables that this build holds and this CPU runs, best last; "scalar" is always first.
std::vector<const KernelTable*> available_kernels();
// The table of that name, or nullptr.
const KernelTable* find_kernels(const std::string& isa);

// Bytes per second that `threads` threads read together from a buffer of `size_bytes`, over about `seconds`.
double probe_bandwidth(int64_t size_bytes, int32_t threads, double seconds);
// Operations per second, multiply and add as two, that `threads` threads reach together in registers: the best pass
// within about `seconds`. An instruction set without instructions of that kind computes it in fp32.
double probe_peak(const KernelTable& kernels, Arithmetic kind, int32_t threads, double seconds);
// Seconds that one barrier of `threads` threads takes, median of batches.
double probe_barrier(int32_t threads);

}  // namespace headrace
