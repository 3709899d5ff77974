// Paged attention over blocks in place: decode rows and prefill chunks in one call, with an online softmax.
//
// A generated token reads each key and value once for all query heads that share it. Tokens of a prompt are laid
// along the lanes of vectors, so that neither keys nor values are transposed or copied: scores are keys (broadcast)
// times transposed queries, outputs are values (broadcast) times those scores.
//
// Contexts are cut at fixed positions, and the parts merged in order: what a token computes depends neither on its batch
// mates nor on the number of threads. The two ways sum in different orders, so which one is taken depends on what the
// token is, not on how many are computed with it: one that is computed again has the bits that it had.
#include <cmath>
#include <type_traits>
#include <vector>

#include "batch.h"
#include "threads.h"

namespace {

constexpr int64_t kTile = 64;           // keys at a time
constexpr int64_t kDecodeRange = 512;   // keys per item for generated tokens, a multiple of kTile
constexpr int64_t kChunkRange = 2048;   // the same for tiles of a chunk
constexpr int kWide = LANES == 16 ? 4 : LANES == 8 ? 2 : 4;  // vectors of an output that are summed at a time
constexpr int kPanel = LANES == 4 ? 4 : 2;                   // vectors of query rows in a panel
constexpr int64_t kPanelRows = kPanel * LANES;
constexpr int kKeys = LANES == 8 ? 6 : 8;                    // keys, or elements of a head, per inner product tile
constexpr int64_t kWorkPerThread = 1 << 16;  // products below which another thread does not pay

struct Attention {
  const Batch& batch;
  const void* query;
  int64_t query_stride;
  int32_t query_dtype;
  int64_t heads, layer;
  float scale, soft_cap;  // soft_cap 0: none
  int64_t window;         // 0: none
  void* out;

