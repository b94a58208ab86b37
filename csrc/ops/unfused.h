// Parts of the fused instructions, each for itself: PREPARE, ROTATE, GATE, PICK. The arithmetic is that of the
// instructions they are parts of, so a program taken apart gives the same bits (program/unfuse.py).
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "core/step.h"
#include "ops/math.h"
#include "ops/prologue.h"
#include "ops/qkv.h"

namespace headrace {

// Threads own rows.
template <class Isa>
void op_prepare(const Record& record, const ThreadContext& context) {
  const auto r = record.as<PrepareRecord>();
  const int32_t rows = rows_of(static_cast<Domain>(r.domain), *context.step);
  const Prologue prologue{
      .layout = context.weights[r.weight].layout, .input = context.buffer<const float>(r.input), .k = r.k};
  const Activations to = place_rows(context.buffer<uint8_t>(r.out), rows, r.k);
  const Range range = share(rows, context.thread, context.threads);
  for (int64_t row = range.start; row < range.stop; ++row) {
    prepare_row<Isa>(prologue, prologue.input + row * r.k, row, to);
  }
}

// Threads own heads, not rows: two tokens share a pair of a V page.
template <class Isa>
void op_rotate(const Record& record, const ThreadContext& context) {
  const auto r = record.as<RotateRecord>();
  const HeadWriter<Isa, RotateRecord> writer(r, context);
  const int64_t size = r.head_size;
  const int32_t heads = r.heads + 2 * r.kv_heads;
  const bool is_whole = r.keys < 0;
  auto* scratch = reinterpret_cast<float*>(context.scratch);
  const Range mine = share(heads, context.thread, context.threads);
  for (int64_t index = mine.start; index < mine.stop; ++index) {
    const auto head = writer.head(index);
    const bool is_query = head.query >= 0;
    const int64_t offset = is_whole || is_query ? r.q : head.is_key ? r.keys : r.values;
    const int64_t width = size * (is_whole ? heads : is_query ? r.heads : r.kv_heads);
    const int64_t column = size * (is_whole || is_query ? index : head.kv_head);
    const float* from = context.buffer<const float>(offset) + column;
    for (int32_t row = 0; row < context.step->rows(); ++row) {
      std::memcpy(scratch, from + row * width, static_cast<size_t>(size) * 4);
      writer.finish(row, head, scratch);
    }
  }
}

// Threads own sixteens of the rows' elements, all rows one after the other.
template <class Isa>
void op_gate(const Record& record, const ThreadContext& context) {
  const auto r = record.as<GateRecord>();
  const float* gate = context.buffer<const float>(r.gate);
  const float* up = r.up < 0 ? nullptr : context.buffer<const float>(r.up);
  float* out = context.buffer<float>(r.out);
  const auto activation = static_cast<Activation>(r.activation);
  const int64_t lanes = int64_t{context.step->rows()} * r.width / kLanes;
  const Range range = share(lanes, context.thread, context.threads);
  Math<Isa>::with(activation, [&](auto activate) {
    for (int64_t i = range.start * kLanes; i < range.stop * kLanes; i += kLanes) {
      const auto y = activate(Isa::load(gate + i));
      Isa::store(out + i, up == nullptr ? y : Isa::mul(y, Isa::load(up + i)));
    }
  });
}

template <class Isa>
void op_pick(const Record& record, const ThreadContext& context) {
  const auto r = record.as<PickRecord>();
  const float* from = context.buffer<const float>(r.input);
  float* out = context.buffer<float>(r.out);
  const auto width = static_cast<size_t>(r.k) * 4;
  const Range range = share(context.step->num_outputs(), context.thread, context.threads);
  for (int64_t i = range.start; i < range.stop; ++i) {
    std::memcpy(out + i * r.k, from + int64_t{context.step->outputs[static_cast<size_t>(i)].row} * r.k, width);
  }
}

}  // namespace headrace
