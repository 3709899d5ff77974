// Matrix products in float32 with weights packed into panels: kColumns outputs side by side, all inputs below each
// other, so that a panel is read from front to back whatever the number of rows.
//
// Every output is one sum over the inputs in ascending order: a row computes the same bits in any batch.
#include "batch.h"
#include "threads.h"

namespace {

constexpr int kVectors = LANES == 4 ? 4 : 2;     // vectors side by side in a panel
constexpr int64_t kColumns = kVectors * LANES;
constexpr int kRows = LANES == 8 ? 6 : LANES == 16 ? 14 : 6;  // rows at a time: sums, panel and factor fill the registers
constexpr int64_t kBlockRows = 16 * kRows;        // rows whose inputs stay in cache while panels pass
constexpr int64_t kProductsPerThread = 1 << 18;   // below which another thread does not pay
constexpr int64_t kPrefetch = 2048;               // bytes ahead

struct Product {
  const float* x;
  int64_t x_stride, rows, outputs, inputs;
  const float *packed, *bias, *added;
  float* out;
};

template <int M> void tile(const Product& p, const float* panel, int64_t row, int64_t column) {
  const float* x = p.x + row * p.x_stride;
  const int64_t left = p.outputs - column;
  vf sums[M][kVectors];
  for (int n = 0; n < kVectors; ++n) {
    vf start = {};
    if (p.bias) {
      if ((n + 1) * LANES <= left) start = load(p.bias + column + n * LANES);
      else for (int i = 0; n * LANES + i < left; ++i) start[i] = p.bias[column + n * LANES + i];
    }
    for (int m = 0; m < M; ++m) sums[m][n] = start;
  }
  for (int64_t k = 0; k < p.inputs; ++k, panel += kColumns) {
    vf w[kVectors];
#pragma GCC unroll 4
    for (int n = 0; n < kVectors; ++n) w[n] = load(panel + n * LANES);
    __builtin_prefetch(panel + kPrefetch / 4);
    if (kColumns * 4 > 64) __builtin_prefetch(panel + kPrefetch / 4 + 16);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      const vf factor = splat(x[m * p.x_stride + k]);
#pragma GCC unroll 4
      for (int n = 0; n < kVectors; ++n) sums[m][n] += factor * w[n];
    }
  }
  for (int m = 0; m < M; ++m) {
    float* out = p.out + (row + m) * p.outputs + column;
    const float* added = p.added ? p.added + (row + m) * p.outputs + column : nullptr;
    for (int n = 0; n < kVectors; ++n) {
      if ((n + 1) * LANES <= left) {
        store(out + n * LANES, added ? sums[m][n] + load(added + n * LANES) : sums[m][n]);
      } else {
        for (int i = 0; n * LANES + i < left; ++i) out[n * LANES + i] = sums[m][n][i] + (added ? added[n * LANES + i] : 0);
      }
    }
  }
}

typedef void (*tile_fn)(const Product&, const float*, int64_t, int64_t);
template <int... M> struct Tiles { static constexpr tile_fn of[] = {tile<M + 1>...}; };
template <int N, int... M> struct Upto : Upto<N - 1, N - 1, M...> {};
template <int... M> struct Upto<0, M...> : Tiles<M...> {};

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
  const Product p{x, x_stride, rows, outputs, inputs, packed, bias, added, out};
  const int64_t panels = (outputs + kColumns - 1) / kColumns, blocks = (rows + kBlockRows - 1) / kBlockRows;
  if (rows * outputs * inputs < 2 * kProductsPerThread) threads = 1;
  // Threads take a few panels at a time, so that one that is slowed by other processes takes fewer.
  int64_t group = panels / (threads * 6);
  group = threads == 1 ? panels : group < 1 ? 1 : group;
  const int64_t groups = (panels + group - 1) / group;
  for_each(threads, groups * blocks, [&](int64_t item, int) {
    const int64_t begin = item % groups * group, end = begin + group < panels ? begin + group : panels;
    const int64_t top = item / groups * kBlockRows, bottom = top + kBlockRows < rows ? top + kBlockRows : rows;
    const int64_t tiles = (bottom - top + kRows - 1) / kRows, height = (bottom - top + tiles - 1) / tiles;
    for (int64_t panel = begin; panel < end; ++panel)
      for (int64_t row = top; row < bottom; row += height) {
        const int64_t n = bottom - row < height ? bottom - row : height;
        Upto<kRows>::of[n - 1](p, packed + panel * inputs * kColumns, row, panel * kColumns);
      }
  });
}
