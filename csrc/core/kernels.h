// The table of kernels that one instruction set offers, filled once per translation unit (isa_*.cpp).
// An op runs its record on all threads: each thread calls it, does its share, and may use the context's barrier inside.
// The VM puts a barrier between phases.
#pragma once

#include "core/step.h"

namespace headrace {

using Op = void (*)(const Record&, const ThreadContext&);

struct KernelTable {
  const char* isa;                    // "scalar", "avx2", "avx512"
  Op ops[kOpcodeCount];               // by opcode, nullptr where none
  const char* names[kOpcodeCount];    // what doctor prints, e.g. "linear<avx2>"
  // Bytes of scratch that any op of this table needs, given the program's limits (see vm.cpp).
};

const KernelTable* kernels_scalar();
const KernelTable* kernels_avx2();      // nullptr when compiled without it
const KernelTable* kernels_avx512();

}  // namespace headrace
