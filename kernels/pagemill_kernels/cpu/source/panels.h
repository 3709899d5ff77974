// How products share out their work: panels of kColumns outputs, and as many rows at a time as registers hold sums for.
#pragma once

#include "batch.h"
#include "threads.h"

constexpr int kVectors = LANES == 4 ? 4 : 2;  // vectors side by side in a panel
constexpr int64_t kColumns = kVectors * LANES;
constexpr int kRows = LANES == 16 ? 14 : 6;   // rows at a time: sums, panel and factor fill the registers
constexpr int64_t kInputBytes = 1 << 19;         // of inputs that stay in cache while panels pass
constexpr int64_t kReading = 4;                  // rows that cost as much as reading narrow weights and widening them
constexpr int64_t kWidenedPerThread = 5 << 20;   // products with such weights below which another thread does not pay
constexpr int64_t kProductsPerThread = 1 << 18;  // below which another thread does not pay

// What a tile asks for while it computes: bytes of the panel that its thread takes next, `step` of them for each group of
// inputs.
struct Ahead {
  const char* at;
  int64_t step;
};

// Of `threads`, those that a product with weights in few bits pays for. A single row takes one all through: the others
// would sleep from one large product to the next, and waking them costs more than they do.
INLINE int threads_that_pay(int64_t rows, int64_t outputs, int64_t inputs, int threads) {
  return rows == 1 || (rows + kReading) * outputs * inputs < 2 * kWidenedPerThread ? 1 : threads;
}

// Of `count` panels, how many a thread takes at a time.
INLINE int64_t panels_at_a_time(int64_t count, int threads) {
  const int64_t share = threads == 1 ? count : count / (threads * 6);
  return share < 1 ? 1 : share;
}

// Rows that are multiplied with one panel after the other, because their inputs of `row_bytes` each stay in cache: in
// tiles of at most Rows, and as many as `least` even if that is more than the cache holds.
template <int Rows> INLINE int64_t rows_in_cache(int64_t row_bytes, int64_t least) {
  const int64_t most = kInputBytes / row_bytes / Rows * Rows;
  return most < least ? least : most;
}

// Rows `top` to `bottom` in `tiles` tiles of at most Rows, all of the same height but for the last.
template <int Rows> struct RowTiles {
  int64_t top, bottom, tiles, height;

  // Of those blocks of `block_rows` that `rows` are cut into, the one with this number.
  RowTiles(int64_t number, int64_t block_rows, int64_t rows)
      : top(number * block_rows),
        bottom(top + block_rows < rows ? top + block_rows : rows),
        tiles((bottom - top + Rows - 1) / Rows),
        height((bottom - top + tiles - 1) / tiles) {}

  int64_t height_at(int64_t row) const { return bottom - row < height ? bottom - row : height; }
};

// Calls tile(height, panel, row, ahead) for all tiles of at most Rows rows. Threads take few panels at a time, so that
// one that is slowed by other processes takes fewer.
//
// Where there are several tiles of rows, a panel is read from memory once and from the cache then. Memory is kept busy all
// the time by fetching the next panel bit by bit, in all tiles, into the second cache.
//
// row_bytes: of a row of inputs. panels: the first one. steps: groups of inputs that a tile goes through.
template <int Rows, class Tile>
void for_each_tile(int threads, int64_t rows, int64_t outputs, int64_t inputs, int64_t row_bytes, const void* panels,
                   int64_t panel_bytes, int64_t steps, Tile&& tile) {
  const int64_t count = (outputs + kColumns - 1) / kColumns, block_rows = rows_in_cache<Rows>(row_bytes, Rows);
  const int64_t blocks = (rows + block_rows - 1) / block_rows;
  if (rows * outputs * inputs < 2 * kProductsPerThread) threads = 1;
  const int64_t group = threads > 1 && rows > Rows ? 1 : panels_at_a_time(count, threads);
  const int64_t groups = (count + group - 1) / group;
  for_each_ahead(threads, groups * blocks, [&](int64_t item, int64_t following, int) {
    const int64_t begin = item % groups * group, end = begin + group < count ? begin + group : count;
    const RowTiles<Rows> block(item / groups, block_rows, rows);
    for (int64_t panel = begin; panel < end; ++panel) {
      const int64_t next = panel + 1 < end ? panel + 1 : following < 0 ? -1 : following % groups * group;
      Ahead ahead{static_cast<const char*>(panels), 0};
      if (block.tiles > 1 && next >= 0)
        ahead = {ahead.at + next * panel_bytes, (panel_bytes + block.tiles * steps - 1) / (block.tiles * steps)};
      for (int64_t row = block.top; row < block.bottom; row += block.height, ahead.at += ahead.step * steps)
        tile(block.height_at(row), panel, row, ahead);
    }
  });
}

// Asks for the outputs of a tile, and for what is added to them, before it computes them: those of many tokens are out of
// the near caches by then, and stores that miss hold up what comes after. Not for the tile to do itself, whose sums
// compilers then no longer keep in registers.
INLINE void fetch_outputs(const float* out, const float* added, int64_t stride, int64_t row, int64_t height,
                          int64_t panel) {
  for (int64_t at = row * stride + panel * kColumns; height > 0; --height, at += stride)
    for (int64_t i = 0; i < kColumns; i += 16) {
      __builtin_prefetch(out + at + i, 1);
      if (added) __builtin_prefetch(added + at + i);
    }
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
