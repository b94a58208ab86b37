// Sweeps of prepared rows over a packed weight, for the instructions: few rows meet each tile as it lies, many rows
// meet it unpacked once for a chunk of them. Per row and column the order is the same (product.h).
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "core/claims.h"
#include "core/step.h"
#include "ops/product.h"

namespace headrace {

// From this many rows on unpacking pays: it costs about what six rows of one group do.
inline constexpr int32_t kUnpackRows = 12;
// Rows that a weight tile meets before the next one: their sums of two tiles are 32 KiB.
inline constexpr int32_t kChunkRows = 256;
// Second terms of a chunk in the order of their groups. A group has one when its maximum is 1.25 times the row's mean
// of maxima, so at most four fifths of the groups of a row do.
struct SecondTerms {
  int32_t* starts = nullptr;  // [k / 32 + 1], where each group's terms begin
  int8_t* q8 = nullptr;       // [terms][32]
  float* scales = nullptr;
  float* offsets = nullptr;
  uint16_t* rows = nullptr;  // of the chunk

  static constexpr int64_t limit(int64_t k) { return k / kGroup * kChunkRows; }
  static constexpr int64_t size_bytes(int64_t k) {
    return align_up((k / kGroup + 1) * 4) + limit(k) * (kGroup + 4 + 4 + 2);
  }
  [[gnu::always_inline]] static SecondTerms place(uint8_t* memory, int64_t k) {
    SecondTerms terms;
    terms.starts = reinterpret_cast<int32_t*>(memory);
    terms.q8 = reinterpret_cast<int8_t*>(memory + align_up((k / kGroup + 1) * 4));
    terms.scales = reinterpret_cast<float*>(terms.q8 + limit(k) * kGroup);
    terms.offsets = terms.scales + limit(k);
    terms.rows = reinterpret_cast<uint16_t*>(terms.offsets + limit(k));
    return terms;
  }
  // Gathers those of rows first … first + count − 1: tiles by the dozen will read them, one after the other.
  // A template, so that no two instruction sets share its code.
  template <class Isa>
  void fill(const Activations& a, int64_t first, int32_t count) const {
    const int64_t groups = a.k / kGroup;
    std::fill(starts, starts + groups + 1, 0);
    for (int64_t row = first; row < first + count; ++row)
      for (int32_t i = 0; i < a.num_seconds[row]; ++i) ++starts[a.seconds[row * groups + i] + 1];
    for (int64_t g = 0; g < groups; ++g) starts[g + 1] += starts[g];
    // Each start moves to its group's end while it is filled, which is the next group's start: then all shift back.
    for (int64_t row = first; row < first + count; ++row) {
      for (int32_t i = 0; i < a.num_seconds[row]; ++i) {
        const int64_t g = a.seconds[row * groups + i], from = (a.rows + row) * groups + g;
        const int32_t to = starts[g]++;
        std::memcpy(q8 + int64_t{to} * kGroup, a.q8 + from * kGroup, kGroup);
        scales[to] = a.scales[from], offsets[to] = a.offsets[from];
        rows[to] = static_cast<uint16_t>(row - first);
      }
    }
    for (int64_t g = groups; g > 0; --g) starts[g] = starts[g - 1];
    starts[0] = 0;
  }
};

// Inputs of a panel: sixteen columns of them as f32 are half of a first-level cache of 32 KiB.
inline constexpr int64_t kPanelInputs = 256;

// A thread's own memory for a sweep of unpacked tiles: the sums of two, and the tiles with their second terms or a
// panel.
static constexpr int64_t sweep_bytes(int64_t k) {
  const int64_t tiles = 2 * k / kGroup * unpacked_bytes(Layout::kQ8) + SecondTerms::size_bytes(k);
  return 2 * kChunkRows * kLanes * 4 + std::max(tiles, kPanelInputs * kLanes * 4);
}

// Rows swept per weight tile: their prepared form stays in L2 beside the tile (192 of at least 512 KiB). But not below
// kLeastChunk: reading rows again from the next cache costs less than reading and unpacking tiles again (docs/lab).
inline constexpr int32_t kLeastChunk = 96;
template <class Isa>
constexpr int32_t chunk_rows(Layout layout, int64_t k) {
  const bool is_half = layout == Layout::kBf16 || (layout == Layout::kQ8 && HasWideRows<Isa>);
  const int64_t row_bytes = k * (is_plain(layout) ? 4 : is_half ? 2 : 1);
  return static_cast<int32_t>(std::clamp<int64_t>(192 * 1024 / row_bytes, kLeastChunk, kChunkRows) / 8 * 8);
}

// Whether tiles of this layout are unpacked when many rows meet them: integers group by group, floats in panels of f32
// where rows are f32 too.
template <class Isa, Layout kLayout>
inline constexpr bool kUnpacksIntegers = HasUnpacked<Isa> && is_quantised(kLayout);
template <class Isa, Layout kLayout>
inline constexpr bool kUnpacksFloats =
    HasUnpacked<Isa> && (kLayout == Layout::kF16 || (kLayout == Layout::kBf16 && HasFloatDot<Isa>));

// A sweep of one chunk of rows over tiles of integers: each tile is unpacked once, and the second terms of all rows are
// added group by group, a register tile of rows at a time. Per row and column the order is that of the plain sweep.
template <class Isa, Layout kLayout, int T>
class UnpackedSweep {
 public:
  UnpackedSweep(const Activations& a, int32_t first, int32_t stop)
      : a_(a), first_(first), rows_(stop - first), groups_(a.k / kGroup) {
    uint8_t* at = a.own;
    for (int t = 0; t < T; ++t) sums_[t] = reinterpret_cast<float*>(at), at += kChunkRows * kLanes * 4;
    for (int t = 0; t < T; ++t) tiles_[t] = at, at += groups_ * unpacked_bytes(kLayout);
    if constexpr (kHasSeconds) {
      seconds_ = SecondTerms::place(at, a.k);
      seconds_.template fill<Isa>(a, first, rows_);
    }
  }

