// loadonce::packed_linear: x · weightᵀ + bias in bfloat16 over a weight packed once, when the model is loaded.
// loadonce::packed_gated: act(x · gateᵀ) * (x · upᵀ), the first half of most models' feed-forward layers, over both
// weights in one: a panel holds sixteen columns of each, so that a tile has what belongs together in its registers.
//
// A panel holds 32 columns of the layer, pair by pair along the depth: [panels, depth / 2, 32, 2]. So the weight
// is read in one stream, an accumulator holds 16 columns, and no sum runs across a register. Each element of the
// result is summed in the order of the depth whatever else is in the step: a row's answer doesn't depend on how
// many rows there are, and a prompt computed in pieces equals the prompt computed whole.
#include <ATen/Parallel.h>
#include <ATen/Tensor.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <utility>

#include "crew.h"
#include "exponential.h"
#include "rows.h"

namespace loadonce {
namespace {

constexpr int64_t kPanel = 32;  // columns

#ifdef LOADONCE_BF16_DOT

constexpr int kTileRows = 14;  // 14 × 2 accumulators + 2 of the panel + 1 of the row fill the 32 registers
constexpr int64_t kPieceBytes = 64 * 1024;  // of weight read for a few rows: worth the handing out
constexpr int64_t kMostPieces = 64;
constexpr int64_t kLine = 64;  // bytes of a cache line; a pair of the depth has two of a panel

enum class Gate : int64_t { kNone, kSilu, kGeluTanh };

struct PackedLinear {
  const bf16_bits* x;
  const bf16_bits* packed;
  const bf16_bits* bias;
  bf16_bits* out;
  float* wide;  // where results go unrounded, instead of to `out`
  int64_t rows, columns, depth;  // columns of the result
  Gate gate;

  int64_t panel_columns() const { return gate == Gate::kNone ? kPanel : kPanel / 2; }
  int64_t panels() const { return (columns + panel_columns() - 1) / panel_columns(); }
  int64_t panel_bytes() const { return 2 * kPanel * depth; }

  int64_t pieces() const {
    const int64_t work = panels() * panel_bytes() * (1 + rows / 8);
    return std::clamp<int64_t>(work / kPieceBytes, 1, std::min(kMostPieces, panels()));
  }

  // Panels [begin, end) of all rows; `after` is the one that this thread is likely to need then.
  void operator()(int64_t begin, int64_t end, int64_t after) const {
    const int64_t tiles = (rows + kTileRows - 1) / kTileRows;
    for (int64_t panel = begin; panel < end; ++panel) {
      // The weight comes from memory once: each tile fetches its share of the next panel.
      const char* next = reinterpret_cast<const char*>(at(panel + 1 < end ? panel + 1 : after));
      for (int64_t t = 0; t < tiles; ++t) {
        const int64_t first = rows * t / tiles;
        some(static_cast<int>(rows * (t + 1) / tiles - first), first, panel,
             {next + panel_bytes() * t / tiles, 2 * kLine / tiles});
      }
    }
  }

  const bf16_bits* at(int64_t panel) const { return packed + panel * kPanel * depth; }

  // What a tile fetches into the cache meanwhile: `step` bytes for each pair of the depth.
  struct Fetch {
    const char* from;
    int64_t step;
  };

  template <size_t... COUNTS>
  void choose(int count, int64_t first, int64_t panel, Fetch fetch, std::index_sequence<COUNTS...>) const {
    using Tile = void (PackedLinear::*)(int64_t, int64_t, Fetch) const;
    static constexpr Tile kTiles[] = {&PackedLinear::tile<COUNTS + 1>...};
    (this->*kTiles[count - 1])(first, panel, fetch);
  }

  void some(int count, int64_t first, int64_t panel, Fetch fetch) const {
    choose(count, first, panel, fetch, std::make_index_sequence<kTileRows>{});
  }

  // Rows [first, first + ROWS) of one panel.
  template <size_t ROWS>
  void tile(int64_t first, int64_t panel, Fetch fetch) const {
    __m512 sum[ROWS][2];
    for (size_t r = 0; r < ROWS; ++r) sum[r][0] = sum[r][1] = _mm512_setzero_ps();
    const bf16_bits* from = x + first * depth;
    const bf16_bits* weight = at(panel);
    for (int64_t k = 0; k < depth; k += 2, weight += 2 * kPanel, fetch.from += fetch.step) {
      const __m512bh low = load_bf16(weight), high = load_bf16(weight + kPanel);
      _mm_prefetch(fetch.from, _MM_HINT_T0);
      _mm_prefetch(fetch.from + fetch.step / 2, _MM_HINT_T0);
      for (size_t r = 0; r < ROWS; ++r) {
        int32_t pair;
        __builtin_memcpy(&pair, from + r * depth + k, sizeof pair);
        const __m512bh row = (__m512bh)_mm512_set1_epi32(pair);
        sum[r][0] = _mm512_dpbf16_ps(sum[r][0], row, low);
        sum[r][1] = _mm512_dpbf16_ps(sum[r][1], row, high);
      }
    }
    if (gate == Gate::kNone)
      store<ROWS>(sum, first, panel);
    else if (gate == Gate::kSilu)
      store_gated<ROWS>(sum, first, panel, [](__m512 x) { return silu(x); });
    else
      store_gated<ROWS>(sum, first, panel, [](__m512 x) { return gelu_tanh(x); });
  }

