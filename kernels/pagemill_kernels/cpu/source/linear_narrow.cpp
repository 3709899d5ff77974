// Matrix products in float32 with weights that are stored in fewer bits without loss: those of bfloat16 or float16
// checkpoints, and those that a GGUF file stores in blocks of 32 with a scale d and maybe a least value m (ggml's Q4_0,
// Q4_1, Q8_0). At few rows a product takes as long as its weights take to be read.
//
// Weights become float32 in registers, the very numbers that pm_linear would be given: d * q is exact in float32 (11 by
// at most 8 bits), so d * q + m is rounded once, in one instruction or two. Every output is one sum over the inputs in
// ascending order, as pm_linear's: a row computes the same bits as there, in any batch.
//
// With more rows than registers hold sums for, weights become float32 anew for every kHeight rows, or are left in memory
// that stays in cache, a part of a panel at a time: what was measured to be faster.
#include "panels.h"

namespace {

enum Kind : int32_t { kBFloat16Pairs = 0, kHalves = 1, kQ4_0 = 2, kQ4_1 = 3, kQ8_0 = 4 };

constexpr int64_t kAhead = 4096;  // bytes that are fetched ahead
constexpr int64_t kChunk = 768;   // most inputs of a part of a panel, which then takes 96 KiB of the second cache
constexpr int kHeight = LANES == 16 ? 12 : LANES == 8 ? 6 : 4;  // rows at a time
constexpr int kSide = LANES == 16 ? 2 : 1;  // panels at a time at kSideRows or fewer: sums enough to hide their latency
constexpr int64_t kSideRows = 4;
enum Rest { kAnew, kByFirst, kBefore };  // for more rows: anew, left by the first ones, left before any

// How weights are stored. A panel is groups of kInputs inputs, one below the other. A group has kHead bytes of scales for
// each output, and then kWords words of each, every one in a row of kColumns; a word of kWordBytes has equally many inputs.
struct Unscaled {
  static constexpr int64_t kHead = 0, kWords = 1;
  struct Scale {};
  INLINE Scale scale(const uint8_t*, int) { return {}; }
};

struct Plain : Unscaled {
  static constexpr int64_t kInputs = 1, kWordBytes = 4;
  typedef vf Word;
  INLINE Word word(const uint8_t* p) { return load((const float*)p); }
  INLINE vf weight(Word w, int, const Scale&) { return w; }
};

struct BFloat16Pairs : Unscaled {
  static constexpr int64_t kInputs = 2, kWordBytes = 4;
  static constexpr Rest kRest = LANES == 16 ? kAnew : kByFirst;
  typedef vu Word;
  INLINE Word word(const uint8_t* p) { return (vu)load((const float*)p); }
  INLINE vf weight(Word w, int i, const Scale&) { return (vf)(i ? w & 0xffff0000u : w << 16); }
  static void pack(const float* weight, const uint8_t*, int64_t inputs, uint8_t* panel, int64_t column) {
    for (int64_t k = 0; k < inputs; ++k) {
      const uint16_t bits = (uint16_t)(to_bits(weight[k]) >> 16);
      memcpy(panel + (k / 2 * kColumns + column) * 4 + k % 2 * 2, &bits, 2);
    }
  }
};

struct Halves : Unscaled {
  static constexpr int64_t kInputs = 1, kWordBytes = 2;
  static constexpr Rest kRest = LANES == 16 ? kAnew : kByFirst;
  typedef vf Word;
  INLINE Word word(const uint8_t* p) { return load((const half_t*)p); }
  INLINE vf weight(Word w, int, const Scale&) { return w; }
  static void pack(const float* weight, const uint8_t*, int64_t inputs, uint8_t* panel, int64_t column) {
    for (int64_t k = 0; k < inputs; ++k) {
      const half_t half = narrow<half_t>(weight[k]);
      memcpy(panel + (k * kColumns + column) * 2, &half, 2);
    }
  }
};

// Blocks of a file have their scales first, too.
INLINE void pack_scales(const uint8_t* block, int64_t bytes, uint8_t* group, int64_t column) {
  for (int64_t at = 0; at < bytes; at += 2) memcpy(group + at * kColumns + column * 2, block + at, 2);
}

// Weights of 4 bits: a word has eight of one output.
template <bool Least> struct Nibbles {
  static constexpr int64_t kInputs = 32, kHead = Least ? 4 : 2, kWords = 4, kWordBytes = 4;
  static constexpr Rest kRest = LANES == 16 ? kByFirst : kBefore;
  struct Scale { vf d, m; };
  typedef vi Word;
  INLINE Scale scale(const uint8_t* group, int n) {
    const half_t* d = (const half_t*)group + n * LANES;
    return {load(d), Least ? load(d + kColumns) : vf{}};
  }
  INLINE Word word(const uint8_t* p) { return (vi)load((const float*)p); }
  INLINE vf weight(Word w, int i, const Scale& s) {
    const vf q = __builtin_convertvector(Least ? (vi)((vu)w >> (4 * i)) & 15 : w << (28 - 4 * i) >> 28, vf);
    return Least ? s.d * q + s.m : s.d * q;
  }
  // Without a least value a number is q - 8, here in two's complement.
  static void pack(const float*, const uint8_t* blocks, int64_t inputs, uint8_t* panel, int64_t column) {
    constexpr int64_t kBytes = kHead + 16;
    for (int64_t b = 0; b < inputs / kInputs; ++b, blocks += kBytes, panel += kBytes * kColumns) {
      pack_scales(blocks, kHead, panel, column);
      const uint8_t* packed = blocks + kHead;  // byte i: weight i in its low bits, weight i + 16 in its high ones
      for (int64_t word = 0; word < kWords; ++word) {
        uint32_t bits = 0;
        for (int64_t i = 0; i < 8; ++i) {
          const uint32_t byte = packed[word % 2 * 8 + i];
          bits |= (word < 2 ? byte & 15 : byte >> 4) << (4 * i);
        }
        if (!Least) bits ^= 0x88888888u;
        memcpy(panel + (kHead + word * 4) * kColumns + column * 4, &bits, 4);
      }
    }
  }
};

struct Bytes {
  static constexpr int64_t kInputs = 32, kHead = 2, kWords = 32, kWordBytes = 1;
  static constexpr Rest kRest = kByFirst;
  struct Scale { vf d; };
  typedef vf Word;
  INLINE Scale scale(const uint8_t* group, int n) { return {load((const half_t*)group + n * LANES)}; }
  INLINE Word word(const uint8_t* p) { return load((const int8_t*)p); }
  INLINE vf weight(Word w, int, const Scale& s) { return s.d * w; }
  static void pack(const float*, const uint8_t* blocks, int64_t inputs, uint8_t* panel, int64_t column) {
    constexpr int64_t kBytes = kHead + 32;
    for (int64_t b = 0; b < inputs / kInputs; ++b, blocks += kBytes, panel += kBytes * kColumns) {
      pack_scales(blocks, kHead, panel, column);
      for (int64_t i = 0; i < 32; ++i) panel[(kHead + i) * kColumns + column] = blocks[kHead + i];
    }
  }
};

template <class F> constexpr int64_t kGroupBytes = (F::kHead + F::kWords * F::kWordBytes) * kColumns;
template <class F> constexpr int64_t kGroupLines = (kGroupBytes<F> + 63) / 64;  // of the cache
template <class F> INLINE int64_t panel_bytes(int64_t inputs) {
  return (inputs + F::kInputs - 1) / F::kInputs * kGroupBytes<F>;
}

// Calls body(i, weights of input i) for each of the first `count` inputs of a group.
template <class F, int P, class Body>
INLINE void each_input(const uint8_t* group, int64_t stride, int64_t count, Body&& body) {
  constexpr int kAll = P * kVectors;
  constexpr int kPer = F::kInputs / F::kWords;
  typename F::Scale scales[kAll];
#pragma GCC unroll 8
  for (int n = 0; n < kAll; ++n) scales[n] = F::scale(group + n / kVectors * stride, n % kVectors);
  for (int64_t word = 0; word < F::kWords; ++word) {
    typename F::Word words[kAll];
#pragma GCC unroll 8
    for (int n = 0; n < kAll; ++n)
      words[n] = F::word(group + n / kVectors * stride + F::kHead * kColumns +
                         (word * kColumns + n % kVectors * LANES) * F::kWordBytes);
#pragma GCC unroll 8
    for (int i = 0; i < kPer; ++i) {
      if (word * kPer + i >= count) return;
      vf weights[kAll];
#pragma GCC unroll 8
      for (int n = 0; n < kAll; ++n) weights[n] = F::weight(words[n], i, scales[n]);
      body(word * kPer + i, weights);
    }
  }
}

struct Product {
  const float* x;
  int64_t x_stride, outputs, inputs;
  const float *bias, *added;
  float* out;
};

// The products of M rows and P panels for `count` inputs from `first` on. Sums go on from those in `out` but for the
// first of the inputs. kept: where a panel's weights are left as [count, kColumns] float32, or null.
template <class F, int P, bool Keep, int M>
void tile(const Product& p, const uint8_t* panel, int64_t stride, int64_t column, int64_t row, int64_t first,
          int64_t count, Ahead next, float* kept) {
  constexpr int kAll = P * kVectors;
  const float* x = p.x + row * p.x_stride + first;
  vf sums[M][kAll];
  for (int n = 0; n < kAll; ++n)
    for (int m = 0; m < M; ++m) {
      const float* start = first ? p.out + (row + m) * p.outputs : p.bias;
      sums[m][n] = start ? load_part(start, column, p.outputs, n) : vf{};
    }
  auto add = [&](int64_t k, const vf* weights) __attribute__((always_inline)) {
    if (Keep)
#pragma GCC unroll 4
      for (int n = 0; n < kVectors; ++n) store(kept + k * kColumns + n * LANES, weights[n]);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      const vf factor = splat(x[m * p.x_stride + k]);
#pragma GCC unroll 8
      for (int n = 0; n < kAll; ++n) sums[m][n] += factor * weights[n];
    }
  };
  const int64_t turn = P > 1 ? (stride - kAhead) / kGroupBytes<F> * F::kInputs : 0;
  int64_t k = 0;
  for (; k + F::kInputs <= count; k += F::kInputs, panel += kGroupBytes<F>) {
    // Behind the end of panels side by side come those that are computed next, one beyond the other.
    const uint8_t* ahead = panel + kAhead + (P > 1 && k >= turn ? (P - 1) * stride : 0);
    for (int side = 0; side < P; ++side, ahead += stride)
#pragma GCC unroll 20
      for (int64_t i = 0; i < kGroupLines<F>; ++i) {
        __builtin_prefetch(ahead + i * 64);
        if (P == 1) __builtin_prefetch(next.at, 0, 2), next.at += next.step;
      }
    each_input<F, P>(panel, stride, F::kInputs, [&](int64_t i, const vf* weights) __attribute__((always_inline)) {
      add(k + i, weights);
    });
  }
  if (F::kInputs == 2 && k < count)
    each_input<F, P>(panel, stride, 1, [&](int64_t i, const vf* weights) __attribute__((always_inline)) {
      add(k + i, weights);
    });
  const bool is_last = first + count == p.inputs;
  for (int n = 0; n < kAll; ++n)
    for (int m = 0; m < M; ++m) {
      const int64_t at = (row + m) * p.outputs;
      const vf sum = is_last && p.added ? sums[m][n] + load_part(p.added + at, column, p.outputs, n) : sums[m][n];
      store_part(p.out + at, column, p.outputs, n, sum);
    }
}