  template <class TileOf, class Emit>
  void run(const uint8_t* weight, Range units, TileOf tile_of, Emit& emit) {
    const int64_t stride = tile_bytes(kLayout, a_.k);
    for (int64_t unit = units.start; unit < units.stop; ++unit) {
      for (int t = 0; t < T; ++t) {
        unpack_tile<Isa, kLayout>(weight + tile_of(unit, t) * stride, groups_, tiles_[t]);
        for (int32_t row = 0; row < rows_; row += kRows) {
          const int count = std::min(kRows, rows_ - row);
          product_rows<Isa, kLayout, true>(count, tiles_[t], a_, first_ + row, sums_[t] + row * kLanes);
        }
        if constexpr (kHasSeconds) add_seconds(tiles_[t], sums_[t]);
      }
      emit(unit, first_, rows_, sums_);
    }
  }

 private:
  static constexpr int kRows = Isa::kTileRows;
  static constexpr bool kHasSeconds = !kIsWide<Isa, kLayout>;

  [[gnu::noinline]] void add_seconds(const uint8_t* tile, float* sums) const {
    for (int64_t g = 0; g < groups_; ++g, tile += unpacked_bytes(kLayout)) {
      int32_t i = seconds_.starts[g];
      for (; i + kRows <= seconds_.starts[g + 1]; i += kRows) add_terms<kRows>(tile, i, sums);
      for (; i < seconds_.starts[g + 1]; ++i) add_terms<1>(tile, i, sums);
    }
  }

