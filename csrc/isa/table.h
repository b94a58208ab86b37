// Fills a kernel table from one instruction set's vocabulary. Included by the per-ISA files only.
#pragma once

#include "core/kernels.h"
#include "ops/embed.h"
#include "ops/linear.h"
#include "ops/qkv.h"
#if __has_include("ops/attention.h")
#include "ops/attention.h"
#define HEADRACE_HAS_ATTENTION
#endif
#if __has_include("ops/head.h")
#include "ops/head.h"
#define HEADRACE_HAS_HEAD
#endif

namespace headrace {

template <class Isa>
constexpr KernelTable make_table() {
  KernelTable table{.isa = Isa::kName};
  const auto put = [&](Opcode opcode, Op op) {
    table.ops[static_cast<int>(opcode)] = op;
    table.names[static_cast<int>(opcode)] = Isa::kName;
  };
  put(Opcode::kEmbed, op_embed<Isa>);
  put(Opcode::kLinear, op_linear<Isa>);
  put(Opcode::kQkv, op_qkv<Isa>);
#ifdef HEADRACE_HAS_ATTENTION
  put(Opcode::kAttention, op_attention<Isa>);
#endif
#ifdef HEADRACE_HAS_HEAD
  put(Opcode::kHead, op_head<Isa>);
#endif
  return table;
}

}  // namespace headrace
