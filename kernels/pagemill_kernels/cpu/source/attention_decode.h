// Attention of one generated token: each key and value is read once for all query heads that share it.
#pragma once

#include <cmath>

#include "attention.h"

namespace {

constexpr int kWide = LANES == 16 ? 4 : LANES == 8 ? 2 : 4;  // vectors of an output that are summed at a time

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

}  // namespace