  template <int M>
  [[gnu::always_inline]] inline void add_terms(const uint8_t* group, int64_t i, float* sums) const {
    const int8_t* q[M];
    for (int m = 0; m < M; ++m) q[m] = seconds_.q8 + (i + m) * kGroup;
    typename Isa::I dot[M];
    unpacked_dots<Isa, kLayout, M>(group, q, dot);
    const auto scale = Isa::load(reinterpret_cast<const float*>(group));
    const auto min = Isa::load(reinterpret_cast<const float*>(group) + kLanes);
    for (int m = 0; m < M; ++m) {
      float* sum = sums + seconds_.rows[i + m] * kLanes;
      Isa::store(sum, add_group<Isa, kLayout>(Isa::load(sum), dot[m], scale, min, seconds_.scales[i + m],
                                              seconds_.offsets[i + m]));
    }
  }

  const Activations& a_;
  const int32_t first_, rows_;
  const int64_t groups_;
  uint8_t* tiles_[T];
  float* sums_[T];  // [rows][16]
  SecondTerms seconds_;
};

// The same over tiles of floats: a panel of a tile is widened once for all rows, so that what remains is loads and
// fused multiply-adds.
template <class Isa, Layout kLayout, int T>
class PanelSweep {
 public:
  PanelSweep(const Activations& a, int32_t first, int32_t stop) : a_(a), first_(first), rows_(stop - first) {
    uint8_t* at = a.own;
    for (int t = 0; t < T; ++t) sums_[t] = reinterpret_cast<float*>(at), at += kChunkRows * kLanes * 4;
    panel_ = reinterpret_cast<float*>(at);
  }

  template <class TileOf, class Emit>
  void run(const uint8_t* weight, Range units, TileOf tile_of, Emit& emit) {
    const int64_t stride = tile_bytes(kLayout, a_.k);
    for (int64_t unit = units.start; unit < units.stop; ++unit) {
      for (int t = 0; t < T; ++t) {
        const auto* tile = reinterpret_cast<const uint16_t*>(weight + tile_of(unit, t) * stride);
        for (int64_t start = 0; start < a_.k; start += kPanelInputs) {
          const int64_t inputs = std::min(kPanelInputs, a_.k - start);
          widen(tile + start * kLanes, inputs);
          for (int32_t row = 0; row < rows_; row += kRows) {
            const int count = std::min(kRows, rows_ - row);
            add_rows<kRows>(count, row, start, inputs, sums_[t] + row * kLanes);
          }
        }
      }
      emit(unit, first_, rows_, sums_);
    }
  }

 private:
  static constexpr int kRows = Isa::kTileRows;

  void widen(const uint16_t* tile, int64_t inputs) const {
    for (int64_t i = 0; i < inputs; i += 2) {
      const uint16_t* pair = tile + i * kLanes;
      const bool is_paired = kLayout == Layout::kBf16;
      Isa::store(panel_ + i * kLanes, is_paired ? Isa::even_bf16(pair) : Isa::load_f16(pair));
      Isa::store(panel_ + (i + 1) * kLanes, is_paired ? Isa::odd_bf16(pair) : Isa::load_f16(pair + kLanes));
    }
  }

  template <int M>
  void add_rows(int count, int32_t row, int64_t start, int64_t inputs, float* sums) const {
    if (count == M) return add_tile<M>(row, start, inputs, sums);
    if constexpr (M > 1) add_rows<M - 1>(count, row, start, inputs, sums);
  }
  template <int M>
  [[gnu::noinline]] void add_tile(int32_t row, int64_t start, int64_t inputs, float* sums) const {
    typename Isa::F acc[M];
    for (int m = 0; m < M; ++m) acc[m] = start == 0 ? Isa::zero() : Isa::load(sums + m * kLanes);
    add_floats<Isa, M>(panel_, a_.f32 + (first_ + row) * a_.k + start, a_.k, inputs, acc);
    for (int m = 0; m < M; ++m) Isa::store(sums + m * kLanes, acc[m]);
  }

