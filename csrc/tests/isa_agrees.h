// Checks that one instruction set's vocabulary gives what scalar.h defines, bit for bit (dot_bf16: see there).
// Included by one translation unit per instruction set; each exports a function that returns the number of faults.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include "isa/scalar.h"
#include "ops/product.h"

namespace headrace::tests {

// xorshift64*: a fixed sequence, the same on every machine.
struct Random {
  uint64_t state = 0x9e3779b97f4a7c15u;
  uint32_t next() {
    state ^= state >> 12, state ^= state << 25, state ^= state >> 27;
    return static_cast<uint32_t>((state * 0x2545f4914f6cdd1du) >> 32);
  }
  float real() { return (static_cast<float>(next() >> 8) * 0x1p-24f - 0.5f) * 16.0f; }
};

template <class Isa, bool kIsDotExact>
struct Agreement {
  using Ref = scalar::Isa;
  using F = typename Isa::F;
  int faults = 0;

  void same(const char* what, const void* got, const void* want, size_t size) {
    if (std::memcmp(got, want, size) == 0) return;
    if (++faults <= 20) std::printf("FAULT %s: %s differs from scalar\n", Isa::kName, what);
  }
  void same(const char* what, F got, const Ref::F& want, int n = kLanes) {
    float g[kLanes];
    Isa::store(g, got);
    same(what, g, want.v, sizeof(float) * static_cast<size_t>(n));
  }

  void elementwise(Random& random) {
    float a[kLanes], b[kLanes], c[kLanes], n[kLanes];
    for (int l = 0; l < kLanes; ++l) {
      a[l] = random.real(), b[l] = random.real(), c[l] = random.real();
      n[l] = static_cast<float>(static_cast<int>(random.next() % 200) - 100);
    }
    const F fa = Isa::load(a), fb = Isa::load(b), fc = Isa::load(c);
    const Ref::F ra = Ref::load(a), rb = Ref::load(b), rc = Ref::load(c);
    same("add", Isa::add(fa, fb), Ref::add(ra, rb));
    same("sub", Isa::sub(fa, fb), Ref::sub(ra, rb));
    same("mul", Isa::mul(fa, fb), Ref::mul(ra, rb));
    same("div", Isa::div(fa, fb), Ref::div(ra, rb));
    same("fma", Isa::fma(fa, fb, fc), Ref::fma(ra, rb, rc));
    same("max", Isa::max(fa, fb), Ref::max(ra, rb));
    same("min", Isa::min(fa, fb), Ref::min(ra, rb));
    F sum = fc;
    typename Ref::F ref_sum = rc;
    Isa::accumulate(sum, fa, fb);
    Ref::accumulate(ref_sum, ra, rb);
    same("accumulate", sum, ref_sum);
    same("abs", Isa::abs(fa), Ref::abs(ra));
    same("round", Isa::round(fa), Ref::round(ra));
    same("scale2", Isa::scale2(fa, Isa::load(n)), Ref::scale2(ra, Ref::load(n)));
    same("exponent", Isa::exponent(fa), Ref::exponent(ra));
    same("round_bf16", Isa::round_bf16(fa), Ref::round_bf16(ra));
    same("set1", Isa::set1(a[3]), Ref::set1(a[3]));
    same("zero", Isa::zero(), Ref::zero());
    const uint32_t got = Isa::greater(fa, fb), want = Ref::greater(ra, rb);
    same("greater", &got, &want, sizeof got);
    same("blend", Isa::blend(want, fa, fb), Ref::blend(want, ra, rb));
    same("select", Isa::select(fa, fb, fc, fa), Ref::select(ra, rb, rc, ra));
    const float sums[2] = {Isa::reduce_add(fa), Ref::reduce_add(ra)};
    same("reduce_add", &sums[0], &sums[1], sizeof(float));
    const float tops[2] = {Isa::reduce_max(fa), Ref::reduce_max(ra)};
    same("reduce_max", &tops[0], &tops[1], sizeof(float));
    for (int count = 0; count <= kLanes; ++count) {
      same("load_n", Isa::load_n(a, count), Ref::load_n(a, count));
      float x[kLanes] = {}, y[kLanes] = {};
      Isa::store_n(x, fa, count), Ref::store_n(y, ra, count);
      same("store_n", x, y, sizeof x);
    }
  }

  void narrowing(Random& random) {
    float whole[2 * kLanes];
    for (float& value : whole) value = static_cast<float>(static_cast<int>(random.next() % 255) - 127);
    int8_t g[2 * kLanes], w[2 * kLanes];
    const int32_t got = Isa::narrow(Isa::load(whole), Isa::load(whole + kLanes), g);
    const int32_t want = Ref::narrow(Ref::load(whole), Ref::load(whole + kLanes), w);
    same("narrow", g, w, sizeof g);
    same("sum of narrow", &got, &want, sizeof got);
    if constexpr (HasWideRows<Isa>) {
      float wide[2 * kLanes];
      int16_t g16[2 * kLanes], w16[2 * kLanes];
      for (float& value : wide) value = static_cast<float>(static_cast<int>(random.next() % 64771) - 32385);
      const int32_t got16 = Isa::narrow_wide(Isa::load(wide), Isa::load(wide + kLanes), g16);
      const int32_t want16 = Ref::narrow_wide(Ref::load(wide), Ref::load(wide + kLanes), w16);
      same("narrow_wide", g16, w16, sizeof g16);
      same("sum of narrow_wide", &got16, &want16, sizeof got16);
    }
    const bool is_clean = Isa::has_nan(Isa::load(whole));
    whole[random.next() % kLanes] = __builtin_nanf("");
    const bool is_found = Isa::has_nan(Isa::load(whole)), no = false, yes = true;
    same("has_nan of numbers", &is_clean, &no, sizeof no);
    same("has_nan", &is_found, &yes, sizeof yes);
  }

