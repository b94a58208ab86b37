#include "pack.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "isa/scalar.h"
#include "ops/embed.h"
#include "ops/product.h"

namespace headrace {
namespace {

// Round to nearest even; what is too large becomes infinity.
uint16_t f32_to_f16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x47800000u) return static_cast<uint16_t>(sign | 0x7c00u);  // 65536 and up
  if (magnitude < 0x38800000u) {  // below 2^-14: f32 addition at 2^-1 rounds to multiples of 2^-24
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000u));
  }
  // Rounding may carry into the exponent, up to infinity: both are right.
  return static_cast<uint16_t>(sign | ((magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13));
}

// Integer weights of one group with their f16 scale and min: q is q + 128 (Q8) or a nibble (Q4, Q4M).
struct Group {
  uint16_t scale = 0, min = 0;
  uint8_t q[kGroup] = {};
};

uint16_t finite_half(float value) {
  const uint16_t half = f32_to_f16(value);
  if ((half & 0x7c00u) == 0x7c00u) {
    throw std::invalid_argument("a weight group is not finite or too large to quantise (f16 scale or minimum)");
  }
  return half;
}

// Sixteen-step groups: a scale and a minimum, both f16, and how far their nearest numbers are from the weights.
struct Fit {
  float scale = 0.0f, min = 0.0f;
  float error = 0.0f;  // sum of squares
};

// Four weights at a time, on any CPU; a group is eight of them.
using Four = float __attribute__((vector_size(16)));
constexpr int kFours = kGroup / 4;

inline Four load_four(const float* p) {
  Four value;
  std::memcpy(&value, p, sizeof value);
  return value;
}
inline float total(Four sums) { return (sums[0] + sums[2]) + (sums[1] + sums[3]); }
// The nearest whole number within `low` … `high`, ties to even: adding 1.5 · 2^23 leaves no bit for a fraction.
inline Four nearest(Four value, float low, float high) {
  const Four zero = {}, least = zero + low, most = zero + high, shift = zero + 12582912.0f;
  value = value > least ? value : least;
  value = value < most ? value : most;
  return (value + shift) - shift;
}
inline Four nearest_of_16(Four value) { return nearest(value, 0.0f, 15.0f); }
inline float inverse_of(float scale) { return scale == 0.0f ? 0.0f : 1.0f / scale; }

float squared_error(const float* x, float scale, float min) {
  const float inverse = inverse_of(scale);
  Four sum = {};
  for (int i = 0; i < kFours; ++i) {
    const Four value = load_four(x + 4 * i);
    const Four gap = nearest_of_16((value - min) * inverse) * scale + min - value;
    sum += gap * gap;
  }
  return total(sum);
}

// The line w = q · scale + min through the weights, for the q that `scale` and `min` give: least squares in closed
// form.
Fit refit(const float* x, float scale, float min) {
  const float inverse = inverse_of(scale);
  Four q_sum = {}, qq_sum = {}, x_sum = {}, qx_sum = {};
  for (int i = 0; i < kFours; ++i) {
    const Four value = load_four(x + 4 * i), q = nearest_of_16((value - min) * inverse);
    q_sum += q, qq_sum += q * q, x_sum += value, qx_sum += q * value;
  }
  const float q = total(q_sum), sum = total(x_sum), n = kGroup;
  const float spread = n * total(qq_sum) - q * q;
  if (spread <= 0.0f) return {scale, min};
  const float slope = (n * total(qx_sum) - q * sum) / spread;
  return {slope, (sum - slope * q) / n};
}

// How much of a group's range the sixteen steps are laid over: ends that are cut off cost less than coarse steps do for
// the other weights. Errors are compared with scale and minimum as they will be stored.
constexpr float kRanges[] = {1.0f, 0.96f, 0.92f, 0.88f, 0.84f, 0.8f};

