// Products of prepared rows with a packed weight: the inner loops of LINEAR, QKV and HEAD.
//
// One accumulator per column: groups in K order, then the second terms in K order. The same operations whatever the
// number of rows: a row's result is bit-identical alone, in a batch, in any chunk and on any thread.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "core/step.h"

namespace headrace {

// Input rows as a product reads them; which members are set follows from the weight's layout.
struct Activations {
  int64_t k = 0;
  const float* f32 = nullptr;      // F32: [rows][k]; BF16 where the instruction set wants it so: rounded to bf16
  const uint16_t* bf16 = nullptr;  // BF16: [rows][k]
  // Q8, Q4, Q4M. Row `rows + r` of each holds the second term of row r, in the groups that have one (prologue.h).
  int64_t rows = 0;
  const int8_t* q8 = nullptr;            // [2 · rows][k], each group of 32 with its own scale
  const float* scales = nullptr;         // [2 · rows][k / 32]
  const int32_t* sums = nullptr;         // [2 · rows][k / 32], sums of q8 over the group
  const float* offsets = nullptr;        // [2 · rows][k / 32], what the zero point takes: Q4 8 · sum, Q4M scale · sum
  const int32_t* num_seconds = nullptr;  // [rows]
  const int32_t* seconds = nullptr;      // [rows][k / 32], the num_seconds groups that have a second term, ascending
  uint8_t* tile = nullptr;               // this thread's own, unpacked_bytes(k)