  const Activations& a_;
  const int32_t first_, rows_;
  float* panel_;    // [kPanelInputs][16]
  float* sums_[T];  // [rows][16]
};

template <class Isa, Layout kLayout, int T, class Units, class TileOf, class Emit>
void sweep_layout(const Weight& w, const Activations& a, int32_t rows, Units units, TileOf tile_of, Emit& emit) {
  constexpr int kRows = Isa::kTileRows;
  const int64_t stride = tile_bytes(kLayout, a.k);
  alignas(kAlign) float out[T][kRows * kLanes];
  const float* sums[T];
  for (int t = 0; t < T; ++t) sums[t] = out[t];
  const int32_t chunk = chunk_rows<Isa>(kLayout, a.k);
  for (int32_t first = 0; first < rows; first += chunk) {
    const int32_t stop = std::min(rows, first + chunk);
    if (stop - first >= kUnpackRows) {
      if constexpr (kUnpacksIntegers<Isa, kLayout>) {
        UnpackedSweep<Isa, kLayout, T> sweep(a, first, stop);
        units.each([&](Range range) { sweep.run(w.data, range, tile_of, emit); });
        continue;
      } else if constexpr (kUnpacksFloats<Isa, kLayout>) {
        PanelSweep<Isa, kLayout, T> sweep(a, first, stop);
        units.each([&](Range range) { sweep.run(w.data, range, tile_of, emit); });
        continue;
      }
    }
    units.each([&](Range range) {
      for (int64_t unit = range.start; unit < range.stop; ++unit) {
        for (int32_t row = first; row < stop; row += kRows) {
          const int count = std::min(kRows, stop - row);
          for (int t = 0; t < T; ++t) {
            const uint8_t* tile = w.data + tile_of(unit, t) * stride;
            product_rows<Isa, kLayout, false>(count, tile, a, row, out[t]);
            if constexpr (is_quantised(kLayout) && !kIsWide<Isa, kLayout>) {
              for (int m = 0; m < count; ++m) {
                if (a.num_seconds[row + m] > 0) add_seconds<Isa, kLayout>(tile, a, row + m, out[t] + m * kLanes);
              }
            }
          }
          emit(unit, row, count, sums);
        }
      }
    });
  }
}

// Calls emit(unit, row, count, y) for every unit in `units` (OwnUnits or SharedUnits) and every block of rows row …
// row + count − 1: y[t], t < T, holds their products with column tile tile_of(unit, t), [count][16].
template <class Isa, int T, class Units, class TileOf, class Emit>
void sweep_blocks(const Weight& w, const Activations& a, int32_t rows, Units units, TileOf tile_of, Emit emit) {
  switch (w.layout) {
    case Layout::kF32: return sweep_layout<Isa, Layout::kF32, T>(w, a, rows, units, tile_of, emit);
    case Layout::kBf16: return sweep_layout<Isa, Layout::kBf16, T>(w, a, rows, units, tile_of, emit);
    case Layout::kF16: return sweep_layout<Isa, Layout::kF16, T>(w, a, rows, units, tile_of, emit);
    case Layout::kQ8: return sweep_layout<Isa, Layout::kQ8, T>(w, a, rows, units, tile_of, emit);
    case Layout::kQ4: return sweep_layout<Isa, Layout::kQ4, T>(w, a, rows, units, tile_of, emit);
    case Layout::kQ4m: return sweep_layout<Isa, Layout::kQ4m, T>(w, a, rows, units, tile_of, emit);
    default: return;  // the VM admits matrices only
  }
}

// The same row by row: emit(unit, row, y), where y[t] holds the sixteen products.
template <class Isa, int T, class Units, class TileOf, class Emit>
void sweep(const Weight& w, const Activations& a, int32_t rows, Units units, TileOf tile_of, Emit emit) {
  sweep_blocks<Isa, T>(w, a, rows, units, tile_of,
                       [&](int64_t unit, int32_t row, int32_t count, const float* const(&sums)[T]) {
                         for (int32_t m = 0; m < count; ++m) {
                           typename Isa::F y[T];
                           for (int t = 0; t < T; ++t) y[t] = Isa::load(sums[t] + m * kLanes);
                           emit(unit, row + m, y);
                         }
                       });
}

}  // namespace headrace