  int64_t group() const { return heads / batch.kv_heads; }
  int64_t seen_from(int64_t position) const { return window && position >= window ? position - window + 1 : 0; }
};

// Queries first .. first + count of the flattened tokens, kv heads head_begin .. head_end, keys key_begin .. key_end.
struct Item {
  int64_t row, first, count, position, head_begin, head_end, key_begin, key_end;
  bool single;     // a generated token, whose keys begin where its window does; else tiles mask what lies before
  float* partial;  // [count, heads, head_dim + 2] unnormalised outputs, largest score, sum; null: the only range
};

struct Merge {
  int64_t first, count, ranges;
  const float* partials;
};

// Where keys key_begin .. key_begin + count of a row are; values lie `values` elements further.
template <class C> INLINE void locate(const Attention& a, int64_t row, int64_t begin, int64_t count, const C** keys) {
  const Batch& b = a.batch;
  const int64_t* table = b.block_tables + row * b.table_width;
  const int64_t step = b.token_elements();
  int64_t block = begin / b.block_size, offset = begin % b.block_size;
  for (int64_t i = 0; i < count; ++block, offset = 0) {
    const C* key = b.keys<C>(table[block], a.layer) + offset * step;
    for (; offset < b.block_size && i < count; ++offset, ++i, key += step) keys[i] = key;
  }
}

template <class Q> void widen_query(const Q* from, float* to, int64_t count, float scale) {
  for (int64_t i = 0; i < count; ++i) to[i] = widen(from[i]) * scale;
}
void read_query(const Attention& a, int64_t token, int64_t head, int64_t count, float* to) {
  const int64_t at = token * a.query_stride + head * a.batch.head_dim;
  switch (a.query_dtype) {
    case kFloat32: return widen_query(static_cast<const float*>(a.query) + at, to, count, a.scale);
    case kFloat16: return widen_query(static_cast<const half_t*>(a.query) + at, to, count, a.scale);
    case kBFloat16: return widen_query(static_cast<const bf16_t*>(a.query) + at, to, count, a.scale);
  }
}

template <class Q> void narrow_output(const float* from, int64_t stride, Q* to, int64_t count, float factor) {
  for (int64_t i = 0; i < count; ++i) to[i] = narrow<Q>(from[i * stride] * factor);
}
void write_output(const Attention& a, int64_t token, int64_t head, const float* from, int64_t stride, float total) {
  const int64_t dim = a.batch.head_dim, at = (token * a.heads + head) * dim;
  const float factor = 1.0f / total;
  switch (a.query_dtype) {
    case kFloat32: return narrow_output(from, stride, static_cast<float*>(a.out) + at, dim, factor);
    case kFloat16: return narrow_output(from, stride, static_cast<half_t*>(a.out) + at, dim, factor);
    case kBFloat16: return narrow_output(from, stride, static_cast<bf16_t*>(a.out) + at, dim, factor);
  }
}

void finish(const Attention& a, const Item& item, int64_t token, int64_t head, const float* output, int64_t stride,
            float most, float total) {
  const int64_t dim = a.batch.head_dim;
  if (!item.partial) return write_output(a, token, head, output, stride, total);
  float* to = item.partial + ((token - item.first) * a.heads + head) * (dim + 2);
  for (int64_t i = 0; i < dim; ++i) to[i] = output[i * stride];
  to[dim] = most;
  to[dim + 1] = total;
}

INLINE vf capped(vf scores, float soft_cap) {
  return soft_cap == 0 ? scores : soft_cap * tangent(scores / soft_cap);
}

// ---------------------------------------------------------------- one token

template <class C> INLINE void prefetch(const C* p, int64_t count) {
  for (int64_t i = 0; i < count; i += 64 / sizeof(C)) __builtin_prefetch(p + i, 0, 2);
}

// Keys of the tile that this thread computes next. They are fetched while this one is computed, equally many for each of
// its keys: the blocks of a sequence lie anywhere in memory.
template <class C> struct Ahead {
  const C* keys[kTile];
  int64_t count, each;

  void fetch(int64_t t, int64_t at, int64_t elements) const {
    const int64_t end = (t + 1) * each < count ? (t + 1) * each : count;
    for (int64_t i = t * each; i < end; ++i) prefetch(keys[i] + at, elements);
  }
};

// scores[m][t] = query m times key t, for M query heads of one key head. Lanes beyond count hold minus infinity. D: the
// head's size, where it is known, so that queries stay in registers.
template <int M, int D, class C>
INLINE void decode_scores(const float* query, int64_t size, const C* const* keys, const Ahead<C>& ahead, int64_t at,
                          int64_t count, float* scores) {
  const int64_t dim = D ? D : size;
  for (int64_t first = 0; first < count; first += LANES) {
    const int64_t n = count - first < LANES ? count - first : LANES;
    vf products[M][LANES];
    for (int64_t t = 0; t < n; ++t) {
      const C* key = keys[first + t] + at;
      ahead.fetch(first + t, at, dim);
      vf sums[M] = {};
#pragma GCC unroll 4
      for (int64_t d = 0; d < dim; d += LANES) {
        const vf k = load(key + d);
        for (int m = 0; m < M; ++m) sums[m] += load(query + m * dim + d) * k;
      }
      const float unit = unit_of(key, dim);
      for (int m = 0; m < M; ++m) products[m][t] = sums[m] * unit;
    }
    for (int m = 0; m < M; ++m) {
      for (int64_t t = n; t < LANES; ++t) products[m][t] = splat(-kInfinity);
      store(scores + m * kTile + first, sum_rows(products[m]));
    }
  }
}

// output[m] = output[m] * factors[m] + sum over t of weights[m][t] * value t, for the N vectors of the output from `from`
// on.
template <int M, int N, class C>
INLINE void decode_values(const float* weights, const float* factors, const C* const* keys, const Ahead<C>& ahead,
                          int64_t at, int64_t from, int64_t count, int64_t dim, float* output) {
  output += from;
  vf sums[M][N];
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < N; ++n) sums[m][n] = load(output + m * dim + n * LANES) * factors[m];
  for (int64_t t = 0; t < count; ++t) {
    const C* value = keys[t] + at + from;
    ahead.fetch(t, at + from, N * LANES);
    const float unit = unit_of(keys[t] + at, dim);
    vf v[N];
    for (int n = 0; n < N; ++n) v[n] = load(value + n * LANES);
    for (int m = 0; m < M; ++m) {
      const vf weight = splat(weights[m * kTile + t] * unit);
      for (int n = 0; n < N; ++n) sums[m][n] += weight * v[n];
    }
  }
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < N; ++n) store(output + m * dim + n * LANES, sums[m][n]);
}

