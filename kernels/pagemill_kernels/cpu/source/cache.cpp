// Rotary embedding fused with the write into the cache, and copies of whole blocks.
#include "batch.h"
#include "quantise.h"
#include "threads.h"

namespace {

constexpr int64_t kElementsPerThread = 1 << 15;  // fewer are done sooner than another thread wakes

template <class Q> INLINE void rotate(Q* x, const Q* cosines, const Q* sines, int64_t half) {
  int64_t i = 0;
  for (; i + LANES <= half; i += LANES) {
    vf low = load(x + i), high = load(x + i + half);
    store(x + i, low * load(cosines + i) + high * load(sines + i));
    store(x + i + half, high * load(cosines + i + half) + low * load(sines + i + half));
  }
  for (; i < half; ++i) {
    float low = widen(x[i]), high = widen(x[i + half]);
    x[i] = narrow<Q>(low * widen(cosines[i]) + high * widen(sines[i]));
    x[i + half] = narrow<Q>(high * widen(cosines[i + half]) + low * widen(sines[i + half]));
  }
}

template <class Q, class C> INLINE void put(const Q* from, C* to, int64_t count) {
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) store(to + i, load(from + i));
  for (; i < count; ++i) to[i] = narrow<C>(widen(from[i]));
}
template <class Q> INLINE void put(const Q* from, Q* to, int64_t count) { memcpy(to, from, count * sizeof(Q)); }
INLINE void put8(const float* from, int8_t* to, int64_t count) {
  typedef int8_t vb __attribute__((vector_size(LANES)));
  typedef int8_t vb_loose __attribute__((vector_size(LANES), aligned(1), may_alias));
  const float scale = scale_of(from, count), inverse = inverse_of(scale);
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES)
    *(vb_loose*)(to + i) = __builtin_convertvector(quantised(load(from + i), inverse), vb);
  for (; i < count; ++i) to[i] = (int8_t)quantised(from[i], inverse);
  memcpy(to + count, &scale, sizeof scale);
}
INLINE void put8(const float* from, fp8_t* to, int64_t count) {
  typedef uint8_t vb __attribute__((vector_size(LANES)));
  typedef uint8_t vb_loose __attribute__((vector_size(LANES), aligned(1), may_alias));
  const float scale = scale_of(from, count, 448.0f), inverse = inverse_of(scale);
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES)
    *(vb_loose*)(to + i) = __builtin_convertvector(float8(load(from + i), inverse), vb);
  for (; i < count; ++i) to[i].bits = float8(from[i], inverse);
  memcpy(to + count, &scale, sizeof scale);
}

// Keys or values of all heads of a token.
template <class Q, class C> INLINE void put_heads(const Q* from, C* to, int64_t heads, int64_t dim) {
  put(from, to, heads * dim);
}
template <class Q, class C> INLINE void put_heads8(const Q* from, C* to, int64_t heads, int64_t dim) {
  constexpr int64_t kMost = 512;
  float wide[kMost];
  for (int64_t head = 0; head < heads; ++head, from += dim, to += dim + sizeof(float)) {
    put(from, wide, dim);
    put8(wide, to, dim);
  }
}
template <class Q> INLINE void put_heads(const Q* from, int8_t* to, int64_t heads, int64_t dim) {
  put_heads8(from, to, heads, dim);
}
template <class Q> INLINE void put_heads(const Q* from, fp8_t* to, int64_t heads, int64_t dim) {
  put_heads8(from, to, heads, dim);
}

template <class Q, class C>
void rotate_and_write(const Batch& b, Q* qkv, int64_t heads, const Q* cosines, const Q* sines, int64_t rotary_dim,
                      int64_t layer) {
  const int64_t dim = b.head_dim, row = heads * dim, kv = b.kv_heads * dim;
  auto token = [&](int64_t t, int) {
    Q* x = qkv + t * row;
    if (rotary_dim)
      for (int64_t head = 0; head < heads - b.kv_heads; ++head)
        rotate(x + head * dim, cosines + t * rotary_dim, sines + t * rotary_dim, rotary_dim / 2);
    const int64_t slot = b.slots[t];
    C* keys = b.keys<C>(slot / b.block_size, layer) + slot % b.block_size * b.token_elements();
    put_heads(x + row - 2 * kv, keys, b.kv_heads, dim);
    put_heads(x + row - kv, keys + b.block_elements(), b.kv_heads, dim);
  };
  const int64_t tokens = b.query_starts[b.rows];
  if (tokens * row < kElementsPerThread * 2) {
    for (int64_t t = 0; t < tokens; ++t) token(t, 0);
  } else {
    for_each(b.threads, tokens, token);
  }
}

template <class Q>
void by_cache(const Batch& b, void* qkv, int64_t heads, const void* cosines, const void* sines, int64_t rotary_dim,
              int64_t layer) {
  auto x = static_cast<Q*>(qkv);
  auto c = static_cast<const Q*>(cosines), s = static_cast<const Q*>(sines);
  switch (b.cache_dtype) {
    case kFloat32: return rotate_and_write<Q, float>(b, x, heads, c, s, rotary_dim, layer);
    case kFloat16: return rotate_and_write<Q, half_t>(b, x, heads, c, s, rotary_dim, layer);
    case kBFloat16: return rotate_and_write<Q, bf16_t>(b, x, heads, c, s, rotary_dim, layer);
    case kInt8: return rotate_and_write<Q, int8_t>(b, x, heads, c, s, rotary_dim, layer);
    case kFloat8: return rotate_and_write<Q, fp8_t>(b, x, heads, c, s, rotary_dim, layer);
  }
}

}  // namespace

EXPORT void pm_rotate_and_write(const Batch* batch, void* qkv, int32_t dtype, int64_t heads, const void* cosines,
                                const void* sines, int64_t rotary_dim, int64_t layer) {
  switch (dtype) {
    case kFloat32: return by_cache<float>(*batch, qkv, heads, cosines, sines, rotary_dim, layer);
    case kFloat16: return by_cache<half_t>(*batch, qkv, heads, cosines, sines, rotary_dim, layer);
    case kBFloat16: return by_cache<bf16_t>(*batch, qkv, heads, cosines, sines, rotary_dim, layer);
  }
}

// pairs: [count, 2] block numbers in source and destination.
EXPORT void pm_copy_blocks(const char* source, char* destination, const int64_t* pairs, int64_t count,
                           int64_t block_bytes, int32_t threads) {
  for_each(count * block_bytes > (1 << 19) ? threads : 1, count, [&](int64_t i, int) {
    memcpy(destination + pairs[2 * i + 1] * block_bytes, source + pairs[2 * i] * block_bytes, block_bytes);
  });
}