Fit best_fit(const float* x, float low, float high) {
  // A line that leaves f16 has no finite error and is not better.
  const auto stored = [&](float scale, float min) {
    Fit fit{scalar::f16_to_f32(f32_to_f16(scale)), scalar::f16_to_f32(f32_to_f16(min))};
    fit.error = squared_error(x, fit.scale, fit.min);
    return fit;
  };
  Fit best = stored((high - low) / 15.0f, low);
  for (const float range : kRanges) {
    if (best.error == 0.0f) break;
    const float cut = (high - low) * (1.0f - range) / 2.0f;
    const Fit line = refit(x, (high - low) * range / 15.0f, low + cut);
    const Fit fit = stored(line.scale, line.min);
    if (fit.error < best.error) best = fit;
  }
  return best;
}

template <class Whole>
void put_whole(Group& group, Whole whole_of, const float* x) {
  for (int i = 0; i < kGroup; i += 4) {
    const Four q = whole_of(load_four(x + i));
    for (int j = 0; j < 4; ++j) group.q[i + j] = static_cast<uint8_t>(q[j]);
  }
}

// Rounds with the scale as stored, so that the error is half a step of what will be multiplied.
Group quantise(Layout layout, const float* x) {
  Group group;
  float low = x[0], high = x[0], poison = 0.0f;
  for (int i = 0; i < kGroup; ++i) {
    low = std::min(low, x[i]), high = std::max(high, x[i]);
    poison += x[i] * 0.0f;
  }
  if (poison != 0.0f) throw std::invalid_argument("a weight is NaN or infinite: it cannot be quantised");
  if (layout == Layout::kQ8) {
    group.scale = finite_half(std::max(-low, high) / 127.0f);
    const float scale = scalar::f16_to_f32(group.scale);
    put_whole(
        group,
        [&](Four value) { return scale == 0.0f ? Four{} + 128.0f : nearest(value / scale + 128.0f, 1.0f, 255.0f); }, x);
  } else if (layout == Layout::kQ4) {
    // The larger side gets the sixteenth value, as GGUF does.
    group.scale = finite_half((-low > high ? low : high) / -8.0f);
    const float scale = scalar::f16_to_f32(group.scale);
    put_whole(
        group, [&](Four value) { return scale == 0.0f ? Four{} + 8.0f : nearest(value / scale + 8.0f, 0.0f, 15.0f); },
        x);
  } else {
    const Fit fit = best_fit(x, low, high);
    group.scale = finite_half(fit.scale);
    group.min = finite_half(fit.min);
    const float inverse = inverse_of(fit.scale);
    put_whole(group, [&](Four value) { return nearest_of_16((value - fit.min) * inverse); }, x);
  }
  return group;
}

// The group as it stands in the source, where the layout holds the same numbers. False when it does not.
bool take(Layout layout, Source source, const uint8_t* row, int64_t g, Group& group) {
  if (layout == Layout::kQ8 && is_scaled(source)) {
    const ScaledGroup stored = read_scaled(source, row, g);
    group.scale = stored.scale;
    for (int i = 0; i < kGroup; ++i) group.q[i] = static_cast<uint8_t>(stored.q[i] ^ 0x80);
    return true;
  }
  if (source == Source::kQ4_0 && (layout == Layout::kQ4 || layout == Layout::kQ4m)) {
    const ScaledGroup stored = read_scaled(source, row, g);
    group.scale = stored.scale;
    if (layout == Layout::kQ4m) group.min = finite_half(-8.0f * scalar::f16_to_f32(group.scale));
    for (int i = 0; i < kGroup; ++i) group.q[i] = static_cast<uint8_t>(stored.q[i] + 8);
    return true;
  }
  if (layout != Layout::kQ4m || (source != Source::kQ4_1 && source != Source::kQ4_K)) return false;
  // Q4_1's two are f16 already; those of Q4_K are products of f16 and six bits, and are rounded.
  const AffineGroup stored = read_affine(source, row, g);
  group.scale = finite_half(stored.scale);
  group.min = finite_half(stored.min);
  std::memcpy(group.q, stored.q, kGroup);
  return true;
}

