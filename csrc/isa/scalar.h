// The vocabulary that all kernels are written in, in plain C++: sixteen lanes, one per output column (or token).
// avx2.h and avx512.h offer the same struct with the same results, bit for bit: every operation is IEEE single
// precision with one rounding, fused where it says fma, and integer parts are exact. This file is the definition. One
// exception: the AVX-512 BF16 instruction behind dot_bf16 flushes denormals, so bf16 products may differ there.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "gen/opcodes.h"

namespace headrace::scalar {

static inline float bf16_to_f32(uint16_t value) { return std::bit_cast<float>(uint32_t{value} << 16); }
// Round to nearest even; NaN stays NaN.
static inline uint16_t f32_to_bf16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
static inline float f16_to_f32(uint16_t value) {
  const uint32_t sign = uint32_t{value & 0x8000u} << 16;
  const uint32_t exponent = (value >> 10) & 0x1fu;
  const uint32_t mantissa = value & 0x3ffu;
  if (exponent == 0x1f) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
  if (exponent == 0) {  // zero and subnormals: exact in f32
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude) | sign);
  }
  return std::bit_cast<float>(sign | ((exponent + 112u) << 23) | (mantissa << 13));
}

struct Isa {
  static constexpr const char* kName = "scalar";
  // Rows of one register tile of the product kernels.
  static constexpr int kTileRows = 4;

  struct F {
    float v[kLanes];
  };  // sixteen f32
  struct I {
    int32_t v[kLanes];
  };  // sixteen i32

  template <typename Fn>
  static F map(Fn fn) {
    F r;
    for (int l = 0; l < kLanes; ++l) r.v[l] = fn(l);
    return r;
  }

