// What the kernels know of an iteration. The layout is that of _Batch in kernels.py.
#pragma once

#include "simd.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

struct Batch {
  const int64_t* query_starts;  // [rows + 1]
  const int64_t* context_lens;  // [rows]
  const int64_t* block_tables;  // [rows, table_width]
  const int64_t* slots;         // [tokens]
  const int64_t* generated_from;  // [rows] position of the first generated token; null: rows of one token are generated
  void* cache;                  // [num_blocks, layers, 2, block_size, kv_heads, entry]
  int64_t rows, table_width, layers, block_size, kv_heads, head_dim;
  int32_t cache_dtype, threads;

  // Elements of a head's key or value of a token, with its scale where it has one.
  int64_t entry() const { return head_dim + (cache_dtype == kInt8 || cache_dtype == kFloat8 ? (int64_t)sizeof(float) : 0); }
  // Of a token, and of all keys of a block; its values follow as many elements later.
  int64_t token_elements() const { return kv_heads * entry(); }
  int64_t block_elements() const { return block_size * token_elements(); }
  // Keys of a block in a layer. 64-bit all through.
  template <class C> C* keys(int64_t block, int64_t layer) const {
    return static_cast<C*>(cache) + (block * layers + layer) * 2 * block_elements();
  }
};
