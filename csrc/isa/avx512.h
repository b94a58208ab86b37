// AVX-512 (F, BW, VL, DQ, VNNI): a logical vector is one zmm register. Compiled twice: as `avx512`, and with
// HEADRACE_AVX512BF16 as `avx512bf16`, where dot_bf16 is one instruction. See scalar.h for what each operation means.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "gen/opcodes.h"

#ifdef HEADRACE_AVX512BF16
#define HEADRACE_AVX512 avx512bf16
#else
#define HEADRACE_AVX512 avx512
#endif

namespace headrace::HEADRACE_AVX512 {

struct Isa {
#ifdef HEADRACE_AVX512BF16
  static constexpr const char* kName = "avx512bf16";
#else
  static constexpr const char* kName = "avx512";
#endif
  // 32 registers: 8 rows × 2 column tiles of accumulators, and room for weights and broadcasts.
  static constexpr int kTileRows = 8;

  using F = __m512;
  using I = __m512i;

  static __mmask16 first(int n) { return static_cast<__mmask16>((1u << n) - 1u); }

  static F zero() { return _mm512_setzero_ps(); }
  static F set1(float x) { return _mm512_set1_ps(x); }
  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static F load_n(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
  static void store(float* p, F a) { _mm512_storeu_ps(p, a); }
  static void store_n(float* p, F a, int n) { _mm512_mask_storeu_ps(p, first(n), a); }
  static F load_f16(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static F load_bf16(const uint16_t* p) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
  }
  static void store_bf16(uint16_t* p, F a) {
    // Integer rounding to nearest even, as scalar.h: the conversion instruction would flush denormals.
    const __m512i bits = _mm512_castps_si512(a);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded =
        _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    const __m512i quiet = _mm512_or_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(0x40));
    const __mmask16 is_nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_cvtepi32_epi16(_mm512_mask_blend_epi32(is_nan, rounded, quiet)));
  }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F div(F a, F b) { return _mm512_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static void accumulate(F& sum, F a, F b) { sum = fma(a, b, sum); }
  static F max(F a, F b) { return _mm512_max_ps(a, b); }
  static F min(F a, F b) { return _mm512_min_ps(a, b); }
  static F abs(F a) { return _mm512_abs_ps(a); }
  static F round(F a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static F scale2(F a, F n) {
    const __m512i exponent = _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvttps_epi32(n), _mm512_set1_epi32(127)), 23);
    return _mm512_mul_ps(a, _mm512_castsi512_ps(exponent));
  }
  static F exponent(F a) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(a), 23)); }
  static F round_bf16(F a) {
    const __m512i bits = _mm512_castps_si512(a);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i sum = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    return _mm512_castsi512_ps(_mm512_and_si512(sum, _mm512_set1_epi32(static_cast<int32_t>(0xffff0000u))));
  }
  static bool has_nan(F a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q) != 0; }
  static int32_t narrow(F a, F b, int8_t* to) {
    const I first = _mm512_cvttps_epi32(a), next = _mm512_cvttps_epi32(b);  // whole numbers: nothing is cut off
    const __m128i bytes[2] = {_mm512_cvtepi32_epi8(first), _mm512_cvtepi32_epi8(next)};
    __builtin_memcpy(to, bytes, sizeof bytes);
    return _mm512_reduce_add_epi32(_mm512_add_epi32(first, next));
  }
  static F to_float(I a) { return _mm512_cvtepi32_ps(a); }
  static uint32_t greater(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
  static F blend(uint32_t mask, F a, F b) { return _mm512_mask_blend_ps(static_cast<__mmask16>(mask), a, b); }
  static F select(F a, F b, F yes, F no) { return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_GT_OQ), no, yes); }
  // Not _mm512_reduce_*: the order is part of the contract.
  static float reduce_add(F a) {
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
  }
  static float reduce_max(F a) {
    const __m256 eight = _mm256_max_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
  }

  static F dot_bf16(F acc, const uint16_t* w, uint32_t x) {
    const __m512i pairs = _mm512_loadu_si512(w);
#ifdef HEADRACE_AVX512BF16
    return _mm512_dpbf16_ps(acc, __builtin_bit_cast(__m512bh, pairs),
                            __builtin_bit_cast(__m512bh, _mm512_set1_epi32(static_cast<int32_t>(x))));
#else
    const __m512i high = _mm512_set1_epi32(static_cast<int32_t>(0xffff0000u));
    const F even = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
    const F odd = _mm512_castsi512_ps(_mm512_and_si512(pairs, high));
    const __m512i both = _mm512_set1_epi32(static_cast<int32_t>(x));
    acc = _mm512_fmadd_ps(even, _mm512_castsi512_ps(_mm512_slli_epi32(both, 16)), acc);
    return _mm512_fmadd_ps(odd, _mm512_castsi512_ps(_mm512_and_si512(both, high)), acc);
#endif
  }

#ifndef HEADRACE_AVX512BF16
  // The halves of sixteen bf16 pairs: dot_bf16 is fma(odd, x1, fma(even, x0, acc)). Offered where that is how it is
  // done.
  static F even_bf16(const uint16_t* w) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(w), 16)); }
  static F odd_bf16(const uint16_t* w) {
    const __m512i high = _mm512_set1_epi32(static_cast<int32_t>(0xffff0000u));
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(w), high));
  }
#endif

  // acc += Σ of four u8 × s8 products per lane. Written as assembly: gcc 12 copies the accumulator of the destructive
  // intrinsic each time, which halves the rate (kernels.md, section 0).
  [[gnu::always_inline]] static inline void dpbusd(I& acc, I u8, I s8) {
#ifdef HEADRACE_EMULATE_AVX512
    acc = _mm512_dpbusd_epi32(acc, u8, s8);
#else
    asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(u8), "v"(s8));
#endif
  }
  static int32_t word(const int8_t* p) {
    int32_t value;
    __builtin_memcpy(&value, p, sizeof value);
    return value;
  }

  template <int M>
  static void group_q8(const uint8_t* w, const int8_t* a, int64_t stride, const int32_t* sums, I (&out)[M]) {
    for (int m = 0; m < M; ++m) out[m] = _mm512_set1_epi32(-128 * sums[m]);
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) {
      const I weights = _mm512_loadu_si512(w + j * 64);
      for (int m = 0; m < M; ++m) dpbusd(out[m], weights, _mm512_set1_epi32(word(a + m * stride + j * 4)));
    }
  }

  template <int M>
  static void group_q4(const uint8_t* w, const int8_t* a, int64_t stride, I (&out)[M]) {
    const I low = _mm512_set1_epi8(15);
    for (int m = 0; m < M; ++m) out[m] = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const I bytes = _mm512_loadu_si512(w + j * 64);
      const I first_k = _mm512_and_si512(bytes, low);
      const I next_k = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), low);
      for (int m = 0; m < M; ++m) {
        dpbusd(out[m], first_k, _mm512_set1_epi32(word(a + m * stride + j * 8)));
        dpbusd(out[m], next_k, _mm512_set1_epi32(word(a + m * stride + j * 8 + 4)));
      }
    }
  }
};

}  // namespace headrace::HEADRACE_AVX512
