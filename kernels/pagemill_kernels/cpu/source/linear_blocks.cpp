// Matrix products of the blocks in which GGUF files store weights (ggml's Q4_0, Q4_1, Q8_0): 32 weights with a scale d,
// and in Q4_1 a least value m, in half precision. Inputs are brought to 8 bits with a scale for every 32 of them.
//
// Sums within a block are exact integers, those over blocks run in ascending order: a row computes the same bits in any
// batch.
//
// Weights are taken as unsigned numbers u with a constant offset: w = d * (u - offset) or d * u + m. So every format is
// one kind of product, of unsigned weights with signed inputs, which is what the instructions multiply.
#include "panels.h"
#include "quantise.h"

namespace {

enum Kind : int32_t { kQ4_0 = 0, kQ4_1 = 1, kQ8_0 = 2 };
constexpr int64_t kBlock = 32, kGroups = kBlock / 4;  // inputs of a block, and groups of four that share a lane
constexpr int64_t kAhead = 4096;                      // bytes that are fetched ahead

#if defined(__AVX512VNNI__)
constexpr int kHeight = 8;  // rows at a time
constexpr uint32_t kFlip = 0x80808080;
typedef __m512i bytes_t;
struct Sums { vi a; };
INLINE bytes_t four(int32_t x) { return _mm512_set1_epi32(x); }
INLINE bytes_t read(const uint8_t* p) { return _mm512_loadu_si512(p); }
INLINE bytes_t low(bytes_t v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
INLINE bytes_t high(bytes_t v) { return _mm512_and_si512(_mm512_srli_epi16(v, 4), _mm512_set1_epi8(15)); }
INLINE void add_nibbles(Sums& s, bytes_t w, bytes_t x) { s.a = (vi)_mm512_dpbusd_epi32((__m512i)s.a, w, x); }
INLINE void add_bytes(Sums& s, bytes_t w, bytes_t x) { add_nibbles(s, w, x); }
template <Kind K> INLINE vi total(const Sums& s) { return s.a; }
#elif defined(__AVX2__)
// Pairs of products of bytes fit into 16 bits where one of them has 4 bits, and so does the sum over a block. Weights of
// 8 bits are taken as two of 4.
constexpr int kHeight = LANES == 16 ? 8 : 3;
constexpr uint32_t kFlip = 0x80808080;
#if LANES == 16
typedef __m512i bytes_t;
INLINE bytes_t four(int32_t x) { return _mm512_set1_epi32(x); }
INLINE bytes_t read(const uint8_t* p) { return _mm512_loadu_si512(p); }
INLINE bytes_t low(bytes_t v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
INLINE bytes_t high(bytes_t v) { return _mm512_and_si512(_mm512_srli_epi16(v, 4), _mm512_set1_epi8(15)); }
INLINE bytes_t add_pairs(bytes_t sums, bytes_t w, bytes_t x) {
  return _mm512_add_epi16(sums, _mm512_maddubs_epi16(w, x));
}
INLINE vi widened(bytes_t sums, int16_t factor) { return (vi)_mm512_madd_epi16(sums, _mm512_set1_epi16(factor)); }
#else
typedef __m256i bytes_t;
INLINE bytes_t four(int32_t x) { return _mm256_set1_epi32(x); }
INLINE bytes_t read(const uint8_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
INLINE bytes_t low(bytes_t v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
INLINE bytes_t high(bytes_t v) { return _mm256_and_si256(_mm256_srli_epi16(v, 4), _mm256_set1_epi8(15)); }
INLINE bytes_t add_pairs(bytes_t sums, bytes_t w, bytes_t x) {
  return _mm256_add_epi16(sums, _mm256_maddubs_epi16(w, x));
}
INLINE vi widened(bytes_t sums, int16_t factor) { return (vi)_mm256_madd_epi16(sums, _mm256_set1_epi16(factor)); }
#endif
struct Sums { bytes_t a, b; };
INLINE void add_nibbles(Sums& s, bytes_t w, bytes_t x) { s.a = add_pairs(s.a, w, x); }
INLINE void add_bytes(Sums& s, bytes_t w, bytes_t x) {
  s.a = add_pairs(s.a, low(w), x);
  s.b = add_pairs(s.b, high(w), x);
}
template <Kind K> INLINE vi total(const Sums& s) {
  if (K == kQ8_0) return widened(s.a, 1) + widened(s.b, 16);
  return widened(s.a, 1);
}
#elif defined(__aarch64__)
constexpr int kHeight = 4;
constexpr uint32_t kFlip = 0;
typedef int8x16_t bytes_t;
struct Sums { int32x4_t a; };
INLINE bytes_t four(int32_t x) { return vreinterpretq_s8_s32(vdupq_n_s32(x)); }
INLINE bytes_t read(const uint8_t* p) { return vreinterpretq_s8_u8(vld1q_u8(p)); }
INLINE bytes_t low(bytes_t v) { return vandq_s8(v, vdupq_n_s8(15)); }
INLINE bytes_t high(bytes_t v) { return vreinterpretq_s8_u8(vshrq_n_u8(vreinterpretq_u8_s8(v), 4)); }
INLINE void add_bytes(Sums& s, bytes_t w, bytes_t x) {
#if defined(__ARM_FEATURE_DOTPROD)
  s.a = vdotq_s32(s.a, w, x);
#else
  const int16x8_t left = vmull_s8(vget_low_s8(w), vget_low_s8(x)), right = vmull_high_s8(w, x);
  s.a = vpadalq_s16(s.a, vpaddq_s16(left, right));
#endif
}
INLINE void add_nibbles(Sums& s, bytes_t w, bytes_t x) { add_bytes(s, w, x); }
template <Kind K> INLINE vi total(const Sums& s) { return (vi)s.a; }
#else
constexpr int kHeight = 4;
constexpr uint32_t kFlip = 0;
typedef vi bytes_t;
struct Sums { vi a; };
INLINE bytes_t four(int32_t x) { return x - (vi){}; }
INLINE bytes_t read(const uint8_t* p) { vi v; memcpy(&v, p, sizeof v); return v; }
INLINE bytes_t low(bytes_t v) { return v & 0x0f0f0f0f; }
INLINE bytes_t high(bytes_t v) { return (v >> 4) & 0x0f0f0f0f; }
INLINE void add_bytes(Sums& s, bytes_t w, bytes_t x) {
  for (int shift = 0; shift < 32; shift += 8) s.a += ((w << shift) >> 24) * ((x << shift) >> 24);
}
INLINE void add_nibbles(Sums& s, bytes_t w, bytes_t x) { add_bytes(s, w, x); }
template <Kind K> INLINE vi total(const Sums& s) { return s.a; }
#endif

// Bytes of a block are the same in a file (of one output: d, m, weights) and in a panel (of all its outputs: all d, all
// m, the first four bytes of weights of each, the next four of each, …).
template <Kind K> struct Format {
  static constexpr bool kLeast = K == kQ4_1;
  static constexpr int kWords = K == kQ8_0 ? 8 : 4;
  static constexpr int64_t kHead = kLeast ? 4 : 2, kBytes = kHead + 4 * kWords;
  static constexpr uint32_t kFlipped = K == kQ8_0 ? kFlip : 0;
  static constexpr int32_t kOffset = K == kQ4_0 ? 8 : K == kQ8_0 && kFlip ? 128 : 0;
};

struct Product {
  const int8_t* x;
  const float* x_scales;  // [rows, blocks]
  const int32_t* x_sums;  // [rows, blocks] sums of the 8-bit inputs of a block
  int64_t outputs, blocks;
  const uint8_t* packed;
  const float *bias, *added;
  float* out;
  int64_t stride;  // of added and out
};

template <Kind K, int M> void tile(const Product& p, int64_t index, int64_t row, Ahead ahead) {
  typedef Format<K> F;
  const uint8_t* panel = p.packed + index * p.blocks * F::kBytes * kColumns;
  vf totals[M][kVectors] = {};
  for (int64_t b = 0; b < p.blocks; ++b, panel += F::kBytes * kColumns) {
    const int8_t* x = p.x + (row * p.blocks + b) * kBlock;
    const int64_t x_stride = p.blocks * kBlock;
    Sums sums[M][kVectors] = {};
    for (int64_t i = 0; i < F::kBytes * kColumns; i += 64) __builtin_prefetch(panel + kAhead + i);
    for (int64_t i = 0; i < ahead.step; i += 64) __builtin_prefetch(ahead.at + i, 0, 2);
    ahead.at += ahead.step;
    auto group = [&](int m, int g) {
      int32_t bytes;
      memcpy(&bytes, x + m * x_stride + g * 4, 4);
      return four(bytes);
    };
#pragma GCC unroll 8
    for (int word = 0; word < F::kWords; ++word) {
      bytes_t w[kVectors];
#pragma GCC unroll 4
      for (int n = 0; n < kVectors; ++n) w[n] = read(panel + F::kHead * kColumns + (word * kColumns + n * LANES) * 4);
      if (K == kQ8_0) {
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
          for (int n = 0; n < kVectors; ++n) add_bytes(sums[m][n], w[n], group(m, word));
      } else {
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
          for (int n = 0; n < kVectors; ++n) {
            add_nibbles(sums[m][n], low(w[n]), group(m, word));
            add_nibbles(sums[m][n], high(w[n]), group(m, word + 4));
          }
      }
    }
#pragma GCC unroll 4
    for (int n = 0; n < kVectors; ++n) {
      const vf d = load((const half_t*)panel + n * LANES);
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) {
        const int64_t at = (row + m) * p.blocks + b;
        const vi whole = total<K>(sums[m][n]) - F::kOffset * p.x_sums[at];
        totals[m][n] += __builtin_convertvector(whole, vf) * (d * p.x_scales[at]);
        if (F::kLeast)
          totals[m][n] += load((const half_t*)panel + kColumns + n * LANES) * (p.x_scales[at] * (float)p.x_sums[at]);
      }
    }
  }
  const int64_t column = index * kColumns;
  for (int n = 0; n < kVectors; ++n)
    for (int m = 0; m < M; ++m) {
      const int64_t at = (row + m) * p.stride;
      vf result = totals[m][n];
      if (p.bias) result += load_part(p.bias, column, p.outputs, n);
      if (p.added) result += load_part(p.added + at, column, p.outputs, n);
      store_part(p.out + at, column, p.outputs, n, result);
    }
}

typedef void (*tile_fn)(const Product&, int64_t, int64_t, Ahead);
template <Kind K, int N, int... M> struct Tiles : Tiles<K, N - 1, N, M...> {};
template <Kind K, int... M> struct Tiles<K, 0, M...> { static constexpr tile_fn of[] = {tile<K, M>...}; };

template <Kind K> void multiply(const Product& p, int64_t rows, int32_t threads) {
  threads = threads_that_pay(rows, p.outputs, p.blocks * kBlock, threads);
  for_each_tile<kHeight>(threads, rows, p.outputs, p.blocks * kBlock, p.blocks * kBlock, p.packed,
                         p.blocks * Format<K>::kBytes * kColumns, p.blocks,
                         [&](int64_t height, int64_t panel, int64_t row, Ahead ahead) {
                           fetch_outputs(p.out, p.added, p.stride, row, height, panel);
                           Tiles<K, kHeight>::of[height - 1](p, panel, row, ahead);
                         });
}

template <Kind K> void pack(const uint8_t* data, int64_t outputs, int64_t blocks, uint8_t* packed, int32_t threads) {
  typedef Format<K> F;
  for_each(threads, (outputs + kColumns - 1) / kColumns, [&](int64_t index, int) {
    uint8_t* panel = packed + index * blocks * F::kBytes * kColumns;
    memset(panel, 0, blocks * F::kBytes * kColumns);
    for (int64_t c = 0; c < kColumns && index * kColumns + c < outputs; ++c) {
      const uint8_t* from = data + (index * kColumns + c) * blocks * F::kBytes;
      for (int64_t b = 0; b < blocks; ++b, from += F::kBytes) {
        uint8_t* to = panel + b * F::kBytes * kColumns;
        for (int64_t half = 0; half < F::kHead; half += 2) memcpy(to + half * kColumns + c * 2, from + half, 2);
        for (int64_t word = 0; word < F::kWords; ++word) {
          uint32_t bytes;
          memcpy(&bytes, from + F::kHead + word * 4, 4);
          bytes ^= F::kFlipped;
          memcpy(to + F::kHead * kColumns + (word * kColumns + c) * 4, &bytes, 4);
        }
      }
    }
  });
}

void quantise(const float* x, int64_t blocks, int8_t* to, float* scales, int32_t* sums) {
  typedef int8_t vq __attribute__((vector_size(LANES)));
  typedef int8_t vq_loose __attribute__((vector_size(LANES), aligned(1), may_alias));
  for (int64_t b = 0; b < blocks; ++b, x += kBlock, to += kBlock) {
    scales[b] = scale_of(x, kBlock);
    const float inverse = inverse_of(scales[b]);
    vi whole = {};
    for (int i = 0; i < kBlock; i += LANES) {
      const vi q = quantised(load(x + i), inverse);
      whole += q;
      *(vq_loose*)(to + i) = __builtin_convertvector(q, vq);
    }
    int32_t all = 0;
    for (int i = 0; i < LANES; ++i) all += whole[i];
    sums[b] = all;
  }
}

#define BY_KIND(call)                        \
  switch (kind) {                            \
    case kQ4_0: return call<kQ4_0> ARGUMENTS; \
    case kQ4_1: return call<kQ4_1> ARGUMENTS; \
    case kQ8_0: return call<kQ8_0> ARGUMENTS; \
  }

}  // namespace

// Outputs are padded to a multiple of these.
EXPORT int64_t pm_blocks_columns() { return kColumns; }

// Bytes of workspace for a row.
EXPORT int64_t pm_blocks_row_bytes(int64_t inputs) { return inputs + inputs / kBlock * 8; }

// data: [outputs, inputs / 32] blocks as in the file. packed: as many bytes as they would have with padded outputs.
EXPORT void pm_blocks_pack(int32_t kind, const uint8_t* data, int64_t outputs, int64_t inputs, uint8_t* packed,
                           int32_t threads) {
#define ARGUMENTS (data, outputs, inputs / kBlock, packed, threads)
  BY_KIND(pack)
#undef ARGUMENTS
}

// As pm_linear, with rows of out and added that are `stride` apart; workspace: rows times pm_blocks_row_bytes.
EXPORT void pm_blocks_linear(const float* x, int64_t x_stride, int64_t rows, int64_t outputs, int64_t inputs,
                             int32_t kind, const uint8_t* packed, const float* bias, const float* added, float* out,
                             int64_t stride, void* workspace, int32_t threads) {
  const int64_t blocks = inputs / kBlock;
  auto scales = static_cast<float*>(workspace);
  auto sums = reinterpret_cast<int32_t*>(scales + rows * blocks);
  auto inputs8 = reinterpret_cast<int8_t*>(sums + rows * blocks);
  for_each(rows * inputs < 1 << 18 ? 1 : threads, rows, [&](int64_t row, int) {
    quantise(x + row * x_stride, blocks, inputs8 + row * inputs, scales + row * blocks, sums + row * blocks);
  });
  const Product p{inputs8, scales, sums, outputs, blocks, packed, bias, added, out, stride};
#define ARGUMENTS (p, rows, threads)
  BY_KIND(multiply)
#undef ARGUMENTS
}
