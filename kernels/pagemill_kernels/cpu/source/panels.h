// How products share out their work: panels of kColumns outputs, and as many rows at a time as registers hold sums for.
#pragma once

#include "batch.h"
#include "threads.h"

constexpr int kVectors = LANES == 4 ? 4 : 2;  // vectors side by side in a panel
constexpr int64_t kColumns = kVectors * LANES;
constexpr int kRows = LANES == 16 ? 14 : 6;   // rows at a time: sums, panel and factor fill the registers
constexpr int64_t kProductsPerThread = 1 << 18;  // below which another thread does not pay

// Calls tile(height, panel, row) for all tiles of at most Rows rows. Threads take a few panels at a time, so that one
// that is slowed by other processes takes fewer.
template <int Rows, class Tile> void for_each_tile(int threads, int64_t rows, int64_t outputs, int64_t inputs, Tile&& tile) {
  constexpr int64_t kBlockRows = 16 * Rows;  // rows whose inputs stay in cache while panels pass
  const int64_t panels = (outputs + kColumns - 1) / kColumns, blocks = (rows + kBlockRows - 1) / kBlockRows;
  if (rows * outputs * inputs < 2 * kProductsPerThread) threads = 1;
  int64_t group = threads == 1 ? panels : panels / (threads * 6);
  group = group < 1 ? 1 : group;
  const int64_t groups = (panels + group - 1) / group;
  for_each(threads, groups * blocks, [&](int64_t item, int) {
    const int64_t begin = item % groups * group, end = begin + group < panels ? begin + group : panels;
    const int64_t top = item / groups * kBlockRows, bottom = top + kBlockRows < rows ? top + kBlockRows : rows;
    const int64_t tiles = (bottom - top + Rows - 1) / Rows, height = (bottom - top + tiles - 1) / tiles;
    for (int64_t panel = begin; panel < end; ++panel)
      for (int64_t row = top; row < bottom; row += height)
        tile(bottom - row < height ? bottom - row : height, panel, row);
  });
}

// Vector n of a panel's part of a row of outputs; zeros where there is no output.
INLINE vf load_part(const float* row, int64_t column, int64_t outputs, int n) {
  const int64_t at = column + n * LANES;
  if (at + LANES <= outputs) return load(row + at);
  vf part = {};
  for (int i = 0; at + i < outputs; ++i) part[i] = row[at + i];
  return part;
}
INLINE void store_part(float* row, int64_t column, int64_t outputs, int n, vf part) {
  const int64_t at = column + n * LANES;
  if (at + LANES <= outputs) return store(row + at, part);
  for (int i = 0; at + i < outputs; ++i) row[at + i] = part[i];
}