  void conversions(Random& random) {
    uint16_t half[kLanes];
    float any[kLanes];
    for (int l = 0; l < kLanes; ++l) {
      half[l] = static_cast<uint16_t>(random.next());
      const uint32_t bits = random.next();  // every kind of float: denormals, infinities, NaN
      std::memcpy(&any[l], &bits, sizeof bits);
    }
    any[0] = -0.0f;
    uint16_t g[kLanes], w[kLanes];
    Isa::store_bf16(g, Isa::load(any)), Ref::store_bf16(w, Ref::load(any));
    same("store_bf16", g, w, sizeof g);
    same("load_bf16", Isa::load_bf16(half), Ref::load_bf16(half));
    for (uint16_t& value : half)
      if ((value & 0x7c00u) == 0x7c00u) value &= 0x83ffu;  // NaN payloads may be quieted; infinities tested below
    half[5] = 0x7c00u, half[6] = 0xfc00u, half[7] = 0x0001u, half[8] = 0x8000u;
    same("load_f16", Isa::load_f16(half), Ref::load_f16(half));
  }

  void dot(Random& random) {
    float acc[kLanes], g[kLanes];
    uint16_t w[2 * kLanes];
    for (float& value : acc) value = random.real();
    for (uint16_t& value : w) value = scalar::f32_to_bf16(random.real());
    const uint32_t x = scalar::f32_to_bf16(random.real()) | uint32_t{scalar::f32_to_bf16(random.real())} << 16;
    const F got = Isa::dot_bf16(Isa::load(acc), w, x);
    const Ref::F want = Ref::dot_bf16(Ref::load(acc), w, x);
    if (kIsDotExact) return same("dot_bf16", got, want);
    Isa::store(g, got);
    for (int l = 0; l < kLanes; ++l) {
      // One instruction may sum the two products before it rounds: three roundings of terms below 128 apart.
      if (!(std::fabs(g[l] - want.v[l]) <= 3 * 128 * 0x1p-24f)) same("dot_bf16", &g[l], &want.v[l], sizeof(float));
    }
  }

  template <int M>
  void groups(Random& random, bool is_extreme) {
    constexpr int64_t kStride = 96;
    std::vector<uint8_t> w(512);
    std::vector<int8_t> a(kStride * M);
    for (uint8_t& value : w) value = is_extreme ? (random.next() & 1 ? 255 : 1) : static_cast<uint8_t>(random.next());
    for (int8_t& value : a) {
      const int q = static_cast<int>(random.next() % 255) - 127;
      value = static_cast<int8_t>(is_extreme ? (q < 0 ? -127 : 127) : q);
    }
    int32_t sums[M];
    for (int m = 0; m < M; ++m) {
      sums[m] = 0;
      for (int i = 0; i < kGroup; ++i) sums[m] += a[static_cast<size_t>(m * kStride + i)];
    }
    typename Isa::I got[M];
    Ref::I want[M];
    if constexpr (HasWideRows<Isa>) {
      std::vector<int16_t> wide(a.begin(), a.end());
      if (is_extreme) {
        for (int16_t& value : wide) value = static_cast<int16_t>(value < 0 ? -32385 : 32385);
        for (int m = 0; m < M; ++m) sums[m] *= 255;
      }
      Isa::template group_q8<M>(w.data(), wide.data(), kStride, sums, got);
      Ref::template group_q8<M>(w.data(), wide.data(), kStride, sums, want);
    } else {
      Isa::template group_q8<M>(w.data(), a.data(), kStride, sums, got);
      Ref::template group_q8<M>(w.data(), a.data(), kStride, sums, want);
    }
    for (int m = 0; m < M; ++m) same("group_q8", Isa::to_float(got[m]), Ref::to_float(want[m]));
    if (is_extreme)
      for (uint8_t& value : w) value = random.next() & 1 ? 0xff : 0x0f;
    Isa::template group_q4<M>(w.data(), a.data(), kStride, got);
    Ref::template group_q4<M>(w.data(), a.data(), kStride, want);
    for (int m = 0; m < M; ++m) same("group_q4", Isa::to_float(got[m]), Ref::to_float(want[m]));
  }

  int run() {
    Random random;
    for (int round = 0; round < 500; ++round) {
      elementwise(random);
      conversions(random);
      narrowing(random);
      dot(random);
      const bool is_extreme = round % 4 == 0;
      groups<1>(random, is_extreme), groups<2>(random, is_extreme), groups<3>(random, is_extreme);
      groups<4>(random, is_extreme), groups<5>(random, is_extreme), groups<8>(random, is_extreme);
    }
    std::printf("%s: %d faults\n", Isa::kName, faults);
    return faults;
  }
};

}  // namespace headrace::tests
