// Every op, compiled for avx512.
#include "isa/avx512.h"
#include "isa/table.h"

namespace headrace {
namespace {

// Constant, so that looking at it runs no code of this instruction set.
constexpr KernelTable kTable = make_table<avx512::Isa>();

}  // namespace

const KernelTable* kernels_avx512() { return &kTable; }

}  // namespace headrace