typedef void (*tile_fn)(const Product&, const uint8_t*, int64_t, int64_t, int64_t, int64_t, int64_t, Ahead,
                        float*);
template <class F, int P, bool Keep, int N, int... M> struct Tiles : Tiles<F, P, Keep, N - 1, N, M...> {};
template <class F, int P, bool Keep, int... M> struct Tiles<F, P, Keep, 0, M...> {
  static constexpr tile_fn of[] = {tile<F, P, Keep, M>...};
};

// `count` inputs of a panel as [count, kColumns] float32.
template <class F> void widen(const uint8_t* panel, int64_t count, float* to) {
  for (int64_t k = 0; k < count; k += F::kInputs, panel += kGroupBytes<F>)
    each_input<F, 1>(panel, 0, count - k, [&](int64_t i, const vf* weights) __attribute__((always_inline)) {
#pragma GCC unroll 4
      for (int n = 0; n < kVectors; ++n) store(to + (k + i) * kColumns + n * LANES, weights[n]);
    });
}

// Rows whose sums fit beside those of kSide panels.
template <class F> void side_by_side(const Product& p, const uint8_t* packed, int64_t rows, int threads) {
  const int64_t panels = (p.outputs + kColumns - 1) / kColumns, bytes = panel_bytes<F>(p.inputs);
  const int64_t sets = (panels + kSide - 1) / kSide;
  const int64_t group = panels_at_a_time(sets, threads);
  for_each(threads, (sets + group - 1) / group, [&](int64_t item, int) {
    const int64_t end = (item + 1) * group < sets ? (item + 1) * group : sets;
    for (int64_t set = item * group; set < end; ++set) {
      const int64_t panel = set * kSide;
      const bool are_all = panel + kSide <= panels;  // else one is left
      const tile_fn run = are_all ? Tiles<F, kSide, false, kSideRows>::of[rows - 1]
                                  : Tiles<F, 1, false, kHeight>::of[rows - 1];
      run(p, packed + panel * bytes, bytes, panel * kColumns, 0, 0, p.inputs, {(const char*)packed, 0}, nullptr);
    }
  });
}