template <int M, class C>
void decode_heads(const Attention& a, const float* query, const C* const* keys, const Ahead<C>& ahead, int64_t at,
                  int64_t values, int64_t count, float* output, float* most, float* total) {
  const int64_t dim = a.batch.head_dim;
  alignas(64) float scores[M * kTile];
  float factors[M];
  if (dim == 64) decode_scores<M, 64>(query, dim, keys, ahead, at, count, scores);
  else decode_scores<M, 0>(query, dim, keys, ahead, at, count, scores);
  const int64_t padded = (count + LANES - 1) / LANES * LANES;
  for (int m = 0; m < M; ++m) {
    float* row = scores + m * kTile;
    vf peak = splat(-kInfinity);
    for (int64_t t = 0; t < padded; t += LANES) {
      vf s = load(row + t);
      if (a.soft_cap != 0) {
        const vf c = capped(s, a.soft_cap);
        s = s == -kInfinity ? s : c;
        store(row + t, s);
      }
      peak = larger(s, peak);
    }
    const float before = most[m], now = std::fmax(before, largest(peak));
    const float shift = now == -kInfinity ? 0.0f : now;
    vf sums = {};
    for (int64_t t = 0; t < padded; t += LANES) {
      const vf weight = exponential(load(row + t) - shift);
      sums += weight;
      store(row + t, weight);
    }
    factors[m] = before == -kInfinity ? 0.0f : std::exp(before - shift);
    total[m] = total[m] * factors[m] + sum(sums);
    most[m] = now;
  }
  int64_t d = 0;
  for (; d + kWide * LANES <= dim; d += kWide * LANES)
    decode_values<M, kWide>(scores, factors, keys, ahead, at + values, d, count, dim, output);
  for (; d < dim; d += LANES)
    decode_values<M, 1>(scores, factors, keys, ahead, at + values, d, count, dim, output);
}

template <class C> void decode(const Attention& a, const Item& item, const Item* following, float* scratch) {
  const int64_t dim = a.batch.head_dim, group = a.group(), heads = (item.head_end - item.head_begin) * group;
  const int64_t first_head = item.head_begin * group, values = a.batch.block_elements();
  float *query = scratch, *output = query + heads * dim, *most = output + heads * dim, *total = most + heads;
  read_query(a, item.first, first_head, heads * dim, query);
  memset(output, 0, heads * dim * sizeof(float));
  for (int64_t i = 0; i < heads; ++i) most[i] = -kInfinity, total[i] = 0;
  Ahead<C> tiles[2];
  // Cut at the same positions whatever the window.
  auto length = [&](int64_t begin) {
    const int64_t whole = kTile - begin % kTile, left = item.key_end - begin;
    return whole < left ? whole : left;
  };
  int64_t next_count = length(item.key_begin);
  locate(a, item.row, item.key_begin, next_count, tiles[0].keys);
  int now = 0;
  for (int64_t begin = item.key_begin; begin < item.key_end; now ^= 1) {
    const int64_t count = next_count;
    const C** keys = tiles[now].keys;
    Ahead<C>& ahead = tiles[now ^ 1];
    next_count = length(begin + count);
    ahead.count = next_count;
    if (next_count) {
      locate(a, item.row, begin + count, next_count, ahead.keys);
    } else if (following) {
      const int64_t whole = kTile - following->key_begin % kTile, left = following->key_end - following->key_begin;
      ahead.count = whole < left ? whole : left;
      locate(a, following->row, following->key_begin, ahead.count, ahead.keys);
    }
    ahead.each = (ahead.count + count - 1) / count;
    for (int64_t i = 0; i < heads;) {
      const int64_t at = (item.head_begin + i / group) * a.batch.entry();
      const int64_t left = group - i % group;
      float *q = query + i * dim, *o = output + i * dim;
      if (left >= 4) decode_heads<4>(a, q, keys, ahead, at, values, count, o, most + i, total + i), i += 4;
      else if (left == 3) decode_heads<3>(a, q, keys, ahead, at, values, count, o, most + i, total + i), i += 3;
      else if (left == 2) decode_heads<2>(a, q, keys, ahead, at, values, count, o, most + i, total + i), i += 2;
      else decode_heads<1>(a, q, keys, ahead, at, values, count, o, most + i, total + i), i += 1;
    }
    begin += count;
  }
  for (int64_t i = 0; i < heads; ++i)
    finish(a, item, item.first, first_head + i, output + i * dim, 1, most[i], total[i]);
}

// ---------------------------------------------------------------- chunks

