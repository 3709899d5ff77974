// What is done to every row by itself between matrix products.
#include <cmath>

#include "batch.h"
#include "threads.h"

namespace {

constexpr int64_t kElementsPerThread = 1 << 16;  // fewer are done sooner than another thread wakes

template <class T>
void rms_norm(const T* x, const T* weight, T* out, int64_t rows, int64_t size, float eps, int threads) {
  for_each(rows * size < 2 * kElementsPerThread ? 1 : threads, rows, [&](int64_t row, int) {
    const T* from = x + row * size;
    T* to = out + row * size;
    vf squares = {};
    float rest = 0;
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) squares += load(from + i) * load(from + i);
    for (; i < size; ++i) rest += widen(from[i]) * widen(from[i]);
    const float factor = 1.0f / std::sqrt((sum(squares) + rest) / (float)size + eps);
    for (i = 0; i + LANES <= size; i += LANES) store(to + i, load(from + i) * factor * load(weight + i));
    for (; i < size; ++i) to[i] = narrow<T>(widen(from[i]) * factor * widen(weight[i]));
  });
}

template <class T> void silu_mul(const T* gate_up, T* out, int64_t rows, int64_t size, int threads) {
  for_each(rows * size < 2 * kElementsPerThread ? 1 : threads, rows, [&](int64_t row, int) {
    const T *gate = gate_up + row * 2 * size, *up = gate + size;
    T* to = out + row * size;
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
      const vf g = load(gate + i);
      store(to + i, g / (1.0f + exponential(-g)) * load(up + i));
    }
    for (; i < size; ++i) {
      const float g = widen(gate[i]);
      to[i] = narrow<T>(g / (1.0f + std::exp(-g)) * widen(up[i]));
    }
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

// out[r] = silu(gate_up[r, :size]) * gate_up[r, size:]; out: [rows, size].
EXPORT void pm_silu_mul(const void* gate_up, void* out, int32_t dtype, int64_t rows, int64_t size, int32_t threads) {
#define CASE(T) return silu_mul((const T*)gate_up, (T*)out, rows, size, threads)
  switch (dtype) {
    case kFloat32: CASE(float);
    case kFloat16: CASE(half_t);
    case kBFloat16: CASE(bf16_t);
  }
#undef CASE
}
