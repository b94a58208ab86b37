// The table of kernels that one instruction set offers, filled once per translation unit (isa_*.cpp).
// An op runs its record on all threads: each thread calls it, does its share, and may use the context's barrier inside.
// The VM puts a barrier between phases.
#pragma once

#include "core/step.h"

namespace headrace {

using Op = void (*)(const Record&, const ThreadContext&);

// What the products of a matrix are computed in.
enum class Arithmetic { kInt8, kBf16, kFp32 };

struct KernelTable {
  const char* isa;                       // "scalar", "avx2", "avx512", "avx512bf16"
  Op ops[kOpcodeCount] = {};             // by opcode, nullptr where none
  const char* names[kOpcodeCount] = {};  // which instruction set each op was written in, e.g. "avx2"
  // Multiplies and adds in registers for `rounds` rounds; returns the operations done, multiply and add as two.
  int64_t (*burn)(Arithmetic kind, int64_t rounds) = nullptr;
};

// nullptr where this build does not hold them.
const KernelTable* kernels_scalar();
const KernelTable* kernels_avx2();
const KernelTable* kernels_avx512();
const KernelTable* kernels_avx512bf16();

}  // namespace headrace
