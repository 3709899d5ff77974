// Attention of tokens of a prompt, laid along the lanes of vectors: neither keys nor values are transposed or copied.
#pragma once

#include <type_traits>

#include "attention.h"

namespace {

constexpr int kPanel = LANES == 4 ? 4 : 2;                   // vectors of query rows in a panel
constexpr int64_t kPanelRows = kPanel * LANES;
constexpr int kKeys = LANES == 8 ? 6 : 8;                    // keys, or elements of a head, per inner product tile

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

}  // namespace
