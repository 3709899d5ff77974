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
#include <vector>

#include "attention_chunk.h"
#include "attention_decode.h"
#include "threads.h"

namespace {

constexpr int64_t kDecodeRange = 512;   // keys per item for generated tokens, a multiple of kTile
constexpr int64_t kChunkRange = 2048;   // the same for tiles of a chunk
constexpr int64_t kWorkPerThread = 1 << 16;  // products below which another thread does not pay

struct Merge {
  int64_t first, count, ranges;
  const float* partials;
};

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
