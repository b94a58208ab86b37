// Stored weights as files hold them: plain floats and the blocks of GGUF, read 32 weights at a time.
//
// What comes out is bit for bit what the `gguf` package's reference gives: every product and sum is rounded by itself.
#pragma once

#include <cstdint>

#include "gen/opcodes.h"

namespace headrace {

// Row-major source of [n][k] weights. The names in program order are what bind.cpp takes.
enum class Source { kF32, kBf16, kF16, kQ8_0, kQ4_0, kQ4_1, kQ5_0, kQ5_1, kQ4_K, kQ5_K, kQ6_K };
inline constexpr const char* kSourceNames[] = {"F32",  "BF16", "F16",  "Q8_0", "Q4_0", "Q4_1",
                                               "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"};

// Weights that share a block, and the bytes it takes.
int64_t block_values(Source source);
int64_t block_bytes(Source source);
// Of an [n][k] source.
int64_t source_bytes(Source source, int64_t n, int64_t k);

// Weights [32·g, 32·g + 32) of a row as f32.
void read_group(Source source, const uint8_t* row, int64_t g, float* out);

// A group that is one scale, one minimum and whole numbers: w = q · scale + min. Q4_1, Q5_1, Q4_K and Q5_K.
struct AffineGroup {
  float scale, min;
  uint8_t q[kGroup];
};
AffineGroup read_affine(Source source, const uint8_t* row, int64_t g);

// A group that is one f16 scale and whole numbers: w = q · scale. Q8_0, Q4_0 (−8 … 7) and Q5_0 (−16 … 15).
struct ScaledGroup {
  uint16_t scale;
  int8_t q[kGroup];
};
bool is_scaled(Source source);
ScaledGroup read_scaled(Source source, const uint8_t* row, int64_t g);

// out: [n][k] f32.
void dequantise(Source source, const uint8_t* raw, int64_t n, int64_t k, float* out);

}  // namespace headrace
