// Matrix products of 8-bit weights, one scale per output, with inputs that are brought to 8 bits as they come, one scale
// per row. Sums are exact integers, so a row neither sees its batch mates nor depends on the instruction set.
//
// Inputs are taken in groups, as many as an instruction multiplies and adds up per lane: four where the CPU has dot
// products of bytes, else two, which are widened to 16 bits (products of bytes that saturate would not be exact).
#include "panels.h"
#include "quantise.h"

namespace {

#if defined(__AVX512VNNI__)
// Unsigned times signed: inputs are shifted up by 128, and 128 times the weights' sum is taken off at the end.
constexpr int kGroup = 4, kShift = 128;
typedef uint8_t input_t;
INLINE __m512i weights(const int8_t* p) { return _mm512_loadu_si512(p); }
INLINE vi dot(vi sums, __m512i w, int32_t x) { return (vi)_mm512_dpbusd_epi32((__m512i)sums, _mm512_set1_epi32(x), w); }
typedef int32_t group_t;
#elif defined(__AVX512F__)
constexpr int kGroup = 2, kShift = 0;
typedef int16_t input_t;
typedef int32_t group_t;
INLINE __m512i weights(const int8_t* p) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p)); }
INLINE vi dot(vi sums, __m512i w, int32_t x) { return sums + (vi)_mm512_madd_epi16(w, _mm512_set1_epi32(x)); }
#elif defined(__AVX2__)
constexpr int kGroup = 2, kShift = 0;
typedef int16_t input_t;
typedef int32_t group_t;
INLINE __m256i weights(const int8_t* p) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)); }
INLINE vi dot(vi sums, __m256i w, int32_t x) { return sums + (vi)_mm256_madd_epi16(w, _mm256_set1_epi32(x)); }
#elif defined(__ARM_FEATURE_DOTPROD)
constexpr int kGroup = 4, kShift = 0;
typedef int8_t input_t;
typedef int32_t group_t;
INLINE int8x16_t weights(const int8_t* p) { return vld1q_s8(p); }
INLINE vi dot(vi sums, int8x16_t w, int32_t x) {
  return (vi)vdotq_s32((int32x4_t)sums, w, vreinterpretq_s8_s32(vdupq_n_s32(x)));
}
#else
constexpr int kGroup = 2, kShift = 0;
typedef int8_t input_t;
typedef int16_t group_t;
INLINE int8x8_t weights(const int8_t* p) { return vld1_s8(p); }
INLINE vi dot(vi sums, int8x8_t w, int16_t x) {
  return (vi)vpadalq_s16((int32x4_t)sums, vmull_s8(w, vreinterpret_s8_s16(vdup_n_s16(x))));
}
#endif

constexpr int64_t kAhead = 2048;         // bytes that are fetched ahead
constexpr int64_t kQuantised = 1 << 15;  // inputs of which fewer are brought to 8 bits sooner than another thread helps

INLINE int64_t groups_of(int64_t inputs) { return (inputs + kGroup - 1) / kGroup; }

struct Product {
  const input_t* x;
  const float* x_scales;
  int64_t outputs, groups;
  const int8_t* packed;
  const float *scales, *bias, *added;
  const int32_t* shifts;  // per output, kShift times the sum of its weights
  float* out;
};

template <int M> void tile(const Product& p, int64_t index, int64_t row, Ahead ahead) {
  const int64_t column = index * kColumns, stride = p.groups * kGroup;
  const input_t* x = p.x + row * stride;
  const int8_t* panel = p.packed + index * p.groups * kColumns * kGroup;
  vi sums[M][kVectors];
  for (int n = 0; n < kVectors; ++n)
    for (int m = 0; m < M; ++m) sums[m][n] = -*(const vi*)(p.shifts + column + n * LANES);
  for (int64_t k = 0; k < p.groups; ++k, panel += kColumns * kGroup) {
    decltype(weights(panel)) w[kVectors];
#pragma GCC unroll 4
    for (int n = 0; n < kVectors; ++n) w[n] = weights(panel + n * LANES * kGroup);
    for (int64_t i = 0; i < kColumns * kGroup; i += 64) __builtin_prefetch(panel + kAhead + i);
    __builtin_prefetch(ahead.at, 0, 2), ahead.at += ahead.step;
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      group_t group;
      memcpy(&group, x + m * stride + k * kGroup, sizeof group);
#pragma GCC unroll 4
      for (int n = 0; n < kVectors; ++n) sums[m][n] = dot(sums[m][n], w[n], group);
    }
  }
  if (column + kColumns <= p.outputs) {  // the same as below, with sums that stay in registers
#pragma GCC unroll 4
    for (int n = 0; n < kVectors; ++n) {
      const int64_t first = column + n * LANES;
      const vf scales = load(p.scales + first), bias = p.bias ? load(p.bias + first) : vf{};
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) {
        const int64_t at = (row + m) * p.outputs + first;
        vf sum = __builtin_convertvector(sums[m][n], vf) * (scales * p.x_scales[row + m]) + bias;
        if (p.added) sum += load(p.added + at);
        store(p.out + at, sum);
      }
    }
    return;
  }
  for (int n = 0; n < kVectors; ++n) {
    const vf scales = load(p.scales + column + n * LANES);
    const vf bias = p.bias ? load_part(p.bias, column, p.outputs, n) : vf{};
    for (int m = 0; m < M; ++m) {
      const int64_t at = (row + m) * p.outputs;
      vf sum = __builtin_convertvector(sums[m][n], vf) * (scales * p.x_scales[row + m]) + bias;
      if (p.added) sum += load_part(p.added + at, column, p.outputs, n);
      store_part(p.out + at, column, p.outputs, n, sum);
    }
  }
}

