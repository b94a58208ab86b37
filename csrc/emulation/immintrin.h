// The AVX-512 intrinsics that isa/avx512.h uses, in plain C++, so that its logic runs on a CPU without them.
// Put before the system's headers by the CMake option HEADRACE_EMULATE_AVX512; for tests only, and slow.
// Each function does what the instruction's public description says, lane by lane.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

using __mmask16 = uint16_t;
struct __m128 {
  float v[4];
};
struct __m256 {
  float v[8];
};
struct __m512 {
  float v[16];
};
struct __m128i {
  uint8_t b[16];
};
struct __m256i {
  uint8_t b[32];
};
struct __m512i {
  uint8_t b[64];
};
struct __m512bh {
  uint16_t v[32];
};

inline constexpr int _MM_FROUND_TO_NEAREST_INT = 0;
inline constexpr int _MM_FROUND_NO_EXC = 8;
inline constexpr int _CMP_UNORD_Q = 3;
inline constexpr int _CMP_GT_OQ = 30;

namespace emulation {

struct Words {
  int32_t v[16];
};
inline Words words(__m512i a) { return std::bit_cast<Words>(a); }
inline __m512i pack(Words a) { return std::bit_cast<__m512i>(a); }
template <typename Fn>
inline __m512i each_word(Fn fn) {
  Words r;
  for (int l = 0; l < 16; ++l) r.v[l] = static_cast<int32_t>(fn(l));
  return pack(r);
}
template <typename Fn>
inline __m512 each(Fn fn) {
  __m512 r;
  for (int l = 0; l < 16; ++l) r.v[l] = fn(l);
  return r;
}
template <typename V, typename Fn>
inline V lanes(Fn fn) {
  V r;
  for (int l = 0; l < static_cast<int>(sizeof(r.v) / sizeof(r.v[0])); ++l) r.v[l] = fn(l);
  return r;
}
inline float half_to_float(uint16_t h) {
  const int exponent = (h >> 10) & 31;
  const float fraction = static_cast<float>(h & 1023);
  const float size = exponent == 0    ? std::ldexp(fraction, -24)
                     : exponent == 31 ? (fraction != 0.0f ? NAN : INFINITY)
                                      : std::ldexp(1024.0f + fraction, exponent - 25);
  return (h & 0x8000) != 0 ? -size : size;
}
inline float bf16_to_float(uint16_t h) { return std::bit_cast<float>(uint32_t{h} << 16); }
inline float flush(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }

}  // namespace emulation

