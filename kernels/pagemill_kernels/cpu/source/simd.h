// Vectors of the width that this object is built for, by the vector extension that GCC and Clang share, so that one
// source serves AVX-512, AVX2 and NEON. Half precision and dot products of bytes are all that need intrinsics.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif

#define INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(LANES * 4)));
typedef int32_t vi __attribute__((vector_size(LANES * 4)));
typedef uint32_t vu __attribute__((vector_size(LANES * 4)));
typedef uint16_t vh __attribute__((vector_size(LANES * 2)));
typedef float vf_loose __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint16_t vh_loose __attribute__((vector_size(LANES * 2), aligned(2), may_alias));

constexpr float kInfinity = __builtin_inff();

// Element types of tensors; the numbers are those of _DTYPES in kernels.py.
enum Dtype : int32_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2, kInt8 = 3, kFloat8 = 4 };
struct half_t { uint16_t bits; };
struct bf16_t { uint16_t bits; };
struct fp8_t { uint8_t bits; };  // e4m3: sign, 4 bits of exponent (bias 7), 3 of mantissa

INLINE vf splat(float x) { return x - (vf){}; }

// ---------------------------------------------------------------- scalars

INLINE float from_bits(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }
INLINE uint32_t to_bits(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }

INLINE float widen(float x) { return x; }
INLINE float widen(bf16_t x) { return from_bits((uint32_t)x.bits << 16); }
INLINE float widen(half_t x) {
#if defined(__F16C__)
  return _cvtsh_ss(x.bits);
#elif defined(__aarch64__)
  __fp16 h; memcpy(&h, &x.bits, 2); return (float)h;
#else
#error "no conversion from half precision for this target"
#endif
}

template <class T> T narrow(float x);
template <> inline float narrow<float>(float x) { return x; }
template <> inline bf16_t narrow<bf16_t>(float x) {  // to the nearest, ties to even; NaN stays NaN
  uint32_t bits = to_bits(x);
  if (x != x) return {(uint16_t)((bits >> 16) | 0x40)};
  return {(uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}
template <> inline half_t narrow<half_t>(float x) {
#if defined(__F16C__)
  return {(uint16_t)_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT)};
#elif defined(__aarch64__)
  __fp16 h = (__fp16)x; half_t r; memcpy(&r.bits, &h, 2); return r;
#endif
}

// ---------------------------------------------------------------- loads and stores

INLINE vf load(const float* p) { return *(const vf_loose*)p; }
INLINE vf load(const bf16_t* p) {
  vu wide = __builtin_convertvector(*(const vh_loose*)p, vu) << 16;
  return (vf)wide;
}
INLINE vf load(const half_t* p) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX2__)
  return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#elif defined(__aarch64__)
  return (vf)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t*)p)));
#endif
}

// 2^-8 times each element: moved to the places of half precision's exponent and mantissa, e4m3 is that (subnormal
// numbers, too), and `unit_of` makes up for it. e4m3's NaN becomes a number: caches have none, but scales.
INLINE vf load(const fp8_t* p) {
#if defined(__AVX512F__)
  const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p));
  const __m256i half = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16((short)0xbfff));
  return (vf)_mm512_cvtph_ps(half);
#elif defined(__AVX2__)
  const __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i*)p));
  return (vf)_mm256_cvtph_ps(_mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16((short)0xbfff)));
#elif defined(__aarch64__)
  uint16_t half[LANES];
  for (int i = 0; i < LANES; ++i) half[i] = (uint16_t)((p[i].bits & 0x80) << 8 | (p[i].bits & 0x7f) << 7);
  return (vf)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(half)));
#endif
}

INLINE vf load(const int8_t* p) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__)
  return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
  typedef int8_t vb __attribute__((vector_size(LANES)));
  typedef int8_t vb_loose __attribute__((vector_size(LANES), aligned(1), may_alias));
  vb bytes = *(const vb_loose*)p;
  return __builtin_convertvector(bytes, vf);
#endif
}

