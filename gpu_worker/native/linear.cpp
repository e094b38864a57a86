// Long inputs of a linear layer whose weight lies row by row: pieces of them go through torch's own product,
// shared out in our way.
#include "linear.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <c10/core/InferenceMode.h>
#include <omp.h>

#include <algorithm>

#include "crew.h"

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

}  // namespace loadonce
