// Every op, compiled for avx2.
#include "isa/avx2.h"
#include "isa/table.h"

namespace headrace {
namespace {

// Constant, so that looking at it runs no code of this instruction set.
constexpr KernelTable kTable = make_table<avx2::Isa>();

}  // namespace

const KernelTable* kernels_avx2() { return &kTable; }

}  // namespace headrace