  static __mmask16 mask(int64_t left) {
    return left < kPanel / 2 ? static_cast<__mmask16>((1u << left) - 1) : 0xFFFF;
  }

  template <size_t ROWS>
  void store(const __m512 (&sum)[ROWS][2], int64_t first, int64_t panel) const {
    for (int half = 0; half < 2; ++half) {
      const int64_t column = panel * kPanel + half * kPanel / 2, left = columns - column;
      if (left <= 0) break;
      const __mmask16 kept = mask(left);
      __m512 shift = _mm512_setzero_ps();
      if (bias)
        shift = wider(_mm256_maskz_loadu_epi16(kept, bias + column));
      for (size_t r = 0; r < ROWS; ++r) {
        const __m512 total = _mm512_add_ps(sum[r][half], shift);
        const int64_t at = (first + static_cast<int64_t>(r)) * columns + column;
        if (wide)
          _mm512_mask_storeu_ps(wide + at, kept, total);
        else
          _mm256_mask_storeu_epi16(out + at, kept, (__m256i)_mm512_cvtneps_pbh(total));
      }
    }
  }

  // Rounds where the separate operations would: gate, up, the activation, the product.
  template <size_t ROWS, typename Activation>
  void store_gated(const __m512 (&sum)[ROWS][2], int64_t first, int64_t panel, Activation activation) const {
    constexpr int kLanes = kPanel / 2;
    const int64_t column = panel * kLanes;
    const __mmask16 kept = mask(columns - column);
    for (size_t r = 0; r < ROWS; ++r) {
      const __m512 gates = rounded(activation(rounded(sum[r][0]))), ups = rounded(sum[r][1]);
      const __m256i results = (__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(gates, ups));
      _mm256_mask_storeu_epi16(out + (first + static_cast<int64_t>(r)) * columns + column, kept, results);
    }
  }
};

#endif  // LOADONCE_BF16_DOT

at::Tensor compute(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias,
                   int64_t columns, bool wide, int64_t gate) {
#ifdef LOADONCE_BF16_DOT
  const int64_t depth = 2 * packed.size(1), rows = x.size(-1) ? x.numel() / x.size(-1) : 0;
  TORCH_CHECK(x.scalar_type() == at::kBFloat16 && packed.scalar_type() == at::kBFloat16 && packed.is_contiguous() &&
                  packed.dim() == 4 && packed.size(2) == kPanel && packed.size(3) == 2,
              "packed layers: bfloat16, and a weight [panels, depth / 2, 32, 2]");
  const at::Tensor input = x.size(-1) % 2 ? at::constant_pad_nd(x, {0, 1}).contiguous() : x.contiguous();
  auto shape = x.sizes().vec();
  shape.back() = columns;
  at::Tensor out = at::empty(shape, wide ? x.options().dtype(at::kFloat) : x.options());
  const PackedLinear job{static_cast<const bf16_bits*>(input.data_ptr()),
                         static_cast<const bf16_bits*>(packed.data_ptr()),
                         bias ? static_cast<const bf16_bits*>(bias->data_ptr()) : nullptr,
                         wide ? nullptr : static_cast<bf16_bits*>(out.data_ptr()),
                         wide ? static_cast<float*>(out.data_ptr()) : nullptr,
                         rows,
                         columns,
                         depth,
                         static_cast<Gate>(gate)};
  TORCH_CHECK((x.size(-1) + 1) / 2 * 2 == depth && packed.size(0) == job.panels(), "packed layers: x is ", x.sizes(),
              ", the weight ", packed.sizes(), " for ", columns, " columns");
  const int64_t panels = job.panels(), pieces = job.pieces(), threads = at::get_num_threads();
  share_out(pieces, [&](int64_t number) {
    const int64_t begin = panels * number / pieces, end = panels * (number + 1) / pieces;
    // The last pieces are given out first, in turns as a rule.
    job(begin, end, number < threads ? end - 1 : panels * (number - threads) / pieces);
  });
  return out;
#else
  TORCH_CHECK(false, "packed layers: this processor has no bfloat16 dot product");
#endif
}

// `wide`: results in float32. For the output head: two tokens that are nearly equally likely have the same logit
// once it is rounded to bfloat16, and then the order of the vocabulary would choose between them.
at::Tensor packed_linear(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias,
                         int64_t columns, bool wide) {
  return compute(x, packed, bias, columns, wide, 0);
}

// `gate`: 1 for silu, 2 for gelu by tanh.
at::Tensor packed_gated(const at::Tensor& x, const at::Tensor& packed, int64_t columns, int64_t gate) {
  TORCH_CHECK(gate == 1 || gate == 2, "packed_gated: gate is 1 or 2, not ", gate);
  return compute(x, packed, std::nullopt, columns, false, gate);
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
  library.def("packed_linear(Tensor x, Tensor packed, Tensor? bias, int columns, bool wide) -> Tensor");
  library.def("packed_gated(Tensor x, Tensor packed, int columns, int gate) -> Tensor");
  library.def("has_bf16_dot() -> bool", &has_bf16_dot);
}
TORCH_LIBRARY_IMPL(loadonce, CPU, library) {
  library.impl("packed_linear", &packed_linear);
  library.impl("packed_gated", &packed_gated);
}

}  // namespace loadonce
