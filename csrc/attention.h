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

// A cached token is C + R elements of the activations' dtype or, in FP8, a row of bytes:
//
//   0 .. C          a latent's codes, e4m3: sign, 4 bits of exponent (bias 7), 3 of mantissa, no
//                   infinity, NaN at 0x7f and 0xff; latent[c] = code[c] * scale in float32
//   C .. C + 4      scale, float32; the 12 bytes behind it are never read
//   C + 16 ..       the rope part, R bfloat16; padding up to whole 16 bytes, never read
//
// scale is the largest |latent| / 448, or 1 where that is 0; code is the e4m3 nearest to
// latent / scale in float32, ties to the even one, at most 448 in size. The latent is the norm's
// float32 result, not rounded before. Rows stand on kFp8Align bytes, for C is a multiple of it.
inline constexpr int kFp8Align = 16;     // also the bytes from the scale to the rope part
inline constexpr float kFp8Max = 448.f;  // the largest e4m3

constexpr int64_t fp8_row_bytes(int64_t C, int64_t R) {
  return C + kFp8Align + (2 * R + kFp8Align - 1) / kFp8Align * kFp8Align;
}

// kv[t] = (latent | rope): cache[slot[t]] = (rms_norm(latent, w) | rotate(rope, position[t]))
struct MlaAppendParams {
  void* cache;              // [slots, C + R], or [slots, fp8_bytes]; contiguous
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
  int fp8_bytes;            // of a row of the cache in FP8; 0 where it has dtype
  bool interleaved;
  DType dtype;  // of kv, w and, but in FP8, cache
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

// In FP8 such latents may be widened to bfloat16 first: bytes of the workspace for them, at its start.
constexpr int64_t widened_bytes(int64_t B, int64_t max_pages) {
  const int64_t page = kPage * (kLatent + kRope) * 2 + int64_t{sizeof(int32_t)};
  return (B * max_pages * page + 255) / 256 * 256;
}

struct MlaAttentionParams {
  const void* q;               // [B, N, H, C + R], contiguous
  const void* cache;           // [pages, kPage, C + R], or [pages, kPage, fp8_bytes]
  const int32_t* block_table;  // [B, max_pages]: page of the sequence's tokens 64 i .. 64 i + 63
  const int32_t* context;      // [B]
  const int64_t* ancestors;    // [B, N], bit m set for node m an ancestor or self; may be null
  void* out;                   // [B, N, H, C], contiguous
  void* workspace;             // see mla_attention_workspace in ops_attention.cpp
  int64_t workspace_bytes;
  int B, N, H, C, R, max_pages;
  float scale;
  int fp8_bytes;  // as in MlaAppendParams
  DType dtype;    // of q, out and, but in FP8, cache
};

// Attention of a chunk of a prompt, in un-absorbed form: a head's own keys and values of the context
// and of the chunk, which are the last N of them. Row n stands at position p = keys - N + n and attends
// to positions 0 .. p. The features of k_rope serve all heads; q's are (nope | rope), not yet rotated.
//
//   score[n, h, j] = scale * (nope . k[h, j] + rotate(rope, p) . k_rope[j])
//   out[n, h] = softmax_j(score[n, h]) . v[h]
//
// The rotated query is rounded to dtype. Order of the sums, by absolute position alone: tiles of
// kPrefillTile keys, one softmax over them as they come. A row's bits depend on it and on its keys, not
// on the chunk.
inline constexpr int kPrefillTile = 128;

struct MlaPrefillParams {
  const void* q;       // [N, H, P + R], rows q_row elements apart
  const void* k;       // [H, keys, P], rows k_row elements apart, heads k_head
  const void* v;       // [H, keys, V], v_row and v_head
  const void* k_rope;  // [keys, R], rope_row
  const float* rope;   // [positions, R], as in MlaQueryParams
  void* out;           // [N, H, V], contiguous
  int64_t q_row, k_row, k_head, v_row, v_head, rope_row;
  int N, H, keys, P, R, V, positions;
  float scale;
  bool interleaved;
  DType dtype;  // of q, k, v, k_rope and out
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
