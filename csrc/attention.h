// The contract of the attention ops, part of kdtree.h's: what is said there holds here.
#pragma once

#include "kdtree.h"

namespace kdtree {

// q[t, h] = (nope | rope): out[t, h, :C] = w_uk[h] nope, out[t, h, C:] = rotate(rope, position[t])
struct MlaQueryParams {
  const void* q;            // [T, H, P + R], rows q_stride elements apart
  const void* w_uk;         // [H, C, P]
  const float* rope;        // [positions, R]: R/2 cosines, then R/2 sines
  const int32_t* position;  // [T]; negative marks a padded row, which is set to zero; a position
                            // beyond the table's last reads the last
  void* out;                // [T, H, C + R], contiguous
  int64_t q_stride;         // elements
  int T, H, P, C, R, positions;
  bool interleaved;  // rotate pairs (2i, 2i + 1) in place, else (i, i + R/2)
  DType dtype;       // of q, w_uk and out
};

// kv[t] = (latent | rope): cache[slot[t]] = (rms_norm(latent, w) | rotate(rope, position[t]))
struct MlaAppendParams {
  void* cache;              // [slots, C + R], contiguous
  const void* kv;           // [T, C + R], rows kv_stride elements apart
  const void* w;            // [C]
  const float* rope;        // [positions, R], as in MlaQueryParams
  const int32_t* position;  // [T]
  const int32_t* slot;      // [T], distinct; a row whose slot is not one of the cache's is padding
                            // and skipped
  int64_t kv_stride;        // elements
  int64_t slots;
  int T, C, R, positions;
  float eps;
  bool interleaved;
  DType dtype;  // of cache, kv and w
};

// Both of the same rows, in one launch where a backend has one.
struct MlaQueryAppendParams {
  MlaQueryParams query;
  MlaAppendParams append;
};

// Verify attention over the latent cache. Row (b, n) stands at position
// p = context[b] + popcount(ancestors[b, n]) - 1 and attends to positions 0 .. p. Position j below
// context is token slot j of the sequence, position j from there on slot context + m where m is
// the (j - context)-th set bit of ancestors[b, n]. With ancestors null the rows are a chain:
// p = context + n and every position is its slot. ancestors[b, n] = 0 marks padding: output zero.
//
//   out[b, n, h] = softmax_j(scale * q[b, n, h] . cache[j]) . cache[j][:C]
//
// Order of the sums, by absolute position alone: positions <= p - kTail in splits of kSplit and
// tiles with fixed absolute edges; the last kTail positions as one tile, wherever they are stored;
// merged split by split, the tail last. Rows that a row does not attend to are never read into its
// sums, and block table entries without a visible key are never followed. Every slot of the context
// and of the nodes lies within the table: context + N <= kPage * max_pages.
//
// Latents of kLatent + kRope features in bfloat16 have tensor cores on a GPU, tiles of kPage positions,
// and splits of kNearSplit positions up to position kNear, of kMidSplit up to kFar, of kFarSplit from
// there on: enough of them to fill a GPU with one row, few enough to be merged for many.
inline constexpr int kLatent = 512, kRope = 64;
inline constexpr int kLatentPart = 2 * kLatent + 8;  // bytes of a row's split in the workspace
inline constexpr int kNear = 4096, kNearSplit = 256;
inline constexpr int kFar = 32768, kMidSplit = 512, kFarSplit = 1024;

// How many splits begin before position `keys`.
constexpr int64_t latent_splits(int64_t keys) {
  const auto in = [&](int64_t from, int64_t to, int64_t split) {
    const int64_t part = keys < from ? 0 : (keys < to ? keys : to) - from;
    return (part + split - 1) / split;
  };
  return in(0, kNear, kNearSplit) + in(kNear, kFar, kMidSplit) + in(kFar, keys, kFarSplit);
}

struct MlaAttentionParams {
  const void* q;               // [B, N, H, C + R], contiguous
  const void* cache;           // [pages, kPage, C + R]
  const int32_t* block_table;  // [B, max_pages]: page of the sequence's tokens 64 i .. 64 i + 63
  const int32_t* context;      // [B]
  const int64_t* ancestors;    // [B, N], bit m set for node m an ancestor or self; may be null
  void* out;                   // [B, N, H, C], contiguous
  void* workspace;             // see mla_attention_workspace in ops_attention.cpp
  int64_t workspace_bytes;
  int B, N, H, C, R, max_pages;
  float scale;
  DType dtype;  // of q, cache and out
};

// Row token slot context[b] + path[b, i] moves to slot context[b] + i, for i < length[b], all
// layers, as if all were read before any is written. Of path and block_table nothing else is read.
struct KvCompactParams {
  void* cache;                 // [L, pages, kPage, Z]
  const int32_t* block_table;  // [B, max_pages]
  const int32_t* context;      // [B]
  const int32_t* path;         // [B, J], ascending, path[b, i] >= i
  const int32_t* length;       // [B], <= J
  int64_t pages;
  int L, B, J, Z, max_pages;
  int element_size;  // bytes
};

}  // namespace kdtree