  // The rows from `row` on.
  Activations from_row(int64_t row) const {
    Activations a = *this;
    const int64_t groups = k / kGroup;
    a.f32 += row * k, a.bf16 += row * k, a.q8 += row * k;
    a.scales += row * groups, a.sums += row * groups, a.offsets += row * groups;
    a.num_seconds += row, a.seconds += row * groups;
    return a;
  }
};

// Instruction sets without a bf16 product read the rounded rows as f32.
template <class Isa>
concept HasFloatDot = requires(typename Isa::F f, const uint16_t* w) { Isa::dot_bf16(f, w, 1.0f, 1.0f); };
// Instruction sets that unpack a tile of nibbles once for many rows.
template <class Isa>
concept HasUnpacked = requires(const uint8_t* w, uint8_t* to) { Isa::unpack_q4(w, to); };

// One unpacked group: scales and minimums as f32, then bytes [8][16][4].
inline constexpr int64_t kUnpackedGroup = 2 * kLanes * 4 + kGroup * kLanes;
static constexpr int64_t unpacked_bytes(int64_t k) { return k / kGroup * kUnpackedGroup; }
// From this many rows on unpacking pays: it costs about what six rows of one group do.
inline constexpr int32_t kUnpackRows = 12;

static constexpr bool is_matrix(Layout layout) { return layout >= Layout::kF32 && layout <= Layout::kQ4m; }
static constexpr bool is_quantised(Layout layout) { return layout >= Layout::kQ8; }

// Bytes of one column tile (sixteen columns) per 32 k.
static constexpr int64_t group_bytes(Layout layout) {
  switch (layout) {
    case Layout::kF32: return kGroup * kLanes * 4;
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
  for (int64_t g = 0; g < groups; ++g, tile += group_bytes(kLayout), to += kUnpackedGroup) {
    constexpr bool kHasMin = kLayout == Layout::kQ4m;
    const auto* halves = reinterpret_cast<const uint16_t*>(tile);
    auto* floats = reinterpret_cast<float*>(to);
    Isa::store(floats, Isa::load_f16(halves));
    if constexpr (kHasMin) Isa::store(floats + kLanes, Isa::load_f16(halves + kLanes));
    Isa::unpack_q4(tile + (kHasMin ? 4 : 2) * kLanes, to + 2 * kLanes * 4);
  }
}

// acc + the products of sixteen columns with one row over one group: `dot` are the integers.
template <class Isa, Layout kLayout>
inline typename Isa::F add_group(typename Isa::F acc, typename Isa::I dot, typename Isa::F scale, typename Isa::F min,
                                 const Activations& a, int64_t index) {
  auto sum = Isa::to_float(dot);
  // Integers below 2^24: the difference is exact in f32 too.
  if constexpr (kLayout == Layout::kQ4) sum = Isa::sub(sum, Isa::set1(a.offsets[index]));
  acc = Isa::fma(sum, Isa::mul(scale, Isa::set1(a.scales[index])), acc);
  if constexpr (kLayout == Layout::kQ4m) acc = Isa::fma(min, Isa::set1(a.offsets[index]), acc);
  return acc;
}

// acc[m] + the products of sixteen columns with M rows over group `g` of a tile. `q` are the integers of the first row;
// `index` is where its scale, sum and offset stand.
template <class Isa, Layout kLayout, bool kIsUnpacked, int M>
[[gnu::always_inline]] inline void add_groups(const uint8_t* tile, int64_t g, const int8_t* q, const Activations& a,
                                              int64_t index, typename Isa::F (&acc)[M]) {
  using F = typename Isa::F;
  constexpr bool kHasMin = kLayout == Layout::kQ4m;
  const int64_t k = a.k, groups = k / kGroup;
  const uint8_t* w = tile + g * (kIsUnpacked ? kUnpackedGroup : group_bytes(kLayout));
  typename Isa::I dot[M];
  F scale, min = Isa::zero();
  if constexpr (kIsUnpacked) {
    Isa::template group_u4<M>(w + 2 * kLanes * 4, q, k, dot);
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
  for (int m = 0; m < M; ++m) acc[m] = add_group<Isa, kLayout>(acc[m], dot[m], scale, min, a, index + m * groups);
}

// Adds the second terms of one row to its sixteen sums.
template <class Isa, Layout kLayout, bool kIsUnpacked>
[[gnu::noinline]] void add_seconds(const uint8_t* tile, const Activations& a, int64_t row, float* out) {
  typename Isa::F acc[1] = {Isa::load(out)};
  const int64_t groups = a.k / kGroup, at = a.rows + row;
  const int32_t* seconds = a.seconds + row * groups;
  for (int32_t i = 0; i < a.num_seconds[row]; ++i) {
    const int64_t g = seconds[i];
    add_groups<Isa, kLayout, kIsUnpacked, 1>(tile, g, a.q8 + at * a.k + g * kGroup, a, at * groups + g, acc);
  }
  Isa::store(out, acc[0]);
}

// The sixteen columns of one tile times rows row … row + M − 1. out: [M][16].
template <class Isa, Layout kLayout, int M, bool kIsUnpacked>
[[gnu::noinline]] void product_tile(const uint8_t* tile, const Activations& a, int64_t row, float* out) {
  using F = typename Isa::F;
  F acc[M];
  for (int m = 0; m < M; ++m) acc[m] = Isa::zero();
  const int64_t k = a.k, groups = k / kGroup;
  if constexpr (kLayout == Layout::kF32) {
    const float* w = reinterpret_cast<const float*>(tile);
    const float* x = a.f32 + row * k;
    for (int64_t i = 0; i < k; ++i) {
      const F column = Isa::load(w + i * kLanes);
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
      add_groups<Isa, kLayout, kIsUnpacked, M>(tile, g, a.q8 + row * k + g * kGroup, a, first + g, acc);
    }
  }
  for (int m = 0; m < M; ++m) Isa::store(out + m * kLanes, acc[m]);
}

template <class Isa, Layout kLayout, bool kIsUnpacked, int M = Isa::kTileRows>
inline void product_rows(int count, const uint8_t* tile, const Activations& a, int64_t row, float* out) {
  if (count == M) {
    product_tile<Isa, kLayout, M, kIsUnpacked>(tile, a, row, out);
    if constexpr (is_quantised(kLayout)) {
      for (int m = 0; m < M; ++m) {
        if (a.num_seconds[row + m] > 0) add_seconds<Isa, kLayout, kIsUnpacked>(tile, a, row + m, out + m * kLanes);
      }
    }
    return;
  }
  if constexpr (M > 1) product_rows<Isa, kLayout, kIsUnpacked, M - 1>(count, tile, a, row, out);
}

// Rows swept per weight tile: their prepared form stays in L2 beside the tile (192 of at least 512 KiB).
static inline int32_t chunk_rows(Layout layout, int64_t k) {
  const int64_t row_bytes = k * (layout == Layout::kF32 ? 4 : layout == Layout::kBf16 ? 2 : 1);
  return static_cast<int32_t>(std::clamp<int64_t>(192 * 1024 / row_bytes, 16, 256) / 8 * 8);
}

// Whether tiles of this layout are unpacked when many rows meet them.
template <class Isa, Layout kLayout>
inline constexpr bool kUnpacks = HasUnpacked<Isa> && (kLayout == Layout::kQ4 || kLayout == Layout::kQ4m);

template <class Isa, Layout kLayout, int T, class TileOf, class Emit>
void sweep_layout(const Weight& w, const Activations& a, int32_t rows, Range units, TileOf tile_of, Emit& emit) {
  constexpr int kRows = Isa::kTileRows;
  const int64_t stride = tile_bytes(kLayout, a.k);
  alignas(kAlign) float out[T][kRows * kLanes];
  const int32_t chunk = chunk_rows(kLayout, a.k);
  for (int32_t first = 0; first < rows; first += chunk) {
    const int32_t stop = std::min(rows, first + chunk);
    bool is_unpacked = false;
    if constexpr (kUnpacks<Isa, kLayout>) {
      is_unpacked = stop - first >= kUnpackRows;
    }
    for (int64_t unit = units.start; unit < units.stop; ++unit) {
      const uint8_t* tiles[T];
      for (int t = 0; t < T; ++t) {
        tiles[t] = w.data + tile_of(unit, t) * stride;
        if constexpr (kUnpacks<Isa, kLayout>) {
          if (is_unpacked) {
            uint8_t* memory = a.tile + t * unpacked_bytes(a.k);
            unpack_tile<Isa, kLayout>(tiles[t], a.k / kGroup, memory);
            tiles[t] = memory;
          }
        }
      }
      for (int32_t row = first; row < stop; row += kRows) {
        const int count = std::min(kRows, stop - row);
        for (int t = 0; t < T; ++t) {
          if constexpr (kUnpacks<Isa, kLayout>) {
            if (is_unpacked) {
              product_rows<Isa, kLayout, true>(count, tiles[t], a, row, out[t]);
              continue;
            }
          }
          product_rows<Isa, kLayout, false>(count, tiles[t], a, row, out[t]);
        }
        for (int m = 0; m < count; ++m) {
          typename Isa::F y[T];
          for (int t = 0; t < T; ++t) y[t] = Isa::load(out[t] + m * kLanes);
          emit(unit, row + m, y);
        }
      }
    }
  }
}

// Calls emit(unit, row, y) for every unit in `units` and every row; y[t] holds the sixteen products of column tile
// tile_of(unit, t), t < T. Within a unit, rows rise.
template <class Isa, int T, class TileOf, class Emit>
void sweep(const Weight& w, const Activations& a, int32_t rows, Range units, TileOf tile_of, Emit emit) {
  switch (w.layout) {
    case Layout::kF32: return sweep_layout<Isa, Layout::kF32, T>(w, a, rows, units, tile_of, emit);
    case Layout::kBf16: return sweep_layout<Isa, Layout::kBf16, T>(w, a, rows, units, tile_of, emit);
    case Layout::kQ8: return sweep_layout<Isa, Layout::kQ8, T>(w, a, rows, units, tile_of, emit);
    case Layout::kQ4: return sweep_layout<Isa, Layout::kQ4, T>(w, a, rows, units, tile_of, emit);
    case Layout::kQ4m: return sweep_layout<Isa, Layout::kQ4m, T>(w, a, rows, units, tile_of, emit);
    default: return;  // the VM admits matrices only
  }
}

}  // namespace headrace
