// loadonce::linear_nf4: a linear layer whose weight stays in bitsandbytes' 4-bit blocks. Each block of rows
// is unpacked into the first-level cache, where it is used for all tokens of the step.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <vector>

#include "crew.h"
#include "linear.h"

namespace loadonce {
namespace {

// Two weights to a byte, the first in the high half: indices into `code`, times the scale of their block.
// Scales are quantised as well where code2 is there: scale = code2[absmax] * absmax2[its block] + offset.
struct Packed {
  const uint8_t* weight;
  const float* code;  // 16
  int64_t block;      // weights to a scale, a multiple of 32
  const float* absmax;
  const uint8_t* absmax_index;
  const float *code2, *absmax2;
  float offset;
  int64_t block2;

  float scale(int64_t number) const {
    return absmax ? absmax[number] : code2[absmax_index[number]] * absmax2[number / block2] + offset;
  }

#ifdef LOADONCE_BF16_DOT
  // Weights [first, first + count) as bfloat16; both are multiples of `block`.
  void unpack(int64_t first, int64_t count, bf16_bits* to) const {
    const __m512 table = _mm512_loadu_ps(code);
    for (int64_t at = first; at < first + count; at += block) {
      const __m512 factor = _mm512_set1_ps(scale(at / block));
      for (int64_t i = at; i < at + block; i += 32, to += 32) {
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(weight + i / 2));
        const __m256i words = _mm256_cvtepu8_epi16(bytes);
        const __m256i halves = _mm256_or_si256(_mm256_srli_epi16(words, 4),
                                               _mm256_slli_epi16(_mm256_and_si256(words, _mm256_set1_epi16(15)), 8));
        const __m512i low = _mm512_cvtepu8_epi32(_mm256_castsi256_si128(halves));
        const __m512i high = _mm512_cvtepu8_epi32(_mm256_extracti128_si256(halves, 1));
        _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(
                                    _mm512_mul_ps(_mm512_permutexvar_ps(high, table), factor),
                                    _mm512_mul_ps(_mm512_permutexvar_ps(low, table), factor)));
      }
    }
  }
#endif
};

at::Tensor linear_nf4(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& absmax,
                      const at::Tensor& code, const std::optional<at::Tensor>& absmax2,
                      const std::optional<at::Tensor>& code2, const std::optional<at::Tensor>& offset,
                      const std::optional<at::Tensor>& bias, int64_t columns, int64_t block, int64_t block2) {
#ifdef LOADONCE_BF16_DOT
  const int64_t depth = x.size(-1), rows = x.numel() / depth;
  TORCH_CHECK(x.scalar_type() == at::kBFloat16 && block % 32 == 0 && depth % block == 0,
              "linear_nf4: bfloat16, and whole blocks of a multiple of 32 in each row");
  Packed packed{weight.data_ptr<uint8_t>(), code.data_ptr<float>(), block, nullptr, nullptr, nullptr, nullptr, 0.0f,
                block2};
  if (code2) {
    packed.absmax_index = absmax.data_ptr<uint8_t>();
    packed.code2 = code2->data_ptr<float>();
    packed.absmax2 = absmax2->data_ptr<float>();
    packed.offset = *offset->data_ptr<float>();
  } else {
    packed.absmax = absmax.data_ptr<float>();
  }
  const int64_t group = block_columns(depth), groups = (columns + group - 1) / group;
  if (rows > kMostOwnRows) {
    at::Tensor wide = at::empty({columns, depth}, x.options());
    auto* to = static_cast<bf16_bits*>(wide.data_ptr());
    share_out(groups, [&](int64_t number) {
      const int64_t from = number * group, here = std::min(group, columns - from);
      packed.unpack(from * depth, here * depth, to + from * depth);
    });
    return long_linear(x, wide, bias);
  }
  const at::Tensor input = x.contiguous();
  auto shape = x.sizes().vec();
  shape.back() = columns;
  at::Tensor out = at::empty(shape, x.options());
  const auto* in = static_cast<const bf16_bits*>(input.data_ptr());
  const auto* shift = bias ? static_cast<const bf16_bits*>(bias->data_ptr()) : nullptr;
  auto* to = static_cast<bf16_bits*>(out.data_ptr());
  const int64_t pieces = std::min<int64_t>(groups, 32);
  share_out(pieces, [&](int64_t number) {
    thread_local std::vector<bf16_bits> wide;
    wide.resize(group * depth);
    const int64_t end = std::min(columns, groups * (number + 1) / pieces * group);
    for (int64_t from = groups * number / pieces * group; from < end; from += group) {
      const int64_t here = std::min(group, columns - from);
      packed.unpack(from * depth, here * depth, wide.data());
      Linear{in, wide.data(), shift ? shift + from : nullptr, to + from, rows, columns, depth}(0, here);
    }
  });
  return out;
#else
  TORCH_CHECK(false, "linear_nf4: this processor has no bfloat16 dot product");
#endif
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(loadonce, library) {
  library.def(
      "linear_nf4(Tensor x, Tensor weight, Tensor absmax, Tensor code, Tensor? absmax2, Tensor? code2, "
      "Tensor? offset, Tensor? bias, int columns, int block, int block2) -> Tensor");
}
TORCH_LIBRARY_IMPL(loadonce, CPU, library) { library.impl("linear_nf4", &linear_nf4); }

}  // namespace loadonce
