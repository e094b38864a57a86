// x · weightᵀ + bias in bfloat16 for some columns of a weight that lies row by row, as `linear_nf4` unpacks it.
#pragma once

#include <algorithm>

#include <ATen/core/Tensor.h>

#include "rows.h"

namespace loadonce {

constexpr int64_t kMostOwnRows = 96;
constexpr int64_t kPieceRows = 128;  // of long inputs, at least two pieces
constexpr int64_t kBlockBytes = 32 * 1024;  // of weight, so that it stays in the first-level cache

// For many rows.
at::Tensor long_linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias);

#ifdef LOADONCE_BF16_DOT

inline int64_t block_columns(int64_t depth) {
  return std::max<int64_t>(kColumns, kBlockBytes / (2 * depth) / kColumns * kColumns);
}

struct Linear {
  const bf16_bits* x;
  const bf16_bits* weight;
  const bf16_bits* bias;
  bf16_bits* out;
  int64_t rows, columns, depth;

  // Columns [begin, end) of all rows; `end - begin` may be any number.
  void operator()(int64_t begin, int64_t end) const {
    const int64_t block = block_columns(depth);
    const int64_t tiles = (rows + kMostRows - 1) / kMostRows;
    for (int64_t from = begin; from < end; from += block) {
      const int64_t to = std::min(end, from + block);
      for (int64_t t = 0; t < tiles; ++t) {
        const int64_t first = rows * t / tiles, last = rows * (t + 1) / tiles;
        // The weight comes from memory once: each tile fetches its share of the next block.
        Ahead ahead{static_cast<int>(kColumns * t / tiles), static_cast<int>(kColumns * (t + 1) / tiles),
                    to + block <= end ? block * depth : 0};
        if (!ahead.distance) ahead.last = ahead.first;
        for (int64_t column = from; column < to; column += kColumns)
          some(first, static_cast<int>(last - first), column, std::min<int64_t>(kColumns, to - column), ahead);
      }
    }
  }

  void some(int64_t first, int count, int64_t column, int64_t width, Ahead ahead) const {
    const bf16_bits* w[kColumns];
    for (int c = 0; c < kColumns; ++c) w[c] = weight + (column + std::min<int64_t>(c, width - 1)) * depth;
    float added[kColumns] = {0, 0, 0, 0};
    if (bias)
      for (int c = 0; c < width; ++c) added[c] = widen(bias[column + c]);
    const __m128 shift = _mm_loadu_ps(added);
    const __mmask8 kept = static_cast<__mmask8>((1u << width) - 1);
    tile(count, x + first * depth, depth, w, depth, ahead, [&](int r, __m128 sum) {
      const __m128 total = _mm_add_ps(sum, shift);
      const int64_t at = (first + r) * columns + column;
      _mm_mask_storeu_epi16(out + at, kept, (__m128i)_mm_cvtneps_pbh(total));
    });
  }
};

#endif  // LOADONCE_BF16_DOT

}  // namespace loadonce
