// Products of rows with rows: the shape of a linear layer (x · weightᵀ) and of attention scores (q · keyᵀ).
// Both operands lie row by row as torch stores them, so nothing is packed and nothing kept twice.
#pragma once

#include <bit>
#include <cstdint>
#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include <immintrin.h>
#define LOADONCE_BF16_DOT 1
#endif

namespace loadonce {

using bf16_bits = uint16_t;

inline float widen(bf16_bits value) {
  return std::bit_cast<float>(static_cast<uint32_t>(value) << 16);
}

inline bf16_bits narrow(float value) {  // round to nearest even; NaN stays NaN
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  return value != value ? 0x7FC0 : static_cast<bf16_bits>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

#ifdef LOADONCE_BF16_DOT

constexpr int kMostRows = 6;  // 6 × 4 accumulators + 4 columns + 1 row fill the 32 registers
constexpr int kColumns = 4;

inline __m512bh load_bf16(const bf16_bits* at) { return (__m512bh)_mm512_loadu_si512(at); }

inline __m512bh load_bf16(const bf16_bits* at, __mmask32 some) {
  return (__m512bh)_mm512_maskz_loadu_epi16(some, at);
}

inline __m512 wider(__m256i values) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(values), 16));
}

inline __m512 rounded(__m512 values) { return wider((__m256i)_mm512_cvtneps_pbh(values)); }

// The sums of four registers, in the order of the arguments.
inline __m128 sums(__m512 a, __m512 b, __m512 c, __m512 d) {
  __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
  __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
  __m512 abcd = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
  __m256 half = _mm256_add_ps(_mm512_castps512_ps256(abcd), _mm512_extractf32x8_ps(abcd, 1));
  return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

// Which of the four columns' successors, `distance` elements on, a tile fetches into the cache meanwhile.
struct Ahead {
  int first = 0, last = 0;
  int64_t distance = 0;
};

// ROWS rows of `x` times four rows of `w`, `depth` deep: store(row, four sums) for each row.
template <int ROWS, typename Store>
inline void tile(const bf16_bits* x, int64_t x_stride, const bf16_bits* const w[kColumns], int64_t depth,
                 Ahead ahead, Store&& store) {
  __m512 sum[ROWS][kColumns];
  for (int r = 0; r < ROWS; ++r)
    for (int c = 0; c < kColumns; ++c) sum[r][c] = _mm512_setzero_ps();
  int64_t k = 0;
  for (; k + 32 <= depth; k += 32) {
    __m512bh column[kColumns];
    for (int c = 0; c < kColumns; ++c) column[c] = load_bf16(w[c] + k);
    for (int c = ahead.first; c < ahead.last; ++c) _mm_prefetch(w[c] + k + ahead.distance, _MM_HINT_T1);
    for (int r = 0; r < ROWS; ++r) {
      __m512bh row = load_bf16(x + r * x_stride + k);
      for (int c = 0; c < kColumns; ++c) sum[r][c] = _mm512_dpbf16_ps(sum[r][c], row, column[c]);
    }
  }
  if (k < depth) {
    __mmask32 rest = (1u << (depth - k)) - 1;
    __m512bh column[kColumns];
    for (int c = 0; c < kColumns; ++c) column[c] = load_bf16(w[c] + k, rest);
    for (int r = 0; r < ROWS; ++r) {
      __m512bh row = load_bf16(x + r * x_stride + k, rest);
      for (int c = 0; c < kColumns; ++c) sum[r][c] = _mm512_dpbf16_ps(sum[r][c], row, column[c]);
    }
  }
  for (int r = 0; r < ROWS; ++r) store(r, sums(sum[r][0], sum[r][1], sum[r][2], sum[r][3]));
}

template <typename Store>
inline void tile(int rows, const bf16_bits* x, int64_t x_stride, const bf16_bits* const w[kColumns],
                 int64_t depth, Ahead ahead, Store&& store) {
  switch (rows) {
    case 1: return tile<1>(x, x_stride, w, depth, ahead, store);
    case 2: return tile<2>(x, x_stride, w, depth, ahead, store);
    case 3: return tile<3>(x, x_stride, w, depth, ahead, store);
    case 4: return tile<4>(x, x_stride, w, depth, ahead, store);
    case 5: return tile<5>(x, x_stride, w, depth, ahead, store);
    default: return tile<6>(x, x_stride, w, depth, ahead, store);
  }
}

#endif  // LOADONCE_BF16_DOT

}  // namespace loadonce