// Writes group `g` of column `lane` into its tile.
void put_group(Layout layout, const Group& group, int64_t lane, uint8_t* to) {
  auto* halves = reinterpret_cast<uint16_t*>(to);
  halves[lane] = group.scale;
  if (layout == Layout::kQ8) {
    for (int i = 0; i < kGroup; ++i) to[2 * kLanes + i / 4 * 4 * kLanes + 4 * lane + i % 4] = group.q[i];
    return;
  }
  if (layout == Layout::kQ4m) halves[kLanes + lane] = group.min;
  uint8_t* nibbles = to + (layout == Layout::kQ4m ? 4 : 2) * kLanes;
  for (int j = 0; j < kGroup / 8; ++j)
    for (int i = 0; i < 4; ++i) {
      const auto byte = static_cast<uint8_t>(group.q[8 * j + i] | group.q[8 * j + 4 + i] << 4);
      nibbles[j * 4 * kLanes + 4 * lane + i] = byte;
    }
}

// What overflows an f16 is refused; a NaN or infinity stays what it is.
uint16_t half_of(float value) {
  const uint16_t half = f32_to_f16(value);
  if ((half & 0x7fffu) == 0x7c00u && std::isfinite(value)) {
    throw std::invalid_argument("a weight is too large for f16, whose largest is 65504");
  }
  return half;
}

void put_floats(Layout layout, const float* x, int64_t lane, uint8_t* to) {
  for (int i = 0; i < kGroup; ++i) {
    if (layout == Layout::kF32) reinterpret_cast<float*>(to)[i * kLanes + lane] = x[i];
    else if (layout == Layout::kF16) reinterpret_cast<uint16_t*>(to)[i * kLanes + lane] = half_of(x[i]);
    else reinterpret_cast<uint16_t*>(to)[i / 2 * 2 * kLanes + 2 * lane + i % 2] = scalar::f32_to_bf16(x[i]);
  }
}

void pack_tile(Layout layout, Source source, const uint8_t* raw, int64_t n, int64_t k, int64_t tile, uint8_t* out) {
  const int64_t groups = k / kGroup, row_bytes = source_bytes(source, 1, k);
  uint8_t* base = out + tile * tile_bytes(layout, k);
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    const int64_t row = tile * kLanes + lane;
    for (int64_t g = 0; g < groups; ++g) {
      float x[kGroup] = {};  // what lies past the last row: zeros that any product leaves at zero
      Group group;
      const bool is_taken = row < n && is_quantised(layout) && take(layout, source, raw + row * row_bytes, g, group);
      if (row < n && !is_taken) read_group(source, raw + row * row_bytes, g, x);
      uint8_t* to = base + g * group_bytes(layout);
      if (!is_quantised(layout)) put_floats(layout, x, lane, to);
      else put_group(layout, is_taken ? group : quantise(layout, x), lane, to);
    }
  }
}

}  // namespace

int64_t packed_bytes(Layout layout, int64_t n, int64_t k) { return num_tiles(n) * tile_bytes(layout, k); }

void pack(Layout layout, Source source, const uint8_t* raw, int64_t n, int64_t k, int32_t threads, uint8_t* out) {
  const int64_t tiles = num_tiles(n);
  std::atomic<int64_t> next{0};
  std::atomic<bool> has_failed{false};
  std::vector<std::string> errors(static_cast<size_t>(threads));
  const auto work = [&](int32_t thread) {
    try {
      for (int64_t tile = next++; tile < tiles && !has_failed; tile = next++) {
        pack_tile(layout, source, raw, n, k, tile, out);
      }
    } catch (const std::invalid_argument& error) {
      errors[static_cast<size_t>(thread)] = error.what();
      has_failed = true;
    }
  };
  std::vector<std::thread> workers;
  for (int32_t thread = 1; thread < threads; ++thread) workers.emplace_back(work, thread);
  work(0);
  for (auto& worker : workers) worker.join();
  for (const auto& error : errors) {
    if (!error.empty()) throw std::invalid_argument(error);
  }
}

void unpack(Layout layout, const uint8_t* data, int64_t n, int64_t k, float* out) {
  const Weight weight{layout, n, k, data, packed_bytes(layout, n, k)};
  for (int64_t row = 0; row < n; ++row)
    for (int64_t g = 0; g < k / kGroup; ++g) dequantise_group(weight, row, g, out + row * k + g * kGroup);
}

}  // namespace headrace
