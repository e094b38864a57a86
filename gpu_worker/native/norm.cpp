// loadonce::rms_norm: x / √(mean(x²) + ε) * weight in bfloat16, float32 inside; rounds where the models round.
#include <ATen/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>

#include "crew.h"
#include "rows.h"

namespace loadonce {
namespace {

constexpr int64_t kPieceElements = 16 * 1024;  // worth the handing out
constexpr int64_t kMostPieces = 16;

enum class Scale : int64_t {
  kPlain,    // (normed * weight) rounded
  kRounded,  // (normed rounded) * weight
  kOffset,   // (normed * (1 + weight)) rounded
};

template <Scale SCALE>
void one(const bf16_bits* x, const bf16_bits* weight, bf16_bits* out, int64_t size, float epsilon) {
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t d = 0; d < size; ++d) sum += widen(x[d]) * widen(x[d]);
  const float share = 1.0f / std::sqrt(sum / static_cast<float>(size) + epsilon);
#pragma omp simd
  for (int64_t d = 0; d < size; ++d) {
    float normed = widen(x[d]) * share;
    if constexpr (SCALE == Scale::kRounded) normed = widen(narrow(normed));
    out[d] = narrow(normed * (SCALE == Scale::kOffset ? 1.0f + widen(weight[d]) : widen(weight[d])));
  }
}

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double epsilon, int64_t scale) {
  const int64_t size = weight.numel();
  TORCH_CHECK(x.scalar_type() == at::kBFloat16 && weight.scalar_type() == at::kBFloat16 && weight.is_contiguous() &&
                  x.size(-1) == size,
              "rms_norm: bfloat16, with as many weights as x has elements in a row; not ", x.sizes(), " and ",
              weight.sizes());
  using Row = void (*)(const bf16_bits*, const bf16_bits*, bf16_bits*, int64_t, float);
  static constexpr Row kRows[] = {one<Scale::kPlain>, one<Scale::kRounded>, one<Scale::kOffset>};
  TORCH_CHECK(scale >= 0 && scale < 3, "rms_norm: scale is 0, 1 or 2, not ", scale);
  const at::Tensor input = x.contiguous();
  at::Tensor out = at::empty(input.sizes(), input.options());
  const auto* from = static_cast<const bf16_bits*>(input.data_ptr());
  const auto* weights = static_cast<const bf16_bits*>(weight.data_ptr());
  auto* to = static_cast<bf16_bits*>(out.data_ptr());
  const int64_t rows = size ? input.numel() / size : 0;
  const int64_t pieces = std::clamp<int64_t>(input.numel() / kPieceElements, 1, std::min(kMostPieces, std::max<int64_t>(rows, 1)));
  share_out(pieces, [&](int64_t number) {
    for (int64_t row = rows * number / pieces; row < rows * (number + 1) / pieces; ++row)
      kRows[scale](from + row * size, weights, to + row * size, size, static_cast<float>(epsilon));
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(loadonce, library) {
  library.def("rms_norm(Tensor x, Tensor weight, float epsilon, int scale) -> Tensor");
}
TORCH_LIBRARY_IMPL(loadonce, CPU, library) { library.impl("rms_norm", &rms_norm); }

}  // namespace loadonce
