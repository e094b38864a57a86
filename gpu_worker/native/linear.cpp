// loadonce::linear: x · weightᵀ + bias in bfloat16, for the few rows of a decode step. The weight is read
// where it lies, so the model's own tensors serve and no packed copy is kept. More rows than pay go to torch.
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <torch/library.h>

#include <algorithm>

#include "crew.h"
#include "linear.h"

namespace loadonce {
namespace {

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
    const int64_t pieces = pieces_of(rows, columns, depth);
    const int64_t groups = (columns + kColumns - 1) / kColumns;
    share_out(pieces, [&](int64_t number) {
      job(groups * number / pieces * kColumns, std::min(columns, groups * (number + 1) / pieces * kColumns));
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
