// Every op, compiled for scalar.
#include "isa/scalar.h"
#include "isa/table.h"

namespace headrace {
namespace {

// Constant, so that looking at it runs no code of this instruction set.
constexpr KernelTable kTable = make_table<scalar::Isa>();

}  // namespace

const KernelTable* kernels_scalar() { return &kTable; }

}  // namespace headrace