  static F zero() { return set1(0.0f); }
  static F set1(float x) {
    return map([&](int) { return x; });
  }
  static F load(const float* p) {
    return map([&](int l) { return p[l]; });
  }
  static F load_n(const float* p, int n) {
    return map([&](int l) { return l < n ? p[l] : 0.0f; });
  }
  static void store(float* p, F a) { std::memcpy(p, a.v, sizeof a.v); }
  static void store_n(float* p, F a, int n) { std::memcpy(p, a.v, sizeof(float) * static_cast<size_t>(n)); }
  static F load_f16(const uint16_t* p) {
    return map([&](int l) { return f16_to_f32(p[l]); });
  }
  static F load_bf16(const uint16_t* p) {
    return map([&](int l) { return bf16_to_f32(p[l]); });
  }
  static void store_bf16(uint16_t* p, F a) {
    for (int l = 0; l < kLanes; ++l) p[l] = f32_to_bf16(a.v[l]);
  }
  static F add(F a, F b) {
    return map([&](int l) { return a.v[l] + b.v[l]; });
  }
  static F sub(F a, F b) {
    return map([&](int l) { return a.v[l] - b.v[l]; });
  }
  static F mul(F a, F b) {
    return map([&](int l) { return a.v[l] * b.v[l]; });
  }
  static F div(F a, F b) {
    return map([&](int l) { return a.v[l] / b.v[l]; });
  }
  static F fma(F a, F b, F c) {
    return map([&](int l) { return std::fma(a.v[l], b.v[l], c.v[l]); });
  }  // a·b + c
  // As x86: when either is NaN the second operand is returned.
  // sum += a · b, with one rounding.
  static void accumulate(F& sum, F a, F b) { sum = fma(a, b, sum); }
  static F max(F a, F b) {
    return map([&](int l) { return a.v[l] > b.v[l] ? a.v[l] : b.v[l]; });
  }
  static F min(F a, F b) {
    return map([&](int l) { return a.v[l] < b.v[l] ? a.v[l] : b.v[l]; });
  }
  static F abs(F a) {
    return map([&](int l) { return std::fabs(a.v[l]); });
  }
  static F round(F a) {
    return map([&](int l) { return std::nearbyintf(a.v[l]); });
  }  // to nearest even
  // a · 2^n for integral n in [-126, 127] held as float.
  static F scale2(F a, F n) {
    return map([&](int l) { return a.v[l] * std::bit_cast<float>((static_cast<int32_t>(n.v[l]) + 127) << 23); });
  }
  // The last eight bits of each lane's pattern as an exponent: 2^(bits - 127), for bits of 1 … 254 below a zero.
  static F exponent(F a) {
    return map([&](int l) { return std::bit_cast<float>(std::bit_cast<uint32_t>(a.v[l]) << 23); });
  }
  // Rounded to the nearest bf16, ties to even. Not for NaN, which may become any number.
  static F round_bf16(F a) {
    return map([&](int l) {
      const auto bits = std::bit_cast<uint32_t>(a.v[l]);
      return std::bit_cast<float>((bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u);
    });
  }
  static bool has_nan(F a) {
    bool any = false;
    for (int l = 0; l < kLanes; ++l) any |= a.v[l] != a.v[l];
    return any;
  }
  // Stores 32 whole numbers of −127 … 127, first those of a, as int8, and gives their sum.
  static int32_t narrow(F a, F b, int8_t* to) {
    int32_t sum = 0;
    for (int l = 0; l < 2 * kLanes; ++l) {
      const auto value = static_cast<int32_t>(l < kLanes ? a.v[l] : b.v[l - kLanes]);
      to[l] = static_cast<int8_t>(value);
      sum += value;
    }
    return sum;
  }
  // The same for whole numbers of −32385 … 32385 as int16, each four of them as 0 2 1 3: a byte and the next but one
  // are the halves of a lane of 32 bits, which two operations take apart.
  static int32_t narrow_wide(F a, F b, int16_t* to) {
    int32_t sum = 0;
    for (int l = 0; l < 2 * kLanes; ++l) {
      const auto value = static_cast<int32_t>(l < kLanes ? a.v[l] : b.v[l - kLanes]);
      to[wide_place(l)] = static_cast<int16_t>(value);
      sum += value;
    }
    return sum;
  }
  static int wide_place(int i) { return i / 4 * 4 + (i % 4 == 1 ? 2 : i % 4 == 2 ? 1 : i % 4); }
  static F to_float(I a) {
    return map([&](int l) { return static_cast<float>(a.v[l]); });
  }
  static uint32_t greater(F a, F b) {  // bit l: a > b (false for NaN)
    uint32_t mask = 0;
    for (int l = 0; l < kLanes; ++l) mask |= uint32_t{a.v[l] > b.v[l]} << l;
    return mask;
  }
  // Lane l takes b where bit l of mask is set, else a.
  static F blend(uint32_t mask, F a, F b) {
    return map([&](int l) { return (mask >> l) & 1 ? b.v[l] : a.v[l]; });
  }
  // Lane l takes yes where a > b, else no (NaN too).
  static F select(F a, F b, F yes, F no) {
    return map([&](int l) { return a.v[l] > b.v[l] ? yes.v[l] : no.v[l]; });
  }
  // Reductions in one fixed tree: lane l with lane l+8, then l+4, l+2, l+1.
  static float reduce_add(F a) {
    for (int half = kLanes / 2; half > 0; half /= 2)
      for (int l = 0; l < half; ++l) a.v[l] += a.v[l + half];
    return a.v[0];
  }
  static float reduce_max(F a) {
    for (int half = kLanes / 2; half > 0; half /= 2)
      for (int l = 0; l < half; ++l) a.v[l] = a.v[l] > a.v[l + half] ? a.v[l] : a.v[l + half];
    return a.v[0];
  }

  // Pair product of bf16: acc + even·x0, then + odd·x1, each fused into f32, denormals as they are.
  // w: [16][2] bf16. x: two bf16, the even one in the low half.
  static F dot_bf16(F acc, const uint16_t* w, uint32_t x) {
    const float x0 = bf16_to_f32(static_cast<uint16_t>(x)), x1 = bf16_to_f32(static_cast<uint16_t>(x >> 16));
    return map(
        [&](int l) { return std::fma(bf16_to_f32(w[2 * l + 1]), x1, std::fma(bf16_to_f32(w[2 * l]), x0, acc.v[l])); });
  }

  // Exact integer products of one group of 32 for sixteen columns and M rows (row stride `stride` bytes).
  // Q8: w is [8][16][4] u8 = q + 128, result Σ q·a (the 128 is taken out with sums[m] = Σ a).
  template <int M>
  static void group_q8(const uint8_t* w, const int8_t* a, int64_t stride, const int32_t* sums, I (&out)[M]) {
    for (int m = 0; m < M; ++m)
      for (int l = 0; l < kLanes; ++l) {
        int32_t acc = 0;
        for (int j = 0; j < 8; ++j)
          for (int i = 0; i < 4; ++i) acc += int32_t{w[j * 64 + l * 4 + i]} * a[m * stride + j * 4 + i];
        out[m].v[l] = acc - 128 * sums[m];
      }
  }
  // The same with rows of 16 bits, as narrow_wide leaves them: sums below 2^29.
  template <int M>
  static void group_q8(const uint8_t* w, const int16_t* a, int64_t stride, const int32_t* sums, I (&out)[M]) {
    for (int m = 0; m < M; ++m)
      for (int l = 0; l < kLanes; ++l) {
        int32_t acc = 0;
        for (int i = 0; i < kGroup; ++i) acc += int32_t{w[i / 4 * 64 + l * 4 + i % 4]} * a[m * stride + wide_place(i)];
        out[m].v[l] = acc - 128 * sums[m];
      }
  }
  // Q4 and Q4M: w is 4 × 64 nibble bytes (see Layout), result Σ nibble·a.
  template <int M>
  static void group_q4(const uint8_t* w, const int8_t* a, int64_t stride, I (&out)[M]) {
    for (int m = 0; m < M; ++m)
      for (int l = 0; l < kLanes; ++l) {
        int32_t acc = 0;
        for (int j = 0; j < 4; ++j)
          for (int i = 0; i < 4; ++i) {
            const uint8_t byte = w[j * 64 + l * 4 + i];
            acc += int32_t{byte & 15} * a[m * stride + j * 8 + i];
            acc += int32_t{byte >> 4} * a[m * stride + j * 8 + 4 + i];
          }
        out[m].v[l] = acc;
      }
  }
};

}  // namespace headrace::scalar
