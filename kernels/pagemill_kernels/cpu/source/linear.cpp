// Matrix products in float32 with weights packed into panels: kColumns outputs side by side, all inputs below each
// other, so that a panel is read from front to back whatever the number of rows.
//
// Every output is one sum over the inputs in ascending order: a row computes the same bits in any batch.
#include "panels.h"

namespace {

constexpr int64_t kAhead = 512;  // elements that are fetched ahead

struct Product {
  const float* x;
  int64_t x_stride, outputs, inputs;
  const float *packed, *bias, *added;
  float* out;
};

template <int M> void tile(const Product& p, int64_t index, int64_t row, Ahead ahead) {
  const float *x = p.x + row * p.x_stride, *panel = p.packed + index * p.inputs * kColumns;
  const int64_t column = index * kColumns;
  vf sums[M][kVectors];
  for (int n = 0; n < kVectors; ++n) {
    const vf start = p.bias ? load_part(p.bias, column, p.outputs, n) : vf{};
    for (int m = 0; m < M; ++m) sums[m][n] = start;
  }
  for (int64_t k = 0; k < p.inputs; ++k, panel += kColumns) {
    vf w[kVectors];
#pragma GCC unroll 4
    for (int n = 0; n < kVectors; ++n) w[n] = load(panel + n * LANES);
    for (int64_t i = 0; i < kColumns; i += 16) __builtin_prefetch(panel + kAhead + i);
    __builtin_prefetch(ahead.at, 0, 2), ahead.at += ahead.step;
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      const vf factor = splat(x[m * p.x_stride + k]);
#pragma GCC unroll 4
      for (int n = 0; n < kVectors; ++n) sums[m][n] += factor * w[n];
    }
  }
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < kVectors; ++n) {
      const int64_t at = (row + m) * p.outputs;
      const vf sum = p.added ? sums[m][n] + load_part(p.added + at, column, p.outputs, n) : sums[m][n];
      store_part(p.out + at, column, p.outputs, n, sum);
    }
}

typedef void (*tile_fn)(const Product&, int64_t, int64_t, Ahead);
template <int N, int... M> struct Tiles : Tiles<N - 1, N, M...> {};
template <int... M> struct Tiles<0, M...> { static constexpr tile_fn of[] = {tile<M>...}; };

}  // namespace

EXPORT int64_t pm_linear_columns() { return kColumns; }

// weight: [outputs, inputs]. packed: [ceil(outputs / columns), inputs, columns], zeros where there is no output.
EXPORT void pm_linear_pack(const float* weight, int64_t outputs, int64_t inputs, float* packed, int32_t threads) {
  for_each(threads, (outputs + kColumns - 1) / kColumns, [&](int64_t index, int) {
    float* to = packed + index * inputs * kColumns;
    for (int64_t c = 0; c < kColumns; ++c) {
      const int64_t output = index * kColumns + c;
      for (int64_t k = 0; k < inputs; ++k) to[k * kColumns + c] = output < outputs ? weight[output * inputs + k] : 0.0f;
    }
  });
}

// out = x @ weight.T + bias + added, of [rows, outputs]; bias [outputs] and added [rows, outputs] or null. added may be
// out.
EXPORT void pm_linear(const float* x, int64_t x_stride, int64_t rows, int64_t outputs, int64_t inputs,
                      const float* packed, const float* bias, const float* added, float* out, int32_t threads) {
  const Product p{x, x_stride, outputs, inputs, packed, bias, added, out};
  for_each_tile<kRows>(threads, rows, outputs, inputs, inputs * sizeof(float), packed, inputs * kColumns * sizeof(float),
                       inputs, [&](int64_t height, int64_t panel, int64_t row, Ahead ahead) {
                         fetch_outputs(p.out, p.added, p.outputs, row, height, panel);
                         Tiles<kRows>::of[height - 1](p, panel, row, ahead);
                       });
}
