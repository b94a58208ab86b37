// Products of prepared rows with one tile of a packed weight: the inner loops of LINEAR, QKV, MOE and HEAD.
//
// One accumulator per column: groups in K order, then the second terms in K order, where they are not folded into the
// first (HasWideRows). The same operations whatever the number of rows: a row's result is bit-identical alone, in a
// batch, in any chunk and on any thread. Sweeps over many tiles and rows: sweep.h.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "core/step.h"

namespace headrace {

// Input rows as a product reads them; which members are set follows from the weight's layout.
struct Activations {
  int64_t k = 0;
  const float* f32 = nullptr;      // F32, F16: [rows][k]; BF16 where the instruction set wants it so: rounded to bf16
  const uint16_t* bf16 = nullptr;  // BF16: [rows][k]
  const int16_t* q16 = nullptr;    // Q8 where rows are wide (HasWideRows): [rows][k]
  // Q8, Q4, Q4M. Row `rows + r` of each holds the second term of row r, in the groups that have one (prologue.h).
  int64_t rows = 0;
  const int8_t* q8 = nullptr;            // [2 · rows][k], each group of 32 with its own scale
  const float* scales = nullptr;         // [2 · rows][k / 32]
  const int32_t* sums = nullptr;         // [2 · rows][k / 32], sums of q8 or q16 over the group
  const float* offsets = nullptr;        // [2 · rows][k / 32], what the zero point takes: Q4 8 · sum, Q4M scale · sum
  const int32_t* num_seconds = nullptr;  // [rows]
  const int32_t* seconds = nullptr;      // [rows][k / 32], the num_seconds groups that have a second term, ascending
  uint8_t* own = nullptr;                // this thread's own memory, sweep_bytes(k)

