// eˣ and what is made of it, to the last bits of float32; written so that the compiler makes vectors of it.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

namespace loadonce {

// eˣ for x ≤ 0.
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

// x / (1 + e⁻ᵗ)
inline float times_sigmoid(float x, float t) {
  const float small = exponential(-std::abs(t));  // never more than 1
  return x * ((t < 0 ? small : 1.0f) / (1.0f + small));
}

inline float silu(float x) { return times_sigmoid(x, x); }

inline float gelu_tanh(float x) { return times_sigmoid(x, 1.5957691216f * (x + 0.044715f * x * x * x)); }

}  // namespace loadonce
