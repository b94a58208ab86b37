// Every op, compiled for avx512bf16.
#include "isa/avx512.h"
#include "isa/table.h"

namespace headrace {
namespace {

// Constant, so that looking at it runs no code of this instruction set.
constexpr KernelTable kTable = make_table<avx512bf16::Isa>();

}  // namespace

const KernelTable* kernels_avx512bf16() { return &kTable; }

}  // namespace headrace