// Any number of rows, in registers alone.
template <class F> void in_registers(const Product& p, const uint8_t* packed, int64_t rows, int threads) {
  const int64_t bytes = panel_bytes<F>(p.inputs), steps = bytes / kGroupBytes<F> * kGroupLines<F>;
  for_each_tile<kHeight>(threads, rows, p.outputs, p.inputs, p.inputs * sizeof(float), packed, bytes, steps,
                         [&](int64_t height, int64_t panel, int64_t row, Ahead ahead) {
                           fetch_outputs(p.out, p.added, p.outputs, row, height, panel);
                           Tiles<F, 1, false, kHeight>::of[height - 1](p, packed + panel * bytes, 0, panel * kColumns, row,
                                                                       0, p.inputs, ahead, nullptr);
                         });
}

// More rows than registers hold sums for.
template <class F> void in_cache(const Product& p, const uint8_t* packed, int64_t rows, int threads) {
  const int64_t block_rows = rows_in_cache<kHeight>(p.inputs * sizeof(float), 2 * kHeight);
  const int64_t blocks = (rows + block_rows - 1) / block_rows;
  const int64_t panels = (p.outputs + kColumns - 1) / kColumns, bytes = panel_bytes<F>(p.inputs);
  const int64_t parts = (p.inputs + kChunk - 1) / kChunk;  // about equal, since each costs sums stored and loaded again
  const int64_t chunk = ((p.inputs + parts - 1) / parts + F::kInputs - 1) / F::kInputs * F::kInputs;
  for_each(threads, panels * blocks, [&](int64_t item, int) {
    alignas(64) float wide[kChunk * kColumns];
    const int64_t panel = item % panels;
    const RowTiles<kHeight> block(item / panels, block_rows, rows);
    for (int64_t first = 0; first < p.inputs; first += chunk) {
      const int64_t count = first + chunk < p.inputs ? chunk : p.inputs - first;
      const uint8_t* part = packed + panel * bytes + first / F::kInputs * kGroupBytes<F>;
      const int64_t size = count / F::kInputs * kGroupBytes<F>, steps = count * kGroupLines<Plain>;
      Ahead ahead{(const char*)part + size, (size + block.tiles * steps - 1) / (block.tiles * steps)};
      int64_t row = block.top;
      if (F::kRest == kBefore) {
        widen<F>(part, count, wide);
      } else {
        fetch_outputs(p.out, p.added, p.outputs, row, block.height, panel);
        Tiles<F, 1, true, kHeight>::of[block.height - 1](p, part, 0, panel * kColumns, row, first, count, {ahead.at, 0},
                                                         wide);
        row += block.height;
      }
      for (; row < block.bottom; row += block.height, ahead.at += ahead.step * steps) {
        const int64_t height = block.height_at(row);
        fetch_outputs(p.out, p.added, p.outputs, row, height, panel);
        Tiles<Plain, 1, false, kHeight>::of[height - 1](p, (const uint8_t*)wide, 0, panel * kColumns, row, first, count,
                                                        ahead, nullptr);
      }
    }
  });
}

