// Transcendental functions from the lane operations alone, so that every instruction set gives the same bits.
#pragma once

#include "gen/opcodes.h"

namespace headrace {

template <class Isa>
struct Math {
  using F = typename Isa::F;

  // e^x is 2^n · e^r with n = round(x / ln 2) and |r| ≤ ln 2 / 2; the degree of the polynomial and its coefficients are
  // those of Cephes expf (relative error of the reduced part below 2^-23).
  [[gnu::always_inline]] static inline F exp_reduced(F r) {
    F p = Isa::set1(1.9875691500e-4f);
    p = Isa::fma(p, r, Isa::set1(1.3981999507e-3f));
    p = Isa::fma(p, r, Isa::set1(8.3334519073e-3f));
    p = Isa::fma(p, r, Isa::set1(4.1665795894e-2f));
    p = Isa::fma(p, r, Isa::set1(1.6666665459e-1f));
    p = Isa::fma(p, r, Isa::set1(5.0000001201e-1f));
    return Isa::add(Isa::fma(p, Isa::mul(r, r), r), Isa::set1(1.0f));
  }
  // ln 2 in two parts: n · kLn2High is exact for |n| < 2^9.
  static constexpr float kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f, kLog2E = 1.44269504088896341f;
  [[gnu::always_inline]] static inline F reduce(F x, F n) {
    return Isa::fma(n, Isa::set1(-kLn2Low), Isa::fma(n, Isa::set1(-kLn2High), x));
  }

  // Below this e^x is not a normal number; it is flushed to zero.
  static constexpr float kExpMin = -87.3f;
  static constexpr float kExpMax = 88.72283f;  // above it e^x is infinite

  // e^x for x ≤ 0, the softmax's case. 0 below kExpMin and at -inf; NaN stays NaN.
  [[gnu::always_inline]] static inline F exp_nonpositive(F x) {
    // max returns its second operand when the first is NaN, so n is always a number that scale2 accepts.
    const F n = Isa::max(Isa::round(Isa::mul(x, Isa::set1(kLog2E))), Isa::set1(-126.0f));
    const F y = Isa::scale2(exp_reduced(reduce(x, n)), n);
    return Isa::blend(Isa::greater(Isa::set1(kExpMin), x), y, Isa::zero());
  }

  // e^x for any x. 0 below kExpMin and at -inf, inf above kExpMax; NaN stays NaN.
  static F exp(F x) {
    F n = Isa::max(Isa::round(Isa::mul(x, Isa::set1(kLog2E))), Isa::set1(-126.0f));
    n = Isa::min(n, Isa::set1(128.0f));
    // n may be 128: scaled in two steps.
    const F half = Isa::round(Isa::mul(n, Isa::set1(0.5f)));
    F y = Isa::scale2(Isa::scale2(exp_reduced(reduce(x, n)), half), Isa::sub(n, half));
    y = Isa::blend(Isa::greater(x, Isa::set1(kExpMax)), y, Isa::set1(__builtin_inff()));
    return Isa::blend(Isa::greater(Isa::set1(kExpMin), x), y, Isa::zero());
  }

  // tanh x = ±(1 - t) / (1 + t) with t = e^(-2|x|): absolute error below 2^-22; NaN stays NaN.
  static F tanh(F x) {
    const F t = exp_nonpositive(Isa::mul(Isa::abs(x), Isa::set1(-2.0f)));
    const F y = Isa::div(Isa::sub(Isa::set1(1.0f), t), Isa::add(Isa::set1(1.0f), t));
    return Isa::blend(Isa::greater(Isa::zero(), x), y, Isa::sub(Isa::zero(), y));
  }

  // cap · tanh(x / cap)
  static F soft_cap(F x, float cap) { return Isa::mul(tanh(Isa::mul(x, Isa::set1(1.0f / cap))), Isa::set1(cap)); }

  // One value through the same lanes.
  static float exp_nonpositive(float x) {
    float out[kLanes];
    Isa::store(out, exp_nonpositive(Isa::set1(x)));
    return out[0];
  }
};

}  // namespace headrace
