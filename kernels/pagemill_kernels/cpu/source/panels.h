// How products share out their work: panels of kColumns outputs, and as many rows at a time as registers hold sums for.
#pragma once

#include "batch.h"
#include "threads.h"

constexpr int kVectors = LANES == 4 ? 4 : 2;  // vectors side by side in a panel
constexpr int64_t kColumns = kVectors * LANES;
constexpr int kRows = LANES == 16 ? 14 : 6;   // rows at a time: sums, panel and factor fill the registers
constexpr int64_t kInputBytes = 1 << 19;         // of inputs that stay in cache while panels pass
constexpr int64_t kReading = 4;                   // rows that cost as much as reading narrow weights and widening them
constexpr int64_t kWidenedPerThread = 5 << 20;    // products with such weights below which another thread does not pay
constexpr int64_t kProductsPerThread = 1 << 18;  // below which another thread does not pay

// What a tile asks for while it computes: bytes of the panel that its thread takes next, `step` of them for each group of
// inputs.
struct Ahead {
  const char* at;
  int64_t step;
};

// Calls tile(height, panel, row, ahead) for all tiles of at most Rows rows. Threads take few panels at a time, so that
// one that is slowed by other processes takes fewer.
//
// Where there are several tiles of rows, a panel is read from memory once and from the cache then. Memory is kept busy all
// the time by fetching the next panel bit by bit, in all tiles, into the second cache.
//
// row_bytes: of a row of inputs. panels: the first one. steps: groups of inputs that a tile goes through.
// Of `threads`, those that a product with weights in few bits pays for. A single row takes one all through: the others
// would sleep from one large product to the next, and waking them costs more than they do.
INLINE int threads_that_pay(int64_t rows, int64_t outputs, int64_t inputs, int threads) {
  return rows == 1 || (rows + kReading) * outputs * inputs < 2 * kWidenedPerThread ? 1 : threads;
}

template <int Rows, class Tile>
void for_each_tile(int threads, int64_t rows, int64_t outputs, int64_t inputs, int64_t row_bytes, const void* panels,
                   int64_t panel_bytes, int64_t steps, Tile&& tile) {
  const int64_t count = (outputs + kColumns - 1) / kColumns, most = kInputBytes / row_bytes / Rows * Rows;
  const int64_t block_rows = most < Rows ? Rows : most, blocks = (rows + block_rows - 1) / block_rows;
  if (rows * outputs * inputs < 2 * kProductsPerThread) threads = 1;
  int64_t group = threads == 1 ? count : rows > Rows ? 1 : count / (threads * 6);
  group = group < 1 ? 1 : group;
  const int64_t groups = (count + group - 1) / group;
  for_each_ahead(threads, groups * blocks, [&](int64_t item, int64_t following, int) {
    const int64_t begin = item % groups * group, end = begin + group < count ? begin + group : count;
    const int64_t top = item / groups * block_rows, bottom = top + block_rows < rows ? top + block_rows : rows;
    const int64_t tiles = (bottom - top + Rows - 1) / Rows, height = (bottom - top + tiles - 1) / tiles;
    for (int64_t panel = begin; panel < end; ++panel) {
      const int64_t next = panel + 1 < end ? panel + 1 : following < 0 ? -1 : following % groups * group;
      Ahead ahead{static_cast<const char*>(panels), 0};
      if (tiles > 1 && next >= 0)
        ahead = {ahead.at + next * panel_bytes, (panel_bytes + tiles * steps - 1) / (tiles * steps)};
      for (int64_t row = top; row < bottom; row += height, ahead.at += ahead.step * steps)
        tile(bottom - row < height ? bottom - row : height, panel, row, ahead);
    }
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
