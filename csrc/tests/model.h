// Random numbers, and a program in the making: weights, buffers, records. For the C++ tests.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "core/memory.h"
#include "core/step.h"
#include "ops/product.h"
#include "pack.h"

namespace headrace::tests {

// xorshift64*: the same numbers on every machine.
struct Random {
  uint64_t state = 0x9e3779b97f4a7c15u;
  uint32_t next() {
    state ^= state >> 12, state ^= state << 25, state ^= state >> 27;
    return static_cast<uint32_t>((state * 0x2545f4914f6cdd1du) >> 32);
  }
  int32_t below(int32_t limit) { return static_cast<int32_t>(next() % static_cast<uint32_t>(limit)); }
  float real() { return static_cast<float>(next() >> 8) * 0x1p-23f - 1.0f; }
};

struct Model {
  explicit Model(int32_t max_rows) : max_rows(max_rows) {}
  const int32_t max_rows;
  std::vector<Weight> weights;
  std::vector<Memory> memories;
  std::vector<Record> records;
  int64_t arena_bytes = 0;

  int32_t add(Layout layout, int64_t n, int64_t k, const std::vector<float>& values) {
    const auto* raw = reinterpret_cast<const uint8_t*>(values.data());
    const int64_t size = is_matrix(layout) ? packed_bytes(layout, n, k) : static_cast<int64_t>(values.size()) * 4;
    Memory& memory = memories.emplace_back(size);
    if (is_matrix(layout)) pack(layout, Source::kF32, raw, n, k, 2, memory.data());
    else std::memcpy(memory.data(), raw, static_cast<size_t>(size));
    weights.push_back({layout, n, k, memory.data(), size});
    return static_cast<int32_t>(weights.size()) - 1;
  }
  static std::vector<float> random_values(Random& random, int64_t n, int64_t k) {
    std::vector<float> values(static_cast<size_t>(n * k));
    for (float& value : values) value = random.real() * 0.3f;
    return values;
  }
  int32_t random_matrix(Random& random, Layout layout, int64_t n, int64_t k) {
    return add(layout, n, k, random_values(random, n, k));
  }
  int32_t ones(int64_t n) { return add(Layout::kVectorF32, n, 0, std::vector<float>(static_cast<size_t>(n), 1.0f)); }
  int64_t buffer(int64_t width) {
    const int64_t offset = arena_bytes;
    arena_bytes += align_up(max_rows * width * 4);
    return offset;
  }
  template <typename T>
  void emit(Opcode opcode, T fields) {
    fields.opcode = static_cast<int32_t>(opcode);
    fields.phase = static_cast<int32_t>(records.size());
    Record record{};
    std::memcpy(record.bytes, &fields, sizeof fields);
    records.push_back(record);
  }
};

}  // namespace headrace::tests
