// AVX2 with FMA and F16C: a logical vector is two ymm registers. See scalar.h for what each operation means.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "gen/opcodes.h"

namespace headrace::avx2 {

struct Isa {
  static constexpr const char* kName = "avx2";
  // 16 registers: eight 16-bit accumulators (4 rows × 16 columns), weights, one broadcast, one product.
  static constexpr int kTileRows = 4;
  // Of a packed weight, ahead of the group in work: a page or more ahead loses again (docs/lab/0004).
  static constexpr int64_t kAheadBytes = 2048;

  struct F {
    __m256 low, high;
  };
  struct I {
    __m256i low, high;
  };

  static F zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static F set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
  static F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  static __m256i first(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  static F load_n(const float* p, int n) {
    return {_mm256_maskload_ps(p, first(n)), _mm256_maskload_ps(p + 8, first(n - 8))};
  }
  static void store(float* p, F a) {
    _mm256_storeu_ps(p, a.low);
    _mm256_storeu_ps(p + 8, a.high);
  }
  static void store_n(float* p, F a, int n) {
    _mm256_maskstore_ps(p, first(n), a.low);
    _mm256_maskstore_ps(p + 8, first(n - 8), a.high);
  }
  static __m128i half(const uint16_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
  static F load_f16(const uint16_t* p) { return {_mm256_cvtph_ps(half(p)), _mm256_cvtph_ps(half(p + 8))}; }
  static __m256 widen_bf16(__m128i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16)); }
  static F load_bf16(const uint16_t* p) { return {widen_bf16(half(p)), widen_bf16(half(p + 8))}; }
  static __m256i narrow_bf16(__m256 a) {  // eight bf16, each in the low half of 32 bits
    const __m256i bits = _mm256_castps_si256(a);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded =
        _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    const __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(0x40));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(rounded, quiet, is_nan);
  }
  static void store_bf16(uint16_t* p, F a) {
    // packus interleaves the 128-bit halves; the permute puts the quarters back in order.
    const __m256i packed = _mm256_packus_epi32(narrow_bf16(a.low), narrow_bf16(a.high));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0b11011000));
  }
  static F add(F a, F b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
  static F sub(F a, F b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
  static F mul(F a, F b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
  static F div(F a, F b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
  static F fma(F a, F b, F c) {
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
  }
  // Written as assembly: gcc 12 moves sums from register to register and, when there are twelve, through memory.
  [[gnu::always_inline]] static inline void accumulate(F& sum, F a, F b) {
    asm("vfmadd231ps %2, %1, %0" : "+x"(sum.low) : "x"(a.low), "x"(b.low));
    asm("vfmadd231ps %2, %1, %0" : "+x"(sum.high) : "x"(a.high), "x"(b.high));
  }
  static F max(F a, F b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
  static F min(F a, F b) { return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }
  static F abs(F a) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, a.low), _mm256_andnot_ps(sign, a.high)};
  }
  static F round(F a) {
    constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(a.low, kNearest), _mm256_round_ps(a.high, kNearest)};
  }
  static __m256 power2(__m256 n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvttps_epi32(n), _mm256_set1_epi32(127)), 23));
  }
  static F scale2(F a, F n) { return {_mm256_mul_ps(a.low, power2(n.low)), _mm256_mul_ps(a.high, power2(n.high))}; }
  static F exponent(F a) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(a.low), 23)),
            _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(a.high), 23))};
  }
  static F round_bf16(F a) {
    const auto rounded = [](__m256 x) {
      const __m256i bits = _mm256_castps_si256(x);
      const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
      const __m256i sum = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
      return _mm256_castsi256_ps(_mm256_and_si256(sum, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
    };
    return {rounded(a.low), rounded(a.high)};
  }
  static bool has_nan(F a) { return _mm256_movemask_ps(_mm256_cmp_ps(a.low, a.high, _CMP_UNORD_Q)) != 0; }
  static int32_t narrow(F a, F b, int8_t* to) {
    const __m256i words_a = _mm256_packs_epi32(_mm256_cvtps_epi32(a.low), _mm256_cvtps_epi32(a.high));
    const __m256i words_b = _mm256_packs_epi32(_mm256_cvtps_epi32(b.low), _mm256_cvtps_epi32(b.high));
    // Each pack interleaves the 128-bit halves; one permute of fours puts all back in order.
    const __m256i packed =
        _mm256_permutevar8x32_epi32(_mm256_packs_epi16(words_a, words_b), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), packed);
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), packed);
    const __m256i fours = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(fours), _mm256_extracti128_si256(fours, 1));
    sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0b01001110));
    return _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0b10110001)));
  }
  static int32_t narrow_wide(F a, F b, int16_t* to) {
    const __m256i words_a = wide_words(a), words_b = wide_words(b), ones = _mm256_set1_epi16(1);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), words_a);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to) + 1, words_b);
    const __m256i pairs = _mm256_add_epi32(_mm256_madd_epi16(words_a, ones), _mm256_madd_epi16(words_b, ones));
    __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
    sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0b01001110));
    return _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0b10110001)));
  }
  static __m256i wide_words(F a) {  // int16, each four as 0 2 1 3
    const __m256i packed = _mm256_packs_epi32(_mm256_cvtps_epi32(a.low), _mm256_cvtps_epi32(a.high));
    const __m256i words = _mm256_permute4x64_epi64(packed, 0b11011000);
    return _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(words, 0b11011000), 0b11011000);
  }
  static F to_float(I a) { return {_mm256_cvtepi32_ps(a.low), _mm256_cvtepi32_ps(a.high)}; }
  static uint32_t greater(F a, F b) {
    const int low = _mm256_movemask_ps(_mm256_cmp_ps(a.low, b.low, _CMP_GT_OQ));
    const int high = _mm256_movemask_ps(_mm256_cmp_ps(a.high, b.high, _CMP_GT_OQ));
    return static_cast<uint32_t>(low | high << 8);
  }
  static __m256 spread(uint32_t mask) {  // all ones in lane l where bit l is set
    const __m256i bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i masked = _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(mask)), bits);
    return _mm256_castsi256_ps(_mm256_cmpeq_epi32(masked, bits));
  }
  static F blend(uint32_t mask, F a, F b) {
    return {_mm256_blendv_ps(a.low, b.low, spread(mask)), _mm256_blendv_ps(a.high, b.high, spread(mask >> 8))};
  }
  static F select(F a, F b, F yes, F no) {
    return {_mm256_blendv_ps(no.low, yes.low, _mm256_cmp_ps(a.low, b.low, _CMP_GT_OQ)),
            _mm256_blendv_ps(no.high, yes.high, _mm256_cmp_ps(a.high, b.high, _CMP_GT_OQ))};
  }
  static float reduce_add(F a) {
    const __m256 eight = _mm256_add_ps(a.low, a.high);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
  }
  static float reduce_max(F a) {
    const __m256 eight = _mm256_max_ps(a.low, a.high);
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
  }

  static F dot_bf16(F acc, const uint16_t* w, uint32_t x) {
    return dot_bf16(acc, w, __builtin_bit_cast(float, x << 16), __builtin_bit_cast(float, x & 0xffff0000u));
  }
  // The same from the two values widened: a broadcast load each, where a pair would have to be taken apart.
  static F dot_bf16(F acc, const uint16_t* w, float even, float odd) {
    const __m256 x0 = _mm256_set1_ps(even), x1 = _mm256_set1_ps(odd);
    const __m256i mask = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
    const auto step = [&](__m256 sum, __m256i pairs) {
      sum = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)), x0, sum);
      return _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_and_si256(pairs, mask)), x1, sum);
    };
    return {step(acc.low, bytes(w)), step(acc.high, bytes(w + 16))};
  }

  // The halves of sixteen bf16 pairs, widened: dot_bf16 is fma(odd, x1, fma(even, x0, acc)).
  static F even_bf16(const uint16_t* w) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(bytes(w), 16)),
            _mm256_castsi256_ps(_mm256_slli_epi32(bytes(w + 16), 16))};
  }
  // The mask stays in memory: beside twelve sums no register is left for it, and gcc 12 would move a sum out instead.
  [[gnu::always_inline]] static inline F odd_bf16(const uint16_t* w) {
    alignas(32) static constexpr uint32_t kHigh[8] = {0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u,
                                                      0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u};
    F pairs = {_mm256_castsi256_ps(bytes(w)), _mm256_castsi256_ps(bytes(w + 16))};
    asm("vandps %1, %0, %0" : "+x"(pairs.low) : "m"(kHigh));
    asm("vandps %1, %0, %0" : "+x"(pairs.high) : "m"(kHigh));
    return pairs;
  }

  static __m256i bytes(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
  static __m256i word(const int8_t* p) {  // four int8 in every lane
    int32_t value;
    __builtin_memcpy(&value, p, sizeof value);
    return _mm256_set1_epi32(value);
  }

  static __m256i pair(const int16_t* p) {  // two int16 in every lane
    int32_t value;
    __builtin_memcpy(&value, p, sizeof value);
    return _mm256_set1_epi32(value);
  }

  // The sums exist now: without it gcc 12 keeps all products of a group and adds them at its end, from the stack.
  [[gnu::always_inline]] static void here(__m256i& low, __m256i& high) { asm("" : "+x"(low), "+x"(high)); }

  // Bytes of 16-bit pairs: the products of two int8 fill 16 bits, so that each must be widened anyhow, and vpmaddwd
  // does it with the addition of pairs. Rows may then have 16 bits: 32 · 255 · 32385 < 2^29.
  template <int M>
  [[gnu::always_inline]] static void group_q8(const uint8_t* w, const int16_t* a, int64_t stride, const int32_t* sums,
                                              I (&out)[M]) {
    const __m256i mask = _mm256_set1_epi16(0xff);
    for (int m = 0; m < M; ++m) {
      const __m256i offset = _mm256_set1_epi32(-128 * sums[m]);
      out[m] = {offset, offset};
    }
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) {
      const __m256i low = bytes(w + j * 64), high = bytes(w + j * 64 + 32);
      const __m256i low_even = _mm256_and_si256(low, mask), high_even = _mm256_and_si256(high, mask);
      const __m256i low_odd = _mm256_srli_epi16(low, 8), high_odd = _mm256_srli_epi16(high, 8);
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) {
        const __m256i even = pair(a + m * stride + j * 4), odd = pair(a + m * stride + j * 4 + 2);
        out[m].low = _mm256_add_epi32(out[m].low, _mm256_madd_epi16(low_even, even));
        out[m].high = _mm256_add_epi32(out[m].high, _mm256_madd_epi16(high_even, even));
        out[m].low = _mm256_add_epi32(out[m].low, _mm256_madd_epi16(low_odd, odd));
        out[m].high = _mm256_add_epi32(out[m].high, _mm256_madd_epi16(high_odd, odd));
        here(out[m].low, out[m].high);
      }
    }
  }

  // Eight products of pairs add up in 16 bits: 8 · 2 · 15 · 127 = 30480.
  template <int M>
  [[gnu::always_inline]] static void group_q4(const uint8_t* w, const int8_t* a, int64_t stride, I (&out)[M]) {
    const __m256i mask = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    __m256i low[M], high[M];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const __m256i low_bytes = bytes(w + j * 64), high_bytes = bytes(w + j * 64 + 32);
      const __m256i low_first = _mm256_and_si256(low_bytes, mask), high_first = _mm256_and_si256(high_bytes, mask);
      const __m256i low_next = _mm256_and_si256(_mm256_srli_epi16(low_bytes, 4), mask);
      const __m256i high_next = _mm256_and_si256(_mm256_srli_epi16(high_bytes, 4), mask);
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) {
        const __m256i x = word(a + m * stride + j * 8), next = word(a + m * stride + j * 8 + 4);
        const __m256i low_pairs = _mm256_maddubs_epi16(low_first, x), high_pairs = _mm256_maddubs_epi16(high_first, x);
        low[m] = j == 0 ? low_pairs : _mm256_add_epi16(low[m], low_pairs);
        high[m] = j == 0 ? high_pairs : _mm256_add_epi16(high[m], high_pairs);
        low[m] = _mm256_add_epi16(low[m], _mm256_maddubs_epi16(low_next, next));
        high[m] = _mm256_add_epi16(high[m], _mm256_maddubs_epi16(high_next, next));
        here(low[m], high[m]);
      }
    }
    for (int m = 0; m < M; ++m) out[m] = {_mm256_madd_epi16(low[m], ones), _mm256_madd_epi16(high[m], ones)};
  }

  // Nibbles of one group as bytes [8][16][4], for a weight tile that many rows will meet.
  static void unpack_q4(const uint8_t* w, uint8_t* to) {
    const __m256i mask = _mm256_set1_epi8(15);
    for (int j = 0; j < 4; ++j)
      for (int half = 0; half < 2; ++half) {
        const __m256i both = bytes(w + j * 64 + half * 32);
        auto* out = reinterpret_cast<__m256i*>(to + j * 128 + half * 32);
        _mm256_storeu_si256(out, _mm256_and_si256(both, mask));
        _mm256_storeu_si256(out + 2, _mm256_and_si256(_mm256_srli_epi16(both, 4), mask));
      }
  }
  // Weights of one group as int16, [8] times even [16][2], odd [16][2] of four inputs.
  static void unpack_q8(const uint8_t* w, uint8_t* to) {
    const __m256i offset = _mm256_set1_epi8(-128);
    for (int j = 0; j < 8; ++j)
      for (int half = 0; half < 2; ++half) {
        const __m256i q = _mm256_xor_si256(bytes(w + j * 64 + half * 32), offset);
        auto* out = reinterpret_cast<__m256i*>(to + j * 128 + half * 32);
        _mm256_storeu_si256(out, _mm256_srai_epi16(_mm256_slli_epi16(q, 8), 8));
        _mm256_storeu_si256(out + 2, _mm256_srai_epi16(q, 8));
      }
  }
  // As group_q8, from unpacked weights and for rows at `a`.
  template <int M>
  [[gnu::always_inline]] static void group_s16(const uint8_t* w, const int16_t* const (&a)[M], I (&out)[M]) {
    for (int m = 0; m < M; ++m) out[m] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
#pragma GCC unroll 16
    for (int j = 0; j < 16; ++j) {
      const __m256i low = bytes(w + j * 64), high = bytes(w + j * 64 + 32);
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) {
        const __m256i x = pair(a[m] + j * 2);
        out[m].low = _mm256_add_epi32(out[m].low, _mm256_madd_epi16(low, x));
        out[m].high = _mm256_add_epi32(out[m].high, _mm256_madd_epi16(high, x));
        here(out[m].low, out[m].high);
      }
    }
  }
  // As group_q4, from unpacked nibbles and for rows at `a`.
  template <int M>
  [[gnu::always_inline]] static void group_u4(const uint8_t* w, const int8_t* const (&a)[M], I (&out)[M]) {
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i low[M], high[M];
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) {
      const __m256i low_bytes = bytes(w + j * 64), high_bytes = bytes(w + j * 64 + 32);
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) {
        const __m256i x = word(a[m] + j * 4);
        const __m256i low_pairs = _mm256_maddubs_epi16(low_bytes, x), high_pairs = _mm256_maddubs_epi16(high_bytes, x);
        low[m] = j == 0 ? low_pairs : _mm256_add_epi16(low[m], low_pairs);
        high[m] = j == 0 ? high_pairs : _mm256_add_epi16(high[m], high_pairs);
        here(low[m], high[m]);
      }
    }
    for (int m = 0; m < M; ++m) out[m] = {_mm256_madd_epi16(low[m], ones), _mm256_madd_epi16(high[m], ones)};
  }
};

}  // namespace headrace::avx2
