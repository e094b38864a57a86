// loadonce::linear: x · weightᵀ + bias in bfloat16, for the few rows of a decode step. The weight is read
// where it lies, so the model's own tensors serve and no packed copy is kept. More rows than pay go to torch.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <torch/library.h>

#include <algorithm>

#include "rows.h"

namespace loadonce {
namespace {

constexpr int64_t kMostOwnRows = 96;
constexpr int64_t kBlockBytes = 32 * 1024;  // of weight, so that it stays in the first-level cache

#ifdef LOADONCE_BF16_DOT

struct Linear {
  const bf16_bits* x;
  const bf16_bits* weight;
  const bf16_bits* bias;
  bf16_bits* out;
  int64_t rows, columns, depth;

  // Columns [begin, end) of all rows; `end - begin` may be any number.
  void operator()(int64_t begin, int64_t end) const {
    const int64_t block = std::max<int64_t>(kColumns, kBlockBytes / (2 * depth) / kColumns * kColumns);
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
      __m128bh narrowed = _mm_cvtneps_pbh(_mm_add_ps(sum, shift));
      _mm_mask_storeu_epi16(out + (first + r) * columns + column, kept, (__m128i)narrowed);
    });
  }
};

#endif

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  const int64_t depth = weight.size(1), columns = weight.size(0);
  const int64_t rows = x.numel() / depth;
#ifdef LOADONCE_BF16_DOT
  if (rows <= kMostOwnRows && x.scalar_type() == at::kBFloat16 && weight.is_contiguous()) {
    const at::Tensor input = x.contiguous();
    auto shape = x.sizes().vec();
    shape.back() = columns;
    at::Tensor out = at::empty(shape, x.options());
    Linear job{static_cast<const bf16_bits*>(input.data_ptr()),
               static_cast<const bf16_bits*>(weight.data_ptr()),
               bias ? static_cast<const bf16_bits*>(bias->data_ptr()) : nullptr,
               static_cast<bf16_bits*>(out.data_ptr()),
               rows, columns, depth};
    // Whole tiles to each thread; a grain of 64 KiB of weight pays for waking one.
    const int64_t groups = (columns + kColumns - 1) / kColumns;
    const int64_t grain = std::max<int64_t>(1, 64 * 1024 / (2 * depth * kColumns * std::max<int64_t>(1, rows / 8)));
    at::parallel_for(0, groups, grain, [&](int64_t begin, int64_t end) {
      job(begin * kColumns, std::min(columns, end * kColumns));
    });
    return out;
  }
#endif
  return at::linear(x, weight, bias);
}

bool has_bf16_dot() {
#ifdef LOADONCE_BF16_DOT
  return true;
#else
  return false;
#endif
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(loadonce, library) {
  library.def("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
  library.def("has_bf16_dot() -> bool", &has_bf16_dot);
}
TORCH_LIBRARY_IMPL(loadonce, CPU, library) { library.impl("linear", &linear); }

}  // namespace loadonce
