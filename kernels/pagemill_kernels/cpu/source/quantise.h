// Bringing float32 inputs to 8 bits, symmetrically: the largest element becomes the format's largest number.
#pragma once

#include <cmath>

#include "simd.h"

// The scale with which the largest element becomes `number`. A row that is not finite gets a scale that is not: its outputs
// then are not finite either.
static inline float scale_of(const float* x, int64_t count, float number = 127.0f) {
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
  return peak / number + fault;
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

// The nearest e4m3, ties to even; within -448 .. 448 whatever x is. Both ways to round: at 2^-6 and above three bits of
// mantissa stay, below are multiples of 2^-9.
template <class U> INLINE U float8_bits(U bits, U least) {
  const U sign = bits & 0x80000000u, magnitude = bits ^ sign;
  const U normal = ((magnitude + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20) - (120u << 3);
  return (sign >> 24) | (magnitude < 0x3c800000u ? least & 0xfu : normal);
}
INLINE uint8_t float8(float x, float inverse) {
  const float product = x * inverse, v = product >= 448.0f ? 448.0f : product > -448.0f ? product : -448.0f;
  return (uint8_t)float8_bits<uint32_t>(to_bits(v), to_bits(std::fabs(v) * 512.0f + 8388608.0f));
}
INLINE vu float8(vf x, float inverse) {
  const vf v = smaller(larger(x * inverse, splat(-448.0f)), splat(448.0f));
  return float8_bits<vu>((vu)v, (vu)(larger(v, -v) * 512.0f + 8388608.0f));
}
