// What the kernels know of an iteration. The layout is that of _Batch in kernels.py.
#pragma once

#include "simd.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

struct Batch {
  const int64_t* query_starts;  // [rows + 1]
  const int64_t* context_lens;  // [rows]
  const int64_t* block_tables;  // [rows, table_width]
  const int64_t* slots;         // [tokens]
  void* cache;                  // [num_blocks, layers, 2, block_size, kv_heads, head_dim]
  int64_t rows, table_width, layers, block_size, kv_heads, head_dim;
  int32_t cache_dtype, threads;

  // Keys of a block in a layer; its values follow block_size * kv_heads * head_dim elements later. 64-bit all through.
  template <class C> C* keys(int64_t block, int64_t layer) const {
    return static_cast<C*>(cache) + (block * layers + layer) * 2 * block_size * kv_heads * head_dim;
  }
};
