// How fast one instruction set multiplies and adds when nothing has to be fetched: the ceiling of DESIGN §8's formula.
// Included by the per-ISA files only, and all of it depends on Isa: they share no symbol.
#pragma once

#include "core/kernels.h"

namespace headrace {

// The compiler must take the value for unknown: otherwise it would hoist products out of the loop.
template <class T>
[[gnu::always_inline]] inline void hide(T& value) {
  asm volatile("" : "+m"(value));
}

// Six logical accumulators of an fma: twelve registers on AVX2, enough to hide a latency of four at two a cycle.
template <class Isa>
int64_t burn_fp32(int64_t rounds) {
  constexpr int kChains = 6;
  typename Isa::F sums[kChains], x = Isa::set1(1e-3f), w = Isa::set1(1e-3f);
  hide(x);
  hide(w);
  for (auto& sum : sums) sum = Isa::zero();
  for (int64_t i = 0; i < rounds; ++i)
#pragma GCC unroll 6
    for (auto& sum : sums) sum = Isa::fma(x, w, sum);
  for (auto& sum : sums) hide(sum);
  return rounds * kChains * 16 * 2;
}

#if defined(HEADRACE_AVX512BF16) && defined(__AVX512BF16__)
template <class Isa>
int64_t burn_bf16(int64_t rounds) {
  constexpr int kChains = 10;
  __m512 sums[kChains];
  __m512i x = _mm512_set1_epi16(1), w = x;
  hide(x);
  hide(w);
  for (auto& sum : sums) sum = _mm512_setzero_ps();
  for (int64_t i = 0; i < rounds; ++i)
#pragma GCC unroll 10
    for (auto& sum : sums) sum = _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)w);
  for (auto& sum : sums) hide(sum);
  return rounds * kChains * 32 * 2;
}
#endif

#if defined(__AVX2__) && !defined(__AVX512VNNI__) && !defined(HEADRACE_EMULATE_AVX512)
// As the int8 kernels do it: products of pairs, added up in 16 bits.
template <class Isa>
int64_t burn_int8(int64_t rounds) {
  constexpr int kChains = 8;
  __m256i sums[kChains], x = _mm256_set1_epi8(1), w = x;
  hide(x);
  for (auto& sum : sums) sum = _mm256_setzero_si256();
  for (int64_t i = 0; i < rounds; ++i)
#pragma GCC unroll 8
    for (auto& sum : sums) {
      asm("" : "+x"(w));  // a new value for all that is known, so that every product is computed
      sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(w, x));
    }
  for (auto& sum : sums) hide(sum);
  return rounds * kChains * 32 * 2;
}
#endif

template <class Isa>
int64_t burn(Arithmetic kind, int64_t rounds) {
  switch (kind) {
    case Arithmetic::kInt8:
      if constexpr (requires(typename Isa::I a) { Isa::dpbusd(a, a, a); }) {
        constexpr int kChains = 10;
        typename Isa::I sums[kChains] = {}, x = {}, w = {};
        hide(x);
        hide(w);
        for (int64_t i = 0; i < rounds; ++i)
#pragma GCC unroll 10
          for (auto& sum : sums) Isa::dpbusd(sum, w, x);
        for (auto& sum : sums) hide(sum);
        return rounds * kChains * 64 * 2;
      }
#if defined(__AVX2__) && !defined(__AVX512VNNI__) && !defined(HEADRACE_EMULATE_AVX512)
      return burn_int8<Isa>(rounds);
#else
      break;
#endif
    case Arithmetic::kBf16:
#if defined(HEADRACE_AVX512BF16) && defined(__AVX512BF16__)
      return burn_bf16<Isa>(rounds);
#else
      break;
#endif
    case Arithmetic::kFp32: break;
  }
  // What has no instruction of its own is computed in fp32.
  return burn_fp32<Isa>(rounds);
}

}  // namespace headrace