typedef void (*tile_fn)(const Product&, int64_t, int64_t, Ahead);
template <int N, int... M> struct Tiles : Tiles<N - 1, N, M...> {};
template <int... M> struct Tiles<0, M...> { static constexpr tile_fn of[] = {tile<M>...}; };

void quantise(const float* x, int64_t inputs, input_t* to, float* scale) {
  *scale = scale_of(x, inputs);
  const float inverse = inverse_of(*scale);
  int64_t i = 0;
  for (; i + LANES <= inputs; i += LANES) {
    const vi q = quantised(load(x + i), inverse) + kShift;
    typedef input_t vq __attribute__((vector_size(LANES * sizeof(input_t))));
    typedef input_t vq_loose __attribute__((vector_size(LANES * sizeof(input_t)), aligned(1), may_alias));
    *(vq_loose*)(to + i) = __builtin_convertvector(q, vq);
  }
  for (; i < inputs; ++i) to[i] = (input_t)(quantised(x[i], inverse) + kShift);
  for (; i < groups_of(inputs) * kGroup; ++i) to[i] = (input_t)kShift;
}

}  // namespace

// Bytes of packed weights, and of the inputs of one row with its scale.
EXPORT int64_t pm_int8_packed_bytes(int64_t outputs, int64_t inputs) {
  return (outputs + kColumns - 1) / kColumns * kColumns * groups_of(inputs) * kGroup;
}
EXPORT int64_t pm_int8_row_bytes(int64_t inputs) { return groups_of(inputs) * kGroup * sizeof(input_t) + 4; }

// weight: [outputs, inputs]. packed: [ceil(outputs / columns), groups, columns, inputs of a group]. scales, shifts: one
// per output, up to a multiple of the columns.
EXPORT void pm_int8_pack(const float* weight, int64_t outputs, int64_t inputs, int8_t* packed, float* scales,
                         int32_t* shifts, int32_t threads) {
  const int64_t groups = groups_of(inputs);
  for_each(threads, (outputs + kColumns - 1) / kColumns, [&](int64_t index, int) {
    int8_t* to = packed + index * groups * kColumns * kGroup;
    memset(to, 0, groups * kColumns * kGroup);
    for (int64_t c = 0; c < kColumns; ++c) {
      const int64_t output = index * kColumns + c;
      scales[output] = 0;
      shifts[output] = 0;
      if (output >= outputs) continue;
      const float* row = weight + output * inputs;
      const float scale = scales[output] = scale_of(row, inputs);
      const float inverse = inverse_of(scale);
      for (int64_t k = 0; k < inputs; ++k) {
        const int32_t q = quantised(row[k], inverse);
        to[(k / kGroup * kColumns + c) * kGroup + k % kGroup] = (int8_t)q;
        shifts[output] += kShift * q;
      }
    }
  });
}

// As pm_linear; workspace: rows times pm_int8_row_bytes.
EXPORT void pm_int8_linear(const float* x, int64_t x_stride, int64_t rows, int64_t outputs, int64_t inputs,
                           const int8_t* packed, const float* scales, const int32_t* shifts, const float* bias,
                           const float* added, float* out, void* workspace, int32_t threads) {
  const int64_t groups = groups_of(inputs);
  auto x_scales = static_cast<float*>(workspace);
  auto inputs8 = reinterpret_cast<input_t*>(x_scales + rows);
  for_each(rows * inputs < kQuantised ? 1 : threads, rows, [&](int64_t row, int) {
    quantise(x + row * x_stride, inputs, inputs8 + row * groups * kGroup, x_scales + row);
  });
  const Product p{inputs8, x_scales, outputs, groups, packed, scales, bias, added, shifts, out};
  for_each_tile<kRows>(threads, rows, outputs, inputs, groups * kGroup * sizeof(input_t), packed,
                       groups * kGroup * kColumns, groups, [&](int64_t height, int64_t panel, int64_t row, Ahead ahead) {
                         fetch_outputs(p.out, p.added, p.outputs, row, height, panel);
                         Tiles<kRows>::of[height - 1](p, panel, row, ahead);
                       });
}
