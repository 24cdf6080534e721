// The contract of a block drafter's own ops, part of kdtree.h's: what is said there holds here.
// G key heads; N slots of a block, the last committed token's first; the root is that token,
// token[b, length[b] - 1] of what a sequence knows.
#pragma once

#include "kdtree.h"

namespace kdtree {

inline constexpr int kBlockParts = 32;  // runs of keys that block_attention splits at most into
inline constexpr int kBlockTile = 32;   // keys of a tile of it
inline constexpr int kMaxHead = 256;    // features of a head of it
inline constexpr int kMaxDraftLayers = 64;

// out[b, 0] = scale * table[root], the id taken as 0 .. W - 1; out[b, i] = scale * mask, i > 0
struct BlockEmbedParams {
  const int64_t* token;   // [B, X]
  const int32_t* length;  // [B], taken as 1 .. X
  const void* table;      // [W, D]
  const void* mask;       // [D]
  void* out;              // [B, N, D]
  int B, N, X, W, D;
  float scale;
  DType table_dtype, dtype;  // dtype: of mask and out
};

// Attention of a drafted block. Slot i of sequence b stands at position length[b] + i and attends to
// the cached positions, p at row p % S, and to the block's slots: all, or where causal up to its own;
// with a window to less than `window` positions away. Query head h has key head h / (H / G). The
// block's queries and keys are normed by head and rotated, pairs (i, i + width / 2), as the cached
// keys have been.
//   out[b, i, h] = softmax_j(scale * q[b, i, h] . key[j]) . value[j]; what no slot sees is not read.
struct BlockAttentionParams {
  const void* qkv;        // [B, N, H + 2 G, width]: heads of queries, of keys, of values
  const void* q_norm;     // [width]
  const void* k_norm;     // [width]
  const float* rope;      // [positions, width]: cosines, then sines; beyond it the last is read
  const void* cache;      // [B, S, 2, G, width]: keys, then values, of each row
  const int32_t* length;  // [B], taken as 0 below that, and without a window as S beyond that
  void* out;              // [B, N, H, width]
  void* workspace;        // see block_attention_workspace in ops_draft.cpp
  int64_t workspace_bytes;
  int B, N, S, H, G, width, positions, window;  // width even; window <= S + 1, 0 for none
  float eps, scale;
  bool causal;
  DType dtype;  // of qkv, the norms, cache and out
};

// Keys and values of committed tokens go to the cache, of every layer: of sequence first + q the
// first kept[q] nodes of its path, node path[q, i] at position start[q] + i. The keys are normed by
// head and rotated as in BlockAttentionParams. Of a layer with S rows the last S positions stay, p
// at row p % S. A node that is none of the N is skipped.
struct BlockAppendParams {
  void* cache;           // [sequences * (rows of all layers), 2, G, width]: layer by layer, in each
                         // sequence by sequence
  const void* kv;        // [Q, N, L, 2, G, width], keys and values of each layer
  const void* k_norm;    // [L, width]
  const float* rope;     // [positions, width]
  const int32_t* start;  // [Q]
  const int32_t* path;   // [Q, J], or null: node i is i, J = N
  const int32_t* kept;   // [Q], or null: J
  int first, sequences;
  int Q, N, J, L, G, width, positions;
  float eps;
  DType dtype;                     // of cache, kv and k_norm
  int begin[kMaxDraftLayers + 1];  // rows a sequence has in the layers before each; then in all
};

// A convolution over the slots of each block; rows are slots, N of them a block:
//   y[t, d] = sum over k <= t % N, in order, of
//       (base[k, d] + dynamic[t, k, d / (D / groups)]) * x[t - k, d]
struct BlockConvParams {
  const void* x;        // [T, D]
  const void* dynamic;  // [T, taps, groups], rows dynamic_stride elements apart
  const void* base;     // [taps, D]
  void* y;              // [T, D]
  int64_t dynamic_stride;
  int T, N, D, taps, groups;
  DType dtype;  // of all four
};

// Scores of a depth's candidates after each one of the depth before; depth 0 stands after the root.
// An edge e(m, m') = weight[j] <before[token of m] * direction[j], after[token of m']> + more[m, m'],
// times a[j] / (1 + c[j] T), is added to the score of m' where it follows m; whatever it is, the
// candidates of a depth keep the mass that their scores have. A NaN becomes -inf.
struct EdgeScoresParams {
  const float* score;        // [B, J, M], logarithms
  const int64_t* candidate;  // [B, J, M], below W
  const int64_t* token;      // [B, X], and
  const int32_t* length;     // [B]: where the root is, as in BlockEmbedParams
  const float* temperature;  // [B], >= 0
  const float* a;            // [J]
  const float* c;            // [J]
  const float* more;         // [B, J, M, M], may be null
  const float* weight;       // [J], with the three below, or all four null
  const float* direction;    // [B, J, R]
  const void* before;        // [W, R]
  const void* after;         // [W, R]
  float* out;                // [B, J, M, M]
  int B, J, M, X, W, R;
  DType dtype;  // of before and after
};

}  // namespace kdtree
