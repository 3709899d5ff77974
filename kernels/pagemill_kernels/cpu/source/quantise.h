// Bringing float32 inputs to 8 bits, symmetrically: the largest element becomes 127.
#pragma once

#include <cmath>

#include "simd.h"

// The scale with which the largest element becomes 127. A row that is not finite gets a scale that is not: its outputs
// then are not finite either.
static inline float scale_of(const float* x, int64_t count) {
  vf most = {}, faults = {};
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) {
    const vf v = load(x + i);
    most = larger(larger(v, -v), most);
    faults += v * 0.0f;
  }
  float peak = largest(most), fault = sum(faults);
  for (; i < count; ++i) {
    peak = std::fmax(peak, std::fabs(x[i]));
    fault += x[i] * 0.0f;
  }
  return peak / 127.0f + fault;
}
INLINE float inverse_of(float scale) { return scale > 0 ? 1.0f / scale : 0.0f; }

// The nearest integers, ties to even; within -127 .. 127 whatever x is.
INLINE int32_t quantised(float x, float inverse) {
  const float v = x * inverse;
  return v >= 127.0f ? 127 : v > -127.0f ? (int32_t)std::nearbyint(v) : -127;
}
INLINE vi quantised(vf x, float inverse) {
  return (vi)(smaller(larger(x * inverse, splat(-127.0f)), splat(127.0f)) + 12582912.0f) - 0x4b400000;
}
