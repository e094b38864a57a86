// eˣ and what is made of it, to the last bits of float32; one number at a time, and sixteen.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace loadonce {

// eˣ for x ≤ 0; written so that the compiler makes vectors of it.
inline float exponential(float x) {
  x = std::max(x, -87.0f);
  const float whole = std::nearbyint(x * 1.44269504f);
  const float rest = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
  float sum = 1.0f / 5040;
  sum = sum * rest + 1.0f / 720;
  sum = sum * rest + 1.0f / 120;
  sum = sum * rest + 1.0f / 24;
  sum = sum * rest + 1.0f / 6;
  sum = sum * rest + 0.5f;
  sum = sum * rest + 1.0f;
  sum = sum * rest + 1.0f;
  return sum * std::bit_cast<float>((static_cast<int32_t>(whole) + 127) << 23);
}

#if defined(__AVX512F__)

// The same for sixteen, and without its lower bound; NaN stays NaN.
inline __m512 exponential(__m512 x) {
  const auto all = [](float value) { return _mm512_set1_ps(value); };
  x = _mm512_max_ps(all(-200.0f), x);
  const __m512 whole = _mm512_roundscale_ps(_mm512_mul_ps(x, all(1.44269504f)), _MM_FROUND_TO_NEAREST_INT);
  const __m512 rest =
      _mm512_fmadd_ps(whole, all(2.12194440e-4f), _mm512_fnmadd_ps(whole, all(0.693359375f), x));
  __m512 sum = all(1.0f / 5040);
  for (const float next : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
    sum = _mm512_fmadd_ps(sum, rest, all(next));
  return _mm512_scalef_ps(sum, whole);
}

// x / (1 + e⁻ᵗ)
inline __m512 times_sigmoid(__m512 x, __m512 t) {
  const __m512 one = _mm512_set1_ps(1.0f);
  const __m512 small = exponential(_mm512_sub_ps(_mm512_setzero_ps(), _mm512_abs_ps(t)));  // never more than 1
  const __mmask16 below = _mm512_cmp_ps_mask(t, _mm512_setzero_ps(), _CMP_LT_OQ);
  const __m512 share = _mm512_mask_blend_ps(below, one, small);
  return _mm512_div_ps(_mm512_mul_ps(x, share), _mm512_add_ps(one, small));
}

inline __m512 silu(__m512 x) { return times_sigmoid(x, x); }

inline __m512 gelu_tanh(__m512 x) {
  const __m512 cubic = _mm512_mul_ps(_mm512_mul_ps(x, x), _mm512_mul_ps(x, _mm512_set1_ps(0.044715f)));
  return times_sigmoid(x, _mm512_mul_ps(_mm512_set1_ps(1.5957691216f), _mm512_add_ps(x, cubic)));
}

#endif

}  // namespace loadonce