// scores[t][rows] = key t times the panel's queries, for K keys.
template <int K, int N, class C>
INLINE void panel_scores(const float* query, int64_t dim, const C* const* keys, int64_t at, float* scores) {
  vf sums[K][N] = {};
  for (int64_t d = 0; d < dim; ++d) {
    vf q[N];
    for (int n = 0; n < N; ++n) q[n] = load(query + (d * N + n) * LANES);
    for (int k = 0; k < K; ++k) {
      const vf x = splat(widen(keys[k][at + d]));
      for (int n = 0; n < N; ++n) sums[k][n] += x * q[n];
    }
  }
  for (int k = 0; k < K; ++k)
    for (int n = 0; n < N; ++n) store(scores + (k * N + n) * LANES, sums[k][n]);
}

// output[d][rows] = output[d][rows] * factor[rows] + sum over t of value t [d] * weights[t][rows], for K elements d.
template <int K, int N, class C>
INLINE void panel_values(const float* weights, const vf* factors, const C* const* keys, int64_t at, int64_t count,
                         float* output) {
  vf sums[K][N];
  for (int k = 0; k < K; ++k)
    for (int n = 0; n < N; ++n) sums[k][n] = load(output + (k * N + n) * LANES) * factors[n];
  for (int64_t t = 0; t < count; ++t) {
    vf w[N];
    for (int n = 0; n < N; ++n) w[n] = load(weights + (t * N + n) * LANES);
    for (int k = 0; k < K; ++k) {
      const vf x = splat(widen(keys[t][at + k]));
      for (int n = 0; n < N; ++n) sums[k][n] += x * w[n];
    }
  }
  for (int k = 0; k < K; ++k)
    for (int n = 0; n < N; ++n) store(output + (k * N + n) * LANES, sums[k][n]);
}

template <class C> INLINE const float* widen_entry(const C* entry, int64_t dim, float* to) {
  const float unit = unit_of(entry, dim);
  for (int64_t d = 0; d < dim; d += LANES) store(to + d, load(entry + d) * unit);
  return to;
}

// A panel of N * LANES query rows (tokens by heads of one group; row i is token i / group, head i % group).
template <int N, class C> void panel(const Attention& a, const Item& item, int64_t head, int64_t row0, float* scratch) {
  const int64_t dim = a.batch.head_dim, group = a.group(), width = N * LANES;
  const int64_t values = a.batch.block_elements(), at = head * a.batch.entry();
  const int64_t rows = item.count * group - row0 < width ? item.count * group - row0 : width;
  float *query = scratch, *output = query + width * dim, *scores = output + width * dim, *line = scores + width * kTile;
  float* wide = line + dim;  // keys and values of a tile in float32, where the cache has 8 bits
  alignas(64) int32_t last[N * LANES], first[N * LANES];  // which keys each row sees, relative to the panel's base
  const int64_t base = item.key_begin;
  memset(output, 0, width * dim * sizeof(float));
  for (int64_t i = 0; i < width; ++i) {
    const int64_t r = i < rows ? row0 + i : row0 + rows - 1;  // padding repeats the last row
    read_query(a, item.first + r / group, head * group + r % group, dim, line);
    for (int64_t d = 0; d < dim; ++d) query[d * width + i] = line[d];
    const int64_t position = item.position + r / group;
    last[i] = (int32_t)(position - base);
    const int64_t from = a.seen_from(position) - base;
    first[i] = from > 0 ? (int32_t)from : 0;
  }
  vi last_v[N], first_v[N];
  memcpy(last_v, last, sizeof last_v);
  memcpy(first_v, first, sizeof first_v);
  vf most[N], total[N];
  for (int n = 0; n < N; ++n) most[n] = splat(-kInfinity), total[n] = splat(0);
  const int64_t end = base + last[width - 1] + 1 < item.key_end ? base + last[width - 1] + 1 : item.key_end;
  const int64_t begin = base + first[0] / kTile * kTile;  // base is a multiple of kTile
  const C* keys[kTile];
  for (int64_t tile = begin; tile < end; tile += kTile) {
    const int64_t count = end - tile < kTile ? end - tile : kTile;
    const int32_t offset = (int32_t)(tile - base);
    locate(a, item.row, tile, count, keys);
    typedef typename std::conditional<sizeof(C) == 1, float, C>::type K;
    const K *k[kTile], *v[kTile];  // of this head
    for (int64_t i = 0; i < count; ++i) {
      if constexpr (sizeof(C) == 1) {
        k[i] = widen_entry(keys[i] + at, dim, wide + i * dim);
        v[i] = widen_entry(keys[i] + at + values, dim, wide + (kTile + i) * dim);
      } else {
        k[i] = keys[i] + at;
        v[i] = k[i] + values;
      }
    }
    int64_t t = 0;
    for (; t + kKeys <= count; t += kKeys) panel_scores<kKeys, N>(query, dim, k + t, 0, scores + t * width);
    for (; t < count; ++t) panel_scores<1, N>(query, dim, k + t, 0, scores + t * width);
    const bool masked = offset + count - 1 > last[0] || offset < first[width - 1];
    vf peak[N], factors[N], shift[N];
    for (int n = 0; n < N; ++n) peak[n] = most[n];
    for (t = 0; t < count; ++t)
      for (int n = 0; n < N; ++n) {
        float* p = scores + (t * N + n) * LANES;
        vf s = capped(load(p), a.soft_cap);
        if (masked) {
          const vi key = (vi){} + (offset + (int32_t)t);
          s = ((key > last_v[n]) | (key < first_v[n])) ? splat(-kInfinity) : s;
        }
        if (masked || a.soft_cap != 0) store(p, s);
        peak[n] = larger(s, peak[n]);
      }
    for (int n = 0; n < N; ++n) {
      shift[n] = peak[n] == -kInfinity ? splat(0) : peak[n];
      factors[n] = exponential(most[n] - shift[n]);
      total[n] *= factors[n];
      most[n] = peak[n];
    }
    for (t = 0; t < count; ++t)
      for (int n = 0; n < N; ++n) {
        float* p = scores + (t * N + n) * LANES;
        const vf weight = exponential(load(p) - shift[n]);
        total[n] += weight;
        store(p, weight);
      }
    int64_t d = 0;
    for (; d + kKeys <= dim; d += kKeys)
      panel_values<kKeys, N>(scores, factors, v, d, count, output + d * width);
    for (; d < dim; ++d) panel_values<1, N>(scores, factors, v, d, count, output + d * width);
  }
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t r = row0 + i;
    finish(a, item, item.first + r / group, head * group + r % group, output + i, width, most[i / LANES][i % LANES],
           total[i / LANES][i % LANES]);
  }
}

