// loadonce::linear: x · weightᵀ + bias in bfloat16, for the few rows of a decode step. The weight is read
// where it lies, so the model's own tensors serve and no packed copy is kept. Where rows are many, pieces of
// them go through torch's own product, shared out in our way.
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <c10/core/InferenceMode.h>
#include <omp.h>
#include <ATen/Tensor.h>
#include <torch/library.h>

#include <algorithm>

#include "crew.h"
#include "linear.h"

namespace loadonce {
namespace {

// torch's own product on one thread of it, for as long as this lives; the number is each thread's own.
struct OneThread {
  int before = omp_get_max_threads();
  OneThread() { omp_set_num_threads(1); }
  ~OneThread() { omp_set_num_threads(before); }
};

}  // namespace

at::Tensor long_linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  const int64_t depth = weight.size(1), columns = weight.size(0), rows = x.numel() / depth;
  auto shape = x.sizes().vec();
  shape.back() = columns;
  const at::Tensor in = x.reshape({rows, depth}), across = weight.t();
  at::Tensor out = at::empty({rows, columns}, x.options());
  const int64_t pieces = std::max<int64_t>(2, (rows + kPieceRows - 1) / kPieceRows);
  share_out(pieces, [&](int64_t number) {
    c10::InferenceMode quiet;
    OneThread here;
    const int64_t from = rows * number / pieces, count = rows * (number + 1) / pieces - from;
    at::Tensor to = out.narrow(0, from, count);
    if (bias) {
      at::addmm_out(to, *bias, in.narrow(0, from, count), across);
    } else {
      at::mm_out(to, in.narrow(0, from, count), across);
    }
  });
  return out.view(shape);
}

namespace {

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  const int64_t depth = weight.size(1), columns = weight.size(0);
  const int64_t rows = x.numel() / depth;
#ifdef LOADONCE_BF16_DOT
  if (rows > kMostOwnRows && x.scalar_type() == at::kBFloat16) return long_linear(x, weight, bias);
  if (x.scalar_type() == at::kBFloat16 && weight.is_contiguous()) {
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

// The same with results in float32. For the output head: two tokens that are nearly equally likely have the
// same logit once it is rounded to bfloat16, and then the order of the vocabulary would choose between them.
at::Tensor linear_float(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
#ifdef LOADONCE_BF16_DOT
  if (x.scalar_type() == at::kBFloat16 && weight.is_contiguous()) {
    const int64_t depth = weight.size(1), columns = weight.size(0);
    const at::Tensor input = x.contiguous();
    auto shape = x.sizes().vec();
    shape.back() = columns;
    at::Tensor out = at::empty(shape, x.options().dtype(at::kFloat));
    const int64_t all = x.numel() / depth;
    const int64_t groups = (columns + kColumns - 1) / kColumns;
    for (int64_t first = 0; first < all; first += kMostOwnRows) {
      const int64_t rows = std::min(kMostOwnRows, all - first);
      Linear job{static_cast<const bf16_bits*>(input.data_ptr()) + first * depth,
                 static_cast<const bf16_bits*>(weight.data_ptr()),
                 bias ? static_cast<const bf16_bits*>(bias->data_ptr()) : nullptr,
                 nullptr, rows, columns, depth, static_cast<float*>(out.data_ptr()) + first * columns};
      const int64_t pieces = pieces_of(rows, columns, depth);
      share_out(pieces, [&](int64_t number) {
        job(groups * number / pieces * kColumns, std::min(columns, groups * (number + 1) / pieces * kColumns));
      });
    }
    return out;
  }
#endif
  return at::linear(x, weight, bias).to(at::kFloat);
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
  library.def("linear_float(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
  library.def("has_bf16_dot() -> bool", &has_bf16_dot);
}
TORCH_LIBRARY_IMPL(loadonce, CPU, library) {
  library.impl("linear", &linear);
  library.impl("linear_float", &linear_float);
}

}  // namespace loadonce
