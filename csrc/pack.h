// Packing of weights into the VM's layouts (see Layout in program/opcodes.py), and back to f32.
//
// What needs no arithmetic is copied: BF16 to BF16 and F16 to F16 (a NaN becomes quiet), Q8_0, Q5_0 and Q4_0 to Q8,
// Q4_0 to Q4, Q4_1 to Q4M, Q4_0 to Q4M with min = -8 · scale. Q4_K to Q4M keeps the integers and rounds scale and
// minimum to f16. Everything else goes through f32.
#pragma once

#include <cstdint>

#include "blocks.h"
#include "gen/opcodes.h"

namespace headrace {

int64_t packed_bytes(Layout layout, int64_t n, int64_t k);

// `out` holds packed_bytes; k is a multiple of 32 and of the source's block. Throws std::invalid_argument when a weight
// that must be quantised is not finite or too large for an f16 scale.
void pack(Layout layout, Source source, const uint8_t* raw, int64_t n, int64_t k, int32_t threads, uint8_t* out);

// out: [n][k] f32.
void unpack(Layout layout, const uint8_t* data, int64_t n, int64_t k, float* out);

}  // namespace headrace