template <class F> void multiply(const Product& p, const uint8_t* packed, int64_t rows, int threads) {
  threads = threads_that_pay(rows, p.outputs, p.inputs, threads);
  if (rows <= kSideRows && kSide > 1) return rows ? side_by_side<F>(p, packed, rows, threads) : void();
  if (rows <= kHeight || F::kRest == kAnew) return in_registers<F>(p, packed, rows, threads);
  in_cache<F>(p, packed, rows, threads);
}

// Whether the panel holds exactly the weights of outputs from `column` on, bit by bit.
template <class F>
bool is_exact(const uint8_t* panel, const float* weight, int64_t outputs, int64_t inputs, int64_t column) {
  alignas(64) float wide[kChunk * kColumns];
  const int64_t columns = outputs - column < kColumns ? outputs - column : kColumns;
  for (int64_t first = 0; first < inputs; first += kChunk) {
    const int64_t count = first + kChunk < inputs ? kChunk : inputs - first;
    widen<F>(panel + first / F::kInputs * kGroupBytes<F>, count, wide);
    uint32_t wrong = 0;
    for (int64_t c = 0; c < columns; ++c) {
      const float* row = weight + (column + c) * inputs + first;
      for (int64_t k = 0; k < count; ++k) wrong |= to_bits(row[k]) ^ to_bits(wide[k * kColumns + c]);
    }
    if (wrong) return false;
  }
  return true;
}

