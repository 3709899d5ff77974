// What attention of generated tokens and that of prompts share: an item of work, where keys lie, queries and outputs.
#pragma once

#include "batch.h"

namespace {

constexpr int64_t kTile = 64;  // keys at a time

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

}  // namespace
