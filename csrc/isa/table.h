// Fills a kernel table from one instruction set's vocabulary. Included by the per-ISA files only.
#pragma once

#include "core/kernels.h"
#include "isa/peak.h"
#include "ops/attention.h"
#include "ops/embed.h"
#include "ops/head.h"
#include "ops/linear.h"
#include "ops/moe.h"
#include "ops/norm.h"
#include "ops/pool.h"
#include "ops/qkv.h"
#include "ops/unfused.h"

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
  put(Opcode::kAttention, op_attention<Isa>);
  put(Opcode::kHead, op_head<Isa>);
  put(Opcode::kNorm, op_norm<Isa>);
  put(Opcode::kMoe, op_moe<Isa>);
  put(Opcode::kPool, op_pool<Isa>);
  put(Opcode::kPrepare, op_prepare<Isa>);
  put(Opcode::kRotate, op_rotate<Isa>);
  put(Opcode::kGate, op_gate<Isa>);
  put(Opcode::kPick, op_pick<Isa>);
  table.burn = burn<Isa>;
  return table;
}

}  // namespace headrace
