#include "blocks.h"

#include <cstring>

#include "isa/scalar.h"

namespace headrace {
namespace {

constexpr int64_t kSuper = 256;  // weights of a block with scales of its own scales (Q4_K and its kin)

uint16_t half_at(const uint8_t* p) {
  uint16_t value;
  std::memcpy(&value, p, sizeof value);
  return value;
}
float float_at(const uint8_t* p) { return scalar::f16_to_f32(half_at(p)); }

// Low nibbles are elements 0..15, high nibbles 16..31.
int nibble_at(const uint8_t* q, int i) { return i < 16 ? q[i] & 15 : q[i - 16] >> 4; }
// The same with a fifth bit from 32 bits.
int five_bits_at(const uint8_t* q, uint32_t high, int i) {
  return nibble_at(q, i) | static_cast<int>(high >> i & 1) << 4;
}
uint32_t bits_at(const uint8_t* p) {
  uint32_t value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

// Six-bit scale and minimum of group j (0..7) from twelve bytes: 0..3 lie in the low bits of bytes j and 4 + j; 4..7
// have their low four bits in byte 8 + j − 4 and their high two on top of those.
struct Sixes {
  int scale, min;
};
Sixes sixes_at(const uint8_t* s, int64_t j) {
  if (j < 4) return {s[j] & 63, s[4 + j] & 63};
  return {(s[4 + j] & 15) | (s[j - 4] >> 6) << 4, s[4 + j] >> 4 | (s[j] >> 6) << 4};
}

// Q6_K: 128 bytes of low nibbles, 64 of high pairs, 16 int8 scales (one per 16 weights), f16. Half h (0, 1) of a block
// has 64 nibble bytes, low ones for its groups 0 and 1, high ones for 2 and 3, and 32 bytes of pairs, two bits per
// group.
void read_q6_k(const uint8_t* block, int64_t g, float* out) {
  const int64_t half = g / 4, quarter = g % 4;
  const uint8_t* low = block + half * 64 + quarter % 2 * kGroup;
  const uint8_t* high = block + 128 + half * kGroup;
  const auto* scales = reinterpret_cast<const int8_t*>(block + 192) + 2 * g;
  const float unit = float_at(block + 208);
  for (int i = 0; i < kGroup; ++i) {
    const int nibble = quarter < 2 ? low[i] & 15 : low[i] >> 4;
    const int q = (nibble | (high[i] >> (2 * quarter) & 3) << 4) - 32;
    out[i] = unit * static_cast<float>(scales[i / 16]) * static_cast<float>(q);
  }
}

const uint8_t* block_at(Source source, const uint8_t* row, int64_t g) {
  return row + g * kGroup / block_values(source) * block_bytes(source);
}

}  // namespace

int64_t block_values(Source source) {
  return source == Source::kQ4_K || source == Source::kQ5_K || source == Source::kQ6_K ? kSuper : kGroup;
}

int64_t block_bytes(Source source) {
  switch (source) {
    case Source::kF32: return 128;
    case Source::kBf16:
    case Source::kF16: return 64;
    case Source::kQ8_0: return 34;
    case Source::kQ4_0: return 18;
    case Source::kQ4_1: return 20;
    case Source::kQ5_0: return 22;
    case Source::kQ5_1: return 24;
    case Source::kQ4_K: return 144;
    case Source::kQ5_K: return 176;
    case Source::kQ6_K: return 210;
  }
  return 0;
}

int64_t source_bytes(Source source, int64_t n, int64_t k) {
  return n * (k / block_values(source)) * block_bytes(source);
}

bool is_scaled(Source source) { return source == Source::kQ8_0 || source == Source::kQ4_0 || source == Source::kQ5_0; }

ScaledGroup read_scaled(Source source, const uint8_t* row, int64_t g) {
  const uint8_t* block = block_at(source, row, g);
  ScaledGroup group{half_at(block), {}};
  if (source == Source::kQ8_0) {
    std::memcpy(group.q, block + 2, kGroup);
  } else if (source == Source::kQ4_0) {
    for (int i = 0; i < kGroup; ++i) group.q[i] = static_cast<int8_t>(nibble_at(block + 2, i) - 8);
  } else {
    const uint32_t high = bits_at(block + 2);
    for (int i = 0; i < kGroup; ++i) group.q[i] = static_cast<int8_t>(five_bits_at(block + 6, high, i) - 16);
  }
  return group;
}

AffineGroup read_affine(Source source, const uint8_t* row, int64_t g) {
  const uint8_t* block = block_at(source, row, g);
  AffineGroup group{float_at(block), float_at(block + 2), {}};
  if (source == Source::kQ4_1) {
    for (int i = 0; i < kGroup; ++i) group.q[i] = static_cast<uint8_t>(nibble_at(block + 4, i));
    return group;
  }
  if (source == Source::kQ5_1) {
    const uint32_t high = bits_at(block + 4);
    for (int i = 0; i < kGroup; ++i) group.q[i] = static_cast<uint8_t>(five_bits_at(block + 8, high, i));
    return group;
  }
  // Groups 2p and 2p + 1 of a block are the low and the high nibbles of 32 bytes. Q5_K has 32 bytes of fifth bits
  // before them, bit j for group j.
  const int64_t j = g % (kSuper / kGroup);
  const Sixes sixes = sixes_at(block + 4, j);
  group.scale *= static_cast<float>(sixes.scale);
  group.min *= -static_cast<float>(sixes.min);
  const bool is_five = source == Source::kQ5_K;
  const uint8_t* nibbles = block + (is_five ? 48 : 16) + j / 2 * kGroup;
  for (int i = 0; i < kGroup; ++i) {
    const int nibble = j % 2 == 0 ? nibbles[i] & 15 : nibbles[i] >> 4;
    group.q[i] = static_cast<uint8_t>(is_five ? nibble | (block[16 + i] >> j & 1) << 4 : nibble);
  }
  return group;
}

void read_group(Source source, const uint8_t* row, int64_t g, float* out) {
  switch (source) {
    case Source::kF32: std::memcpy(out, row + g * kGroup * 4, kGroup * sizeof(float)); return;
    case Source::kBf16:
      for (int i = 0; i < kGroup; ++i) out[i] = scalar::bf16_to_f32(half_at(row + 2 * (g * kGroup + i)));
      return;
    case Source::kF16:
      for (int i = 0; i < kGroup; ++i) out[i] = float_at(row + 2 * (g * kGroup + i));
      return;
    case Source::kQ8_0:
    case Source::kQ4_0:
    case Source::kQ5_0: {
      const ScaledGroup group = read_scaled(source, row, g);
      const float scale = scalar::f16_to_f32(group.scale);
      for (int i = 0; i < kGroup; ++i) out[i] = static_cast<float>(group.q[i]) * scale;
      return;
    }
    case Source::kQ4_1:
    case Source::kQ5_1:
    case Source::kQ4_K:
    case Source::kQ5_K: {
      const AffineGroup group = read_affine(source, row, g);
      for (int i = 0; i < kGroup; ++i) out[i] = static_cast<float>(group.q[i]) * group.scale + group.min;
      return;
    }
    case Source::kQ6_K: read_q6_k(block_at(source, row, g), g % (kSuper / kGroup), out); return;
  }
}

void dequantise(Source source, const uint8_t* raw, int64_t n, int64_t k, float* out) {
  const int64_t row_bytes = source_bytes(source, 1, k);
  for (int64_t row = 0; row < n; ++row)
    for (int64_t g = 0; g < k / kGroup; ++g) read_group(source, raw + row * row_bytes, g, out + row * k + g * kGroup);
}

}  // namespace headrace
