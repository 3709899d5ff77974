// What is done to every row by itself between matrix products.
#include <cmath>

#include "batch.h"
#include "threads.h"

namespace {

constexpr int64_t kElementsPerThread = 1 << 14;  // fewer are done sooner than another thread takes its share

template <class T> INLINE void norm_row(const T* from, const T* weight, T* to, int64_t size, float eps) {
  vf squares = {};
  float rest = 0;
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) squares += load(from + i) * load(from + i);
  for (; i < size; ++i) rest += widen(from[i]) * widen(from[i]);
  const float factor = 1.0f / std::sqrt((sum(squares) + rest) / (float)size + eps);
  for (i = 0; i + LANES <= size; i += LANES) store(to + i, load(from + i) * factor * load(weight + i));
  for (; i < size; ++i) to[i] = narrow<T>(widen(from[i]) * factor * widen(weight[i]));
}

template <class T>
void rms_norm(const T* x, const T* weight, T* out, int64_t rows, int64_t size, float eps, int threads) {
  for_each(rows * size < 2 * kElementsPerThread ? 1 : threads, rows,
           [&](int64_t row, int) { norm_row(x + row * size, weight, out + row * size, size, eps); });
}

template <class T>
void norm_heads(T* qkv, const T* weights, int64_t rows, int64_t all_heads, int64_t heads, int64_t size, float eps,
                int threads) {
  for_each(rows * heads * size < 2 * kElementsPerThread ? 1 : threads, rows, [&](int64_t row, int) {
    for (int64_t head = 0; head < heads; ++head) {
      T* x = qkv + (row * all_heads + head) * size;
      norm_row(x, weights + head * size, x, size, eps);
    }
  });
}

struct Silu {
  INLINE vf of(vf x) { return x / (1.0f + exponential(-x)); }
  static float of(float x) { return x / (1.0f + std::exp(-x)); }
};

// x/2 (1 + tanh(u)) = x / (1 + exp(-2u)) with u = sqrt(2/pi) (x + 0.044715 x^3).
struct GeluTanh {
  INLINE vf of(vf x) { return x / (1.0f + exponential(x * (1.0f + x * x * 0.044715f) * -kTwice)); }
  static float of(float x) { return x / (1.0f + std::exp(x * (1.0f + x * x * 0.044715f) * -kTwice)); }
  static constexpr float kTwice = 1.5957691216057308f;
};

template <class F, class T> void gated(const T* gate_up, T* out, int64_t rows, int64_t size, int threads) {
  for_each(rows * size < 2 * kElementsPerThread ? 1 : threads, rows, [&](int64_t row, int) {
    const T *gate = gate_up + row * 2 * size, *up = gate + size;
    T* to = out + row * size;
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) store(to + i, F::of(load(gate + i)) * load(up + i));
    for (; i < size; ++i) to[i] = narrow<T>(F::of(widen(gate[i])) * widen(up[i]));
  });
}

}  // namespace

// x, out: [rows, size]; weight: [size]; all of one dtype.
EXPORT void pm_rms_norm(const void* x, const void* weight, void* out, int32_t dtype, int64_t rows, int64_t size,
                        float eps, int32_t threads) {
#define CASE(T) return rms_norm((const T*)x, (const T*)weight, (T*)out, rows, size, eps, threads)
  switch (dtype) {
    case kFloat32: CASE(float);
    case kFloat16: CASE(half_t);
    case kBFloat16: CASE(bf16_t);
  }
#undef CASE
}

// The first heads of qkv [rows, all_heads, size], each by its row of weights [heads, size], in place.
EXPORT void pm_norm_heads(void* qkv, const void* weights, int32_t dtype, int64_t rows, int64_t all_heads, int64_t heads,
                          int64_t size, float eps, int32_t threads) {
#define CASE(T) return norm_heads((T*)qkv, (const T*)weights, rows, all_heads, heads, size, eps, threads)
  switch (dtype) {
    case kFloat32: CASE(float);
    case kFloat16: CASE(half_t);
    case kBFloat16: CASE(bf16_t);
  }
#undef CASE
}

// out[r] = silu(gate_up[r, :size]) * gate_up[r, size:]; out: [rows, size].
EXPORT void pm_silu_mul(const void* gate_up, void* out, int32_t dtype, int64_t rows, int64_t size, int32_t threads) {
#define CASE(T) return gated<Silu>((const T*)gate_up, (T*)out, rows, size, threads)
  switch (dtype) {
    case kFloat32: CASE(float);
    case kFloat16: CASE(half_t);
    case kBFloat16: CASE(bf16_t);
  }
#undef CASE
}

// The same with gelu's approximation by tanh.
EXPORT void pm_gelu_tanh_mul(const void* gate_up, void* out, int32_t dtype, int64_t rows, int64_t size,
                             int32_t threads) {
#define CASE(T) return gated<GeluTanh>((const T*)gate_up, (T*)out, rows, size, threads)
  switch (dtype) {
    case kFloat32: CASE(float);
    case kFloat16: CASE(half_t);
    case kBFloat16: CASE(bf16_t);
  }
#undef CASE
}