inline __m512 _mm512_setzero_ps() { return {}; }
inline __m512i _mm512_setzero_si512() { return {}; }
inline __m512 _mm512_set1_ps(float x) {
  return emulation::each([&](int) { return x; });
}
inline __m512i _mm512_set1_epi32(int32_t x) {
  return emulation::each_word([&](int) { return x; });
}
inline __m512i _mm512_set1_epi8(int8_t x) {
  __m512i r;
  std::memset(r.b, x, sizeof r.b);
  return r;
}
inline __m512 _mm512_loadu_ps(const void* p) {
  __m512 r;
  std::memcpy(&r, p, sizeof r);
  return r;
}
inline __m512i _mm512_loadu_si512(const void* p) {
  __m512i r;
  std::memcpy(&r, p, sizeof r);
  return r;
}
inline __m256i _mm256_loadu_si256(const __m256i* p) {
  __m256i r;
  std::memcpy(&r, p, sizeof r);
  return r;
}
inline void _mm512_storeu_ps(void* p, __m512 a) { std::memcpy(p, &a, sizeof a); }
inline void _mm256_storeu_si256(__m256i* p, __m256i a) { std::memcpy(p, &a, sizeof a); }
inline __m512 _mm512_maskz_loadu_ps(__mmask16 k, const void* p) {
  __m512 r{};
  for (int l = 0; l < 16; ++l)
    if ((k >> l & 1) != 0) std::memcpy(&r.v[l], static_cast<const char*>(p) + 4 * l, 4);
  return r;
}
inline void _mm512_mask_storeu_ps(void* p, __mmask16 k, __m512 a) {
  for (int l = 0; l < 16; ++l)
    if ((k >> l & 1) != 0) std::memcpy(static_cast<char*>(p) + 4 * l, &a.v[l], 4);
}
inline __m512 _mm512_cvtph_ps(__m256i a) {
  uint16_t h[16];
  std::memcpy(h, &a, sizeof h);
  return emulation::each([&](int l) { return emulation::half_to_float(h[l]); });
}
inline __m512i _mm512_cvtepu16_epi32(__m256i a) {
  uint16_t h[16];
  std::memcpy(h, &a, sizeof h);
  return emulation::each_word([&](int l) { return h[l]; });
}
inline __m128i _mm512_cvtepi32_epi8(__m512i a) {
  __m128i r;
  for (int l = 0; l < 16; ++l) r.b[l] = static_cast<uint8_t>(emulation::words(a).v[l]);
  return r;
}
inline int32_t _mm512_reduce_add_epi32(__m512i a) {
  int32_t sum = 0;
  for (int l = 0; l < 16; ++l) sum += emulation::words(a).v[l];
  return sum;
}
inline __m256i _mm512_cvtepi32_epi16(__m512i a) {
  const auto w = emulation::words(a);
  uint16_t h[16];
  for (int l = 0; l < 16; ++l) h[l] = static_cast<uint16_t>(w.v[l]);
  __m256i r;
  std::memcpy(&r, h, sizeof r);
  return r;
}
inline __m512 _mm512_cvtepi32_ps(__m512i a) {
  const auto w = emulation::words(a);
  return emulation::each([&](int l) { return static_cast<float>(w.v[l]); });
}
inline __m512i _mm512_cvttps_epi32(__m512 a) {
  return emulation::each_word(
      [&](int l) { return std::fabs(a.v[l]) < 0x1p31f ? static_cast<int32_t>(a.v[l]) : INT32_MIN; });
}
inline __m512 _mm512_castsi512_ps(__m512i a) { return std::bit_cast<__m512>(a); }
inline __m512i _mm512_castps_si512(__m512 a) { return std::bit_cast<__m512i>(a); }
inline __m256 _mm512_castps512_ps256(__m512 a) {
  return emulation::lanes<__m256>([&](int l) { return a.v[l]; });
}
inline __m256 _mm512_extractf32x8_ps(__m512 a, int half) {
  return emulation::lanes<__m256>([&](int l) { return a.v[8 * half + l]; });
}
inline __m128 _mm256_castps256_ps128(__m256 a) {
  return emulation::lanes<__m128>([&](int l) { return a.v[l]; });
}
inline __m128 _mm256_extractf128_ps(__m256 a, int half) {
  return emulation::lanes<__m128>([&](int l) { return a.v[4 * half + l]; });
}
inline __m512 _mm512_add_ps(__m512 a, __m512 b) {
  return emulation::each([&](int l) { return a.v[l] + b.v[l]; });
}
inline __m256 _mm256_add_ps(__m256 a, __m256 b) {
  return emulation::lanes<__m256>([&](int l) { return a.v[l] + b.v[l]; });
}
inline __m128 _mm_add_ps(__m128 a, __m128 b) {
  return emulation::lanes<__m128>([&](int l) { return a.v[l] + b.v[l]; });
}
inline __m128 _mm_add_ss(__m128 a, __m128 b) {
  a.v[0] += b.v[0];
  return a;
}
inline float maximum(float a, float b) { return a > b ? a : b; }  // as the instruction: b when unordered
inline float minimum(float a, float b) { return a < b ? a : b; }
inline __m512 _mm512_max_ps(__m512 a, __m512 b) {
  return emulation::each([&](int l) { return maximum(a.v[l], b.v[l]); });
}
inline __m512 _mm512_min_ps(__m512 a, __m512 b) {
  return emulation::each([&](int l) { return minimum(a.v[l], b.v[l]); });
}
inline __m256 _mm256_max_ps(__m256 a, __m256 b) {
  return emulation::lanes<__m256>([&](int l) { return maximum(a.v[l], b.v[l]); });
}
inline __m128 _mm_max_ps(__m128 a, __m128 b) {
  return emulation::lanes<__m128>([&](int l) { return maximum(a.v[l], b.v[l]); });
}
inline __m128 _mm_max_ss(__m128 a, __m128 b) {
  a.v[0] = maximum(a.v[0], b.v[0]);
  return a;
}
inline __m128 _mm_movehl_ps(__m128 a, __m128 b) { return {{b.v[2], b.v[3], a.v[2], a.v[3]}}; }
inline __m128 _mm_shuffle_ps(__m128 a, __m128 b, int control) {
  return {{a.v[control & 3], a.v[control >> 2 & 3], b.v[control >> 4 & 3], b.v[control >> 6 & 3]}};
}
inline float _mm_cvtss_f32(__m128 a) { return a.v[0]; }
inline __m512 _mm512_sub_ps(__m512 a, __m512 b) {
  return emulation::each([&](int l) { return a.v[l] - b.v[l]; });
}
inline __m512 _mm512_mul_ps(__m512 a, __m512 b) {
  return emulation::each([&](int l) { return a.v[l] * b.v[l]; });
}
inline __m512 _mm512_div_ps(__m512 a, __m512 b) {
  return emulation::each([&](int l) { return a.v[l] / b.v[l]; });
}
inline __m512 _mm512_fmadd_ps(__m512 a, __m512 b, __m512 c) {
  return emulation::each([&](int l) { return std::fma(a.v[l], b.v[l], c.v[l]); });
}
inline __m512 _mm512_abs_ps(__m512 a) {
  return emulation::each([&](int l) { return std::fabs(a.v[l]); });
}
inline __m512 _mm512_roundscale_ps(__m512 a, int) {
  return emulation::each([&](int l) { return std::nearbyint(a.v[l]); });
}
inline __mmask16 _mm512_cmp_ps_mask(__m512 a, __m512 b, int predicate) {
  uint32_t mask = 0;
  for (int l = 0; l < 16; ++l) {
    const bool is_true = predicate == _CMP_GT_OQ ? a.v[l] > b.v[l] : std::isunordered(a.v[l], b.v[l]);
    mask |= uint32_t{is_true} << l;
  }
  return static_cast<__mmask16>(mask);
}
inline __m512 _mm512_mask_blend_ps(__mmask16 k, __m512 a, __m512 b) {
  return emulation::each([&](int l) { return (k >> l & 1) != 0 ? b.v[l] : a.v[l]; });
}
inline __m512i _mm512_mask_blend_epi32(__mmask16 k, __m512i a, __m512i b) {
  const auto x = emulation::words(a), y = emulation::words(b);
  return emulation::each_word([&](int l) { return (k >> l & 1) != 0 ? y.v[l] : x.v[l]; });
}
inline __m512i _mm512_add_epi32(__m512i a, __m512i b) {
  const auto x = emulation::words(a), y = emulation::words(b);
  return emulation::each_word([&](int l) { return static_cast<uint32_t>(x.v[l]) + static_cast<uint32_t>(y.v[l]); });
}
inline __m512i _mm512_slli_epi32(__m512i a, unsigned count) {
  const auto x = emulation::words(a);
  return emulation::each_word([&](int l) { return static_cast<uint32_t>(x.v[l]) << count; });
}
inline __m512i _mm512_srli_epi32(__m512i a, unsigned count) {
  const auto x = emulation::words(a);
  return emulation::each_word([&](int l) { return static_cast<uint32_t>(x.v[l]) >> count; });
}
inline __m512i _mm512_srli_epi16(__m512i a, unsigned count) {
  uint16_t h[32];
  std::memcpy(h, &a, sizeof h);
  for (uint16_t& value : h) value = static_cast<uint16_t>(value >> count);
  std::memcpy(&a, h, sizeof h);
  return a;
}
inline __m512i _mm512_and_si512(__m512i a, __m512i b) {
  for (int i = 0; i < 64; ++i) a.b[i] &= b.b[i];
  return a;
}
inline __m512i _mm512_or_si512(__m512i a, __m512i b) {
  for (int i = 0; i < 64; ++i) a.b[i] |= b.b[i];
  return a;
}
inline __m512i _mm512_dpbusd_epi32(__m512i acc, __m512i u8, __m512i s8) {
  auto sum = emulation::words(acc);
  for (int i = 0; i < 64; ++i) sum.v[i / 4] += int32_t{u8.b[i]} * static_cast<int8_t>(s8.b[i]);
  return emulation::pack(sum);
}
// Denormals are taken and given as zero; the odd product is fused in first, then the even one (AMD and Intel agree on
// results up to rounding; the order of the two is not architectural).
inline __m512 _mm512_dpbf16_ps(__m512 acc, __m512bh a, __m512bh b) {
  return emulation::each([&](int l) {
    const auto term = [&](int i, float sum) {
      const float x = emulation::flush(emulation::bf16_to_float(a.v[i]));
      const float y = emulation::flush(emulation::bf16_to_float(b.v[i]));
      return emulation::flush(std::fma(x, y, sum));
    };
    return term(2 * l, term(2 * l + 1, acc.v[l]));
  });
}