INLINE void store(float* p, vf x) { *(vf_loose*)p = x; }
INLINE void store(bf16_t* p, vf x) {
  vu bits = (vu)x;
  vu rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  vi nan = x != x;
  rounded = ((vu)nan & ((bits >> 16) | 0x40u)) | (~(vu)nan & rounded);
  *(vh_loose*)p = __builtin_convertvector(rounded, vh);
}
INLINE void store(half_t* p, vf x) {
#if defined(__AVX512F__)
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__AVX2__)
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__aarch64__)
  vst1_u16((uint16_t*)p, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)x)));
#endif
}

// What multiplies the elements of an entry of the cache: a float behind them, where they are 8 bits.
template <class C> inline float unit_of(const C* entry, int64_t count) { return 1.0f; }
template <> inline float unit_of<int8_t>(const int8_t* entry, int64_t count) {
  float unit;
  memcpy(&unit, entry + count, sizeof unit);
  return unit;
}
template <> inline float unit_of<fp8_t>(const fp8_t* entry, int64_t count) {
  float unit;
  memcpy(&unit, entry + count, sizeof unit);
  return unit * 256.0f;  // see load
}

// ---------------------------------------------------------------- arithmetic

INLINE vf larger(vf a, vf b) { return a > b ? a : b; }
INLINE vf smaller(vf a, vf b) { return a < b ? a : b; }

INLINE float sum(vf x) {
  float total = 0;
  for (int i = 0; i < LANES; ++i) total += x[i];
  return total;
}
INLINE float largest(vf x) {
  float most = x[0];
  for (int i = 1; i < LANES; ++i) most = x[i] > most ? x[i] : most;
  return most;
}

// e^x to about 2 units in the last place; exactly 0 below -87 (minus infinity too), NaN for NaN.
INLINE vf exponential(vf x) {
  vf bounded = smaller(x, splat(88.0f));
  vf shifted = bounded * 1.44269504088896341f + 12582912.0f;  // the nearest integer, in the low bits
  vf n = shifted - 12582912.0f;
  vf r = bounded - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  vf p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  vi exponent = ((vi)shifted - 0x4b400000 + 127) << 23;
  vf result = p * (vf)exponent;
  return x < -87.0f ? splat(0.0f) : (x != x ? x : result);
}

INLINE vf tangent(vf x) {  // hyperbolic
  return 1.0f - 2.0f / (exponential(2.0f * smaller(larger(x, splat(-20.0f)), splat(20.0f))) + 1.0f);
}

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (vi){__VA_ARGS__})
#endif
#if LANES == 16
#define EACH(f, h) f(0, h), f(1, h), f(2, h), f(3, h), f(4, h), f(5, h), f(6, h), f(7, h), f(8, h), f(9, h), \
    f(10, h), f(11, h), f(12, h), f(13, h), f(14, h), f(15, h)
#elif LANES == 8
#define EACH(f, h) f(0, h), f(1, h), f(2, h), f(3, h), f(4, h), f(5, h), f(6, h), f(7, h)
#else
#define EACH(f, h) f(0, h), f(1, h), f(2, h), f(3, h)
#endif
#define OWN(i, h) (((i) & (h)) ? LANES + (i) : (i))
#define OTHER(i, h) (((i) & (h)) ? LANES + ((i) ^ (h)) : ((i) ^ (h)))

// Lanes i without bit H hold a[i] + a[i ^ H], the others b[i] + b[i ^ H].
template <int H> INLINE vf fold(vf a, vf b) {
  return SHUFFLE(a, b, EACH(OWN, H)) + SHUFFLE(a, b, EACH(OTHER, H));
}
template <int H> INLINE void fold_rows(vf* rows) {
  for (int i = 0; i < H; ++i) rows[i] = fold<H>(rows[i], rows[i + H]);
}
// Lane j of the result is the sum over row j. Spoils the rows.
INLINE vf sum_rows(vf* rows) {
#if LANES >= 16
  fold_rows<8>(rows);
#endif
#if LANES >= 8
  fold_rows<4>(rows);
#endif
  fold_rows<2>(rows);
  fold_rows<1>(rows);
  return rows[0];
}