template <class C> void chunk(const Attention& a, const Item& item, float* scratch) {
  const int64_t rows = item.count * a.group();
  for (int64_t head = item.head_begin; head < item.head_end; ++head)
    for (int64_t row = 0; row < rows; row += kPanelRows) {
      if (rows - row <= LANES) panel<1, C>(a, item, head, row, scratch);
      else panel<kPanel, C>(a, item, head, row, scratch);
    }
}

// ---------------------------------------------------------------- all rows

template <class C> void attend(const Attention& a, const Item& item, const Item* following, float* scratch) {
  item.single ? decode<C>(a, item, following, scratch) : chunk<C>(a, item, scratch);
}

// following: what this thread computes next; null for none.
void run(const Attention& a, const Item& item, const Item* following, float* scratch) {
  switch (a.batch.cache_dtype) {
    case kFloat32: return attend<float>(a, item, following, scratch);
    case kFloat16: return attend<half_t>(a, item, following, scratch);
    case kBFloat16: return attend<bf16_t>(a, item, following, scratch);
    case kInt8: return attend<int8_t>(a, item, following, scratch);
    case kFloat8: return attend<fp8_t>(a, item, following, scratch);
  }
}

void merge(const Attention& a, const Merge& m, float* scratch) {
  const int64_t dim = a.batch.head_dim, each = dim + 2, range = m.count * a.heads * each;
  for (int64_t token = 0; token < m.count; ++token)
    for (int64_t head = 0; head < a.heads; ++head) {
      const float* part = m.partials + (token * a.heads + head) * each;
      float most = -kInfinity, total = 0;
      for (int64_t r = 0; r < m.ranges; ++r) most = std::fmax(most, part[r * range + dim]);
      memset(scratch, 0, dim * sizeof(float));
      for (int64_t r = 0; r < m.ranges; ++r) {
        const float* p = part + r * range;
        const float factor = p[dim] == -kInfinity && p[dim + 1] == 0 ? 0.0f : std::exp(p[dim] - most);
        total += factor * p[dim + 1];
        for (int64_t d = 0; d < dim; ++d) scratch[d] += factor * p[d];
      }
      write_output(a, m.first + token, head, scratch, 1, total);
    }
}

// How many of the row's tokens, the first ones, are computed as a chunk.
int64_t in_chunk(const Batch& b, int64_t row) {
  const int64_t count = b.query_starts[row + 1] - b.query_starts[row];
  if (!b.generated_from) return count == 1 ? 0 : count;
  const int64_t prompt = b.generated_from[row] - (b.context_lens[row] - count);
  return prompt < 0 ? 0 : prompt < count ? prompt : count;
}