template <class F>
bool pack(const float* weight, const uint8_t* data, int64_t outputs, int64_t inputs, uint8_t* packed, int threads) {
  const int64_t bytes = panel_bytes<F>(inputs), row_bytes = bytes / kColumns;
  std::atomic<bool> exact{true};
  for_each(threads, (outputs + kColumns - 1) / kColumns, [&](int64_t index, int) {
    if (!exact.load(std::memory_order_relaxed)) return;
    uint8_t* panel = packed + index * bytes;
    memset(panel, 0, bytes);
    for (int64_t c = 0; c < kColumns && index * kColumns + c < outputs; ++c) {
      const int64_t output = index * kColumns + c;
      F::pack(weight + output * inputs, data + output * row_bytes, inputs, panel, c);
    }
    if (!is_exact<F>(panel, weight, outputs, inputs, index * kColumns)) exact.store(false, std::memory_order_relaxed);
  });
  return exact.load();
}

#define BY_KIND(call)                                       \
  switch (kind) {                                           \
    case kBFloat16Pairs: return call<BFloat16Pairs> ARGUMENTS; \
    case kHalves: return call<Halves> ARGUMENTS;            \
    case kQ4_0: return call<Nibbles<false>> ARGUMENTS;      \
    case kQ4_1: return call<Nibbles<true>> ARGUMENTS;       \
    case kQ8_0: return call<Bytes> ARGUMENTS;               \
  }

}  // namespace

// Bytes of packed weights.
template <class F> static int64_t packed_bytes(int64_t outputs, int64_t inputs) {
  return (outputs + kColumns - 1) / kColumns * panel_bytes<F>(inputs);
}
EXPORT int64_t pm_narrow_packed_bytes(int32_t kind, int64_t outputs, int64_t inputs) {
#define ARGUMENTS (outputs, inputs)
  BY_KIND(packed_bytes)
#undef ARGUMENTS
  return 0;
}

// weight: [outputs, inputs]. data: for kinds of blocks [outputs, inputs / 32] blocks as in the file, of whole blocks.
// Returns 1 if what was packed is `weight`, bit by bit, and 0 otherwise.
EXPORT int32_t pm_narrow_pack(int32_t kind, const float* weight, const uint8_t* data, int64_t outputs, int64_t inputs,
                              uint8_t* packed, int32_t threads) {
#define ARGUMENTS (weight, data, outputs, inputs, packed, threads)
  BY_KIND(pack)
#undef ARGUMENTS
  return 0;
}

// As pm_linear, bit by bit, but that added must not be out.
EXPORT void pm_narrow_linear(const float* x, int64_t x_stride, int64_t rows, int64_t outputs, int64_t inputs,
                             int32_t kind, const uint8_t* packed, const float* bias, const float* added, float* out,
                             int32_t threads) {
  const Product p{x, x_stride, outputs, inputs, bias, added, out};
#define ARGUMENTS (p, packed, rows, threads)
  BY_KIND(multiply)
#undef ARGUMENTS
}