  // The rows from `row` on. In line: instruction sets may not share one copy.
  [[gnu::always_inline]] Activations from_row(int64_t row) const {
    Activations a = *this;
    const int64_t groups = k / kGroup;
    a.f32 += row * k, a.bf16 += row * k, a.q8 += row * k, a.q16 += row * k;
    a.scales += row * groups, a.sums += row * groups, a.offsets += row * groups;
    a.num_seconds += row, a.seconds += row * groups;
    return a;
  }
};

// Instruction sets without a bf16 product read the rounded rows as f32.
template <class Isa>
concept HasFloatDot = requires(typename Isa::F f, const uint16_t* w) { Isa::dot_bf16(f, w, 1.0f, 1.0f); };
// Instruction sets whose products of two int8 fill 16 bits anyway meet Q8 with rows of 16 bits: a group that stands out
// has both terms in one whole number, 254 · first + second, of 254 times as fine a scale (0017).
template <class Isa>
concept HasWideRows = requires(int16_t* to) { Isa::narrow_wide(Isa::zero(), Isa::zero(), to); };
// Instruction sets that unpack a tile once for many rows: nibbles to bytes, bytes to what their product needs of them,
// bf16 to f32.
template <class Isa>
concept HasUnpacked = requires(const uint8_t* w, uint8_t* to) { Isa::unpack_q4(w, to); };

// One unpacked group: scales and minimums as f32, then bytes [8][16][4]; of Q8 16 bits of each weight, as the
// instruction set wants them.
inline constexpr int64_t kUnpackedHead = 2 * kLanes * 4;
static constexpr int64_t unpacked_bytes(Layout layout) {
  return kUnpackedHead + kGroup * kLanes * (layout == Layout::kQ8 ? 2 : 1);
}
static constexpr bool is_matrix(Layout layout) { return layout >= Layout::kF32 && layout <= Layout::kF16; }
static constexpr bool is_quantised(Layout layout) { return layout >= Layout::kQ8 && layout <= Layout::kQ4m; }
// Layouts that meet input rows as they are, in f32.
static constexpr bool is_plain(Layout layout) { return layout == Layout::kF32 || layout == Layout::kF16; }

// Bytes of one column tile (sixteen columns) per 32 k.
static constexpr int64_t group_bytes(Layout layout) {
  switch (layout) {
    case Layout::kF32: return kGroup * kLanes * 4;
    case Layout::kF16:
    case Layout::kBf16: return kGroup * kLanes * 2;
    case Layout::kQ8: return kLanes * 2 + kGroup * kLanes;
    case Layout::kQ4: return kLanes * 2 + kGroup * kLanes / 2;
    case Layout::kQ4m: return kLanes * 4 + kGroup * kLanes / 2;
    default: return 0;
  }
}
static constexpr int64_t tile_bytes(Layout layout, int64_t k) { return k / kGroup * group_bytes(layout); }
static constexpr int64_t num_tiles(int64_t n) { return (n + kLanes - 1) / kLanes; }

template <class Isa, Layout kLayout>
void unpack_tile(const uint8_t* tile, int64_t groups, uint8_t* to) {
  constexpr bool kHasMin = kLayout == Layout::kQ4m;
  for (int64_t g = 0; g < groups; ++g, tile += group_bytes(kLayout), to += unpacked_bytes(kLayout)) {
    const auto* halves = reinterpret_cast<const uint16_t*>(tile);
    auto* floats = reinterpret_cast<float*>(to);
    Isa::store(floats, Isa::load_f16(halves));
    Isa::store(floats + kLanes, kHasMin ? Isa::load_f16(halves + kLanes) : Isa::zero());
    const uint8_t* weights = tile + (kHasMin ? 4 : 2) * kLanes;
    if constexpr (kLayout == Layout::kQ8) Isa::unpack_q8(weights, to + kUnpackedHead);
    else Isa::unpack_q4(weights, to + kUnpackedHead);
  }
}

template <class Isa, Layout kLayout>
inline constexpr bool kIsWide = HasWideRows<Isa> && kLayout == Layout::kQ8;
template <class Isa, Layout kLayout>
using RowInteger = std::conditional_t<kIsWide<Isa, kLayout>, int16_t, int8_t>;

template <class Isa, Layout kLayout>
[[gnu::always_inline]] inline const RowInteger<Isa, kLayout>* row_integers(const Activations& a, int64_t row) {
  if constexpr (kIsWide<Isa, kLayout>) return a.q16 + row * a.k;
  else return a.q8 + row * a.k;
}

// Integer products of an unpacked group with M rows at q.
template <class Isa, Layout kLayout, int M>
[[gnu::always_inline]] inline void unpacked_dots(const uint8_t* group, const RowInteger<Isa, kLayout>* const (&q)[M],
                                                 typename Isa::I (&dot)[M]) {
  if constexpr (kLayout == Layout::kQ8) Isa::template group_s16<M>(group + kUnpackedHead, q, dot);
  else Isa::template group_u4<M>(group + kUnpackedHead, q, dot);
}

// acc + the products of sixteen columns with one row over one group: `dot` are the integers, `row_scale` and `offset`
// the row's.
template <class Isa, Layout kLayout>
[[gnu::always_inline]] inline typename Isa::F add_group(typename Isa::F acc, typename Isa::I dot, typename Isa::F scale,
                                                        typename Isa::F min, float row_scale, float offset) {
  auto sum = Isa::to_float(dot);
  // Integers below 2^24: the difference is exact in f32 too.
  if constexpr (kLayout == Layout::kQ4) sum = Isa::sub(sum, Isa::set1(offset));
  acc = Isa::fma(sum, Isa::mul(scale, Isa::set1(row_scale)), acc);
  if constexpr (kLayout == Layout::kQ4m) acc = Isa::fma(min, Isa::set1(offset), acc);
  return acc;
}

// Asks for the bytes that the sweep will read kAheadBytes from here, where the instruction set wants that: a core waits
// for its lines long before memory is busy, because a group's work fills its window of instructions.
template <class Isa>
[[gnu::always_inline]] inline void fetch_ahead(const uint8_t* at, int64_t size) {
  if constexpr (requires { Isa::kAheadBytes; }) {
    for (int64_t line = 0; line < size; line += kAlign) __builtin_prefetch(at + Isa::kAheadBytes + line);
  }
}

// acc[m] + the products of sixteen columns with M rows over group `g` of a tile. `q` are the integers of the first row;
// `index` is where its scale, sum and offset stand.
template <class Isa, Layout kLayout, bool kIsUnpacked, int M>
[[gnu::always_inline]] inline void add_groups(const uint8_t* tile, int64_t g, const RowInteger<Isa, kLayout>* q,
                                              const Activations& a, int64_t index, typename Isa::F (&acc)[M]) {
  using F = typename Isa::F;
  constexpr bool kHasMin = kLayout == Layout::kQ4m;
  const int64_t k = a.k, groups = k / kGroup;
  const uint8_t* w = tile + g * (kIsUnpacked ? unpacked_bytes(kLayout) : group_bytes(kLayout));
  typename Isa::I dot[M];
  F scale, min = Isa::zero();
  if constexpr (kIsUnpacked) {
    const RowInteger<Isa, kLayout>* rows[M];
    for (int m = 0; m < M; ++m) rows[m] = q + m * k;
    unpacked_dots<Isa, kLayout, M>(w, rows, dot);
    scale = Isa::load(reinterpret_cast<const float*>(w));
    if constexpr (kHasMin) min = Isa::load(reinterpret_cast<const float*>(w) + kLanes);
  } else {
    if constexpr (kLayout == Layout::kQ8) {
      int32_t sums[M];
      for (int m = 0; m < M; ++m) sums[m] = a.sums[index + m * groups];
      Isa::template group_q8<M>(w + 2 * kLanes, q, k, sums, dot);
    } else {
      Isa::template group_q4<M>(w + (kHasMin ? 4 : 2) * kLanes, q, k, dot);
    }
    scale = Isa::load_f16(reinterpret_cast<const uint16_t*>(w));
    if constexpr (kHasMin) min = Isa::load_f16(reinterpret_cast<const uint16_t*>(w) + kLanes);
  }
  for (int m = 0; m < M; ++m) {
    const int64_t at = index + m * groups;
    acc[m] = add_group<Isa, kLayout>(acc[m], dot[m], scale, min, a.scales[at], a.offsets[at]);
  }
}

// Adds the second terms of one row to its sixteen sums.
template <class Isa, Layout kLayout>
[[gnu::noinline]] void add_seconds(const uint8_t* tile, const Activations& a, int64_t row, float* out) {
  typename Isa::F acc[1] = {Isa::load(out)};
  const int64_t groups = a.k / kGroup, at = a.rows + row;
  const int32_t* seconds = a.seconds + row * groups;
  for (int32_t i = 0; i < a.num_seconds[row]; ++i) {
    const int64_t g = seconds[i];
    const auto* q = row_integers<Isa, kLayout>(a, at) + g * kGroup;
    add_groups<Isa, kLayout, false, 1>(tile, g, q, a, at * groups + g, acc);
  }
  Isa::store(out, acc[0]);
}

// acc[m] + the products of sixteen columns with M rows of f32, `stride` apart, over `k` inputs. panel: [k][16].
template <class Isa, int M>
[[gnu::always_inline]] inline void add_floats(const float* panel, const float* x, int64_t stride, int64_t k,
                                              typename Isa::F (&acc)[M]) {
  for (int64_t i = 0; i < k; ++i) {
    const auto column = Isa::load(panel + i * kLanes);
    for (int m = 0; m < M; ++m) acc[m] = Isa::fma(column, Isa::set1(x[m * stride + i]), acc[m]);
  }
}

// The sixteen columns of one tile times rows row … row + M − 1. out: [M][16].
template <class Isa, Layout kLayout, int M, bool kIsUnpacked>
[[gnu::noinline]] void product_tile(const uint8_t* tile, const Activations& a, int64_t row, float* out) {
  using F = typename Isa::F;
  F acc[M];
  for (int m = 0; m < M; ++m) acc[m] = Isa::zero();
  const int64_t k = a.k, groups = k / kGroup;
  if constexpr (kLayout == Layout::kF32) {
    add_floats<Isa, M>(reinterpret_cast<const float*>(tile), a.f32 + row * k, k, k, acc);
  } else if constexpr (kLayout == Layout::kF16) {
    const float* x = a.f32 + row * k;
    for (int64_t i = 0; i < k; ++i) {
      const F column = Isa::load_f16(reinterpret_cast<const uint16_t*>(tile) + i * kLanes);
      for (int m = 0; m < M; ++m) acc[m] = Isa::fma(column, Isa::set1(x[m * k + i]), acc[m]);
    }
  } else if constexpr (kLayout == Layout::kBf16 && HasFloatDot<Isa>) {
    const uint16_t* w = reinterpret_cast<const uint16_t*>(tile);
    const float* x = a.f32 + row * k;
    for (int64_t i = 0; i < k; i += 2) {
      for (int m = 0; m < M; ++m) acc[m] = Isa::dot_bf16(acc[m], w + i * kLanes, x[m * k + i], x[m * k + i + 1]);
    }
  } else if constexpr (kLayout == Layout::kBf16) {
    const uint16_t* w = reinterpret_cast<const uint16_t*>(tile);
    const uint16_t* x = a.bf16 + row * k;
    for (int64_t i = 0; i < k; i += 2) {
      for (int m = 0; m < M; ++m) {
        uint32_t pair;
        std::memcpy(&pair, x + m * k + i, sizeof pair);
        acc[m] = Isa::dot_bf16(acc[m], w + i * kLanes, pair);
      }
    }
  } else {
    const int64_t first = row * groups;
    for (int64_t g = 0; g < groups; ++g) {
      if constexpr (!kIsUnpacked) fetch_ahead<Isa>(tile + g * group_bytes(kLayout), group_bytes(kLayout));
      const auto* q = row_integers<Isa, kLayout>(a, row) + g * kGroup;
      add_groups<Isa, kLayout, kIsUnpacked, M>(tile, g, q, a, first + g, acc);
    }
  }
  for (int m = 0; m < M; ++m) Isa::store(out + m * kLanes, acc[m]);
}

// The same for `count` rows, at most a tile of them, without their second terms.
template <class Isa, Layout kLayout, bool kIsUnpacked, int M = Isa::kTileRows>
inline void product_rows(int count, const uint8_t* tile, const Activations& a, int64_t row, float* out) {
  if (count == M) return product_tile<Isa, kLayout, M, kIsUnpacked>(tile, a, row, out);
  if constexpr (M > 1) product_rows<Isa, kLayout, kIsUnpacked, M - 1>(count, tile, a, row, out);
}

}  // namespace headrace
