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
    return Isa::select(Isa::set1(kExpMin), x, Isa::zero(), y);
  }

  // e^x for x ≤ 0 (or above by a rounding) as attention weighs its scores: half the work of the others, within 2^-22
  // for x > -4 and 2^-22 · |x| beyond. Below kWeightMin it is e^kWeightMin, 1.6e-38, never 0; NaN stays NaN.
  // n is rounded by adding a number so large that its last bit is 1; what is added to that puts n's exponent, 127 + n,
  // into the last bits. The polynomial 1 + x·(…) is minimax over |x| ≤ ln 2 / 2, 9.2e-8 relative.
  static constexpr float kWeightMin = -87.0f, kLn2 = 0.69314718056f, kRounder = 12582912.0f + 127.0f;
  [[gnu::always_inline]] static inline F exp_weight(F x) {
    x = Isa::max(Isa::set1(kWeightMin), x);  // which returns its second operand when one is NaN
    const F shifted = Isa::fma(x, Isa::set1(kLog2E), Isa::set1(kRounder));
    const F r = Isa::fma(Isa::sub(shifted, Isa::set1(kRounder)), Isa::set1(-kLn2), x);
    F p = Isa::set1(0.008290306f);
    p = Isa::fma(p, r, Isa::set1(0.041897975f));
    p = Isa::fma(p, r, Isa::set1(0.16667637f));
    p = Isa::fma(p, r, Isa::set1(0.4999915f));
    p = Isa::fma(p, r, Isa::set1(0.9999997f));
    p = Isa::fma(p, r, Isa::set1(1.0f));
    return Isa::mul(p, Isa::exponent(shifted));
  }

  // e^x for any x. 0 below kExpMin and at -inf, inf above kExpMax; NaN stays NaN.
  [[gnu::always_inline]] static inline F exp(F x) {
    F n = Isa::max(Isa::round(Isa::mul(x, Isa::set1(kLog2E))), Isa::set1(-126.0f));
    n = Isa::min(n, Isa::set1(128.0f));
    // n may be 128: scaled in two steps.
    const F half = Isa::round(Isa::mul(n, Isa::set1(0.5f)));
    F y = Isa::scale2(Isa::scale2(exp_reduced(reduce(x, n)), half), Isa::sub(n, half));
    y = Isa::select(x, Isa::set1(kExpMax), Isa::set1(__builtin_inff()), y);
    return Isa::select(Isa::set1(kExpMin), x, Isa::zero(), y);
  }

  // tanh x = ±(1 - t) / (1 + t) with t = e^(-2|x|): absolute error below 2^-22; NaN stays NaN.
  [[gnu::always_inline]] static inline F tanh(F x) {
    const F t = exp_nonpositive(Isa::mul(Isa::abs(x), Isa::set1(-2.0f)));
    const F y = Isa::div(Isa::sub(Isa::set1(1.0f), t), Isa::add(Isa::set1(1.0f), t));
    return Isa::select(Isa::zero(), x, Isa::sub(Isa::zero(), y), y);
  }

  // cap · tanh(x / cap)
  static F soft_cap(F x, float cap) { return Isa::mul(tanh(Isa::mul(x, Isa::set1(1.0f / cap))), Isa::set1(cap)); }

  // x / (1 + e^-x)
  [[gnu::always_inline]] static inline F silu(F x) {
    return Isa::div(x, Isa::add(Isa::set1(1.0f), exp(Isa::sub(Isa::zero(), x))));
  }

  // Where e^(-y^2/2), and its like of the approximation by tanh, have been flushed to zero.
  static constexpr float kGeluMax = 16.0f;

  // x · Φ(x) within 6 units in the last place. The tail of Φ at y = |x| is e^(-y^2/2) · t · p(t) with t = 1 / (1 + 0.35
  // y); p is minimax over 0 ≤ y ≤ 13.4 (3.2e-8 relative). What y·y loses is given back after the exponential.
  [[gnu::always_inline]] static inline F gelu_erf(F x) {
    const F y = Isa::min(Isa::abs(x), Isa::set1(kGeluMax));
    const F t = Isa::div(Isa::set1(1.0f), Isa::fma(y, Isa::set1(0.35f), Isa::set1(1.0f)));
    F p = Isa::set1(-0.029120702296495438f);
    p = Isa::fma(p, t, Isa::set1(0.14384661614894867f));
    p = Isa::fma(p, t, Isa::set1(-0.2554505169391632f));
    p = Isa::fma(p, t, Isa::set1(0.15886609256267548f));
    p = Isa::fma(p, t, Isa::set1(-0.022892504930496216f));
    p = Isa::fma(p, t, Isa::set1(0.10541350394487381f));
    p = Isa::fma(p, t, Isa::set1(0.11985751241445541f));
    p = Isa::fma(p, t, Isa::set1(0.13985836505889893f));
    p = Isa::fma(p, t, Isa::set1(0.13962161540985107f));
    const F square = Isa::mul(y, y), minus_half = Isa::set1(-0.5f);
    const F lost = Isa::fma(y, y, Isa::sub(Isa::zero(), square));
    const F e = exp_nonpositive(Isa::mul(square, minus_half));
    const F tail = Isa::mul(Isa::fma(e, Isa::mul(lost, minus_half), e), Isa::mul(p, t));
    return Isa::mul(x, Isa::select(x, Isa::zero(), Isa::sub(Isa::set1(1.0f), tail), tail));
  }

  // x / (1 + e^-w), w = 2·sqrt(2/π)·(x + 0.044715·x^3), within 4 units in the last place: x/2 · (1 + tanh(w/2)) without
  // its cancellation at negative x. w is kept in two parts, for an error of it is one of the result, w times as large.
  [[gnu::always_inline]] static inline F gelu_tanh(F x) {
    const F linear = Isa::set1(1.5957691669464111f), linear_lost = Isa::set1(-4.534068054340423e-08f);
    const F cubic = Isa::set1(0.07135481387376785f), cubic_lost = Isa::set1(2.3988324659995897e-09f);
    const F y = Isa::min(Isa::abs(x), Isa::set1(kGeluMax));
    const auto minus = [](F a) { return Isa::sub(Isa::zero(), a); };
    const F square = Isa::mul(y, y), square_lost = Isa::fma(y, y, minus(square));
    const F third = Isa::mul(square, cubic), third_lost = Isa::fma(square, cubic, minus(third));
    const F slope = Isa::add(third, linear), part = Isa::sub(slope, third);
    F lost = Isa::add(Isa::sub(third, Isa::sub(slope, part)), Isa::sub(linear, part));
    lost = Isa::add(Isa::add(lost, third_lost), linear_lost);
    lost = Isa::fma(square_lost, cubic, Isa::fma(square, cubic_lost, lost));
    const F w = Isa::mul(y, slope);
    lost = Isa::fma(y, lost, Isa::fma(y, slope, minus(w)));
    F t = exp_nonpositive(minus(w));
    t = Isa::fma(t, minus(lost), t);
    const F one = Isa::set1(1.0f);
    return Isa::mul(x, Isa::div(Isa::select(x, Isa::zero(), one, t), Isa::add(one, t)));
  }

  // 0 where x is below it; NaN stays NaN (max returns its second operand then).
  [[gnu::always_inline]] static inline F relu(F x) { return Isa::max(Isa::zero(), x); }

  // Calls fn(f) with the activation as a function of sixteen elements, so that a loop over many holds it in line: a
  // call for each passes its lanes through memory and costs more than the arithmetic.
  template <class Fn>
  [[gnu::always_inline]] static inline void with(Activation activation, Fn fn) {
    switch (activation) {
      case Activation::kSilu: return fn([](F x) { return silu(x); });
      case Activation::kGeluTanh: return fn([](F x) { return gelu_tanh(x); });
      case Activation::kGeluErf: return fn([](F x) { return gelu_erf(x); });
      case Activation::kRelu: return fn([](F x) { return relu(x); });
      case Activation::kTanh: return fn([](F x) { return tanh(x); });
      default: return fn([](F x) { return x; });
    }
  }

  // One value through the same lanes.
  static float exp_nonpositive(float x) {
    float out[kLanes];
    Isa::store(out, exp_nonpositive(Isa::set1(x)));
    return out[0];
  }
};

}  // namespace headrace