struct Workspace {
  std::vector<Item> items;
  std::vector<Merge> merges;
  std::vector<float> partials, scratch;
};

}  // namespace

EXPORT void* pm_workspace_new() { return new Workspace; }
EXPORT void pm_workspace_free(void* workspace) { delete static_cast<Workspace*>(workspace); }

// query: [tokens, heads, head_dim], tokens query_stride elements apart. out: [tokens, heads, head_dim]. window and
// soft_cap: 0 for none.
EXPORT void pm_attention(void* workspace, const Batch* batch, const void* query, int64_t query_stride, int32_t dtype,
                         int64_t heads, int64_t layer, float scale, int64_t window, float soft_cap, void* out) {
  auto& w = *static_cast<Workspace*>(workspace);
  const Batch& b = *batch;
  const Attention a{b, query, query_stride, dtype, heads, layer, scale, soft_cap, window, out};
  const int64_t tile_tokens = a.group() >= 2 * kPanelRows ? 1 : 2 * kPanelRows / a.group();
  // One thread reads a block's keys of all heads, unless that leaves others without work.
  int64_t units = 0, work = 0;
  for (int64_t row = 0; row < b.rows; ++row) {
    const int64_t count = b.query_starts[row + 1] - b.query_starts[row];
    units += (count - in_chunk(b, row)) * ((b.context_lens[row] + kDecodeRange - 1) / kDecodeRange);
    work += count * b.context_lens[row] * heads * b.head_dim;
  }
  const int threads = work >= 2 * kWorkPerThread ? b.threads : 1;
  const int64_t decode_heads = threads > 1 && units < 4 * threads ? 1 : b.kv_heads;
  w.items.clear();
  w.merges.clear();
  int64_t partials = 0;
  // The first pass finds the room for partial results, the second fills in where they lie. Long items go first.
  for (int pass = 0; pass < 2; ++pass) {
    if (pass) w.partials.resize(partials), partials = 0;
    for (int64_t row = b.rows - 1; row >= 0; --row) {
      const int64_t begin = b.query_starts[row], count = b.query_starts[row + 1] - begin;
      const int64_t past = b.context_lens[row] - count, chunked = in_chunk(b, row);
      for (int64_t first = 0, n; first < count; first += n) {
        const bool single = first >= chunked;
        n = single ? 1 : chunked - first < tile_tokens ? chunked - first : tile_tokens;
        const int64_t range = single ? kDecodeRange : kChunkRange, step_heads = single ? decode_heads : 1;
        const int64_t low = a.seen_from(past + first), high = past + first + n;
        const int64_t from = low / range, ranges = (high + range - 1) / range - from;
        const int64_t size = n * heads * (b.head_dim + 2);
        if (pass) {
          for (int64_t r = 0; r < ranges; ++r) {
            const int64_t start = (from + r) * range;
            const int64_t key_begin = start > low ? start : single ? low : low / kTile * kTile;
            const int64_t key_end = start + range < high ? start + range : high;
            float* partial = ranges > 1 ? w.partials.data() + partials + r * size : nullptr;
            for (int64_t head = 0; head < b.kv_heads; head += step_heads)
              w.items.push_back({row, begin + first, n, past + first, head, head + step_heads, key_begin, key_end,
                                 single, partial});
          }
          if (ranges > 1) w.merges.push_back({begin + first, n, ranges, w.partials.data() + partials});
        }
        partials += ranges > 1 ? ranges * size : 0;
      }
    }
  }
  const int64_t decode_scratch = heads * (2 * b.head_dim + 2);
  const int64_t wide = b.entry() != b.head_dim ? 2 * kTile * b.head_dim : 0;
  const int64_t panel_scratch = kPanelRows * (2 * b.head_dim + kTile) + b.head_dim + wide;
  const int64_t scratch = ((decode_scratch > panel_scratch ? decode_scratch : panel_scratch) + 63) / 64 * 64;
  w.scratch.resize(scratch * threads);
  for_each_ahead(threads, (int64_t)w.items.size(), [&](int64_t i, int64_t following, int thread) {
    run(a, w.items[i], following < 0 ? nullptr : &w.items[following], w.scratch.data() + thread * scratch);
  });
  for (const Merge& m : w.merges) merge(a, m, w.scratch.data());
}
