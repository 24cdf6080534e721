// The contract of what a round does beside its tree and the layers, part of kdtree.h's: what is said
// there holds here. A sequence knows the first length[b] of its X tokens; the last is the root.
#pragma once

#include "kdtree.h"

namespace kdtree {

inline constexpr int kMaxStops = 64;  // tokens that end a sequence

// Why a sequence goes on or ends.
enum class End : int64_t { running, stop, length, failed };

// Where the nodes of a tree stand: position = context + depth; slot = that of token context + n in
// the sequence's pages, the last of them where there are too few. Both are -1 at padding.
struct TreePlaceParams {
  const int32_t* context;      // [B], committed tokens
  const int32_t* block_table;  // [B, max_pages]
  const int32_t* depth;        // [B, N]
  const int64_t* ancestors;    // [B, N], 0 at padding; may be null: none
  int32_t* position;           // [B, N]
  int32_t* slot;               // [B, N]
  int B, N, max_pages;
};

// What followed before, where the known tokens end as they once did. A match is an index below the
// root's from which on, backwards, 1 to `longest` tokens are the last ones; the best is the longest,
// the latest among equals. candidate[b, :, m] are the J tokens after the m-th best, 0 where none is
// known. Where several begin alike, the best of them has the nodes that they share:
//   score[b, 0, 0, m] = first + m * rank where m has its first token as its own, else -inf
//   score[b, j, m, m'] = next where m' has its j-th token as its own and m has the one before it
struct NgramMatchParams {
  const int64_t* token;   // [B, X]
  const int32_t* length;  // [B], taken as 1 .. X
  int64_t* candidate;     // [B, J, M]
  float* score;           // [B, J, M, M], as tree_build takes them
  int B, X, J, M, longest;
  float first, next, rank;
};

// Appends what a round emitted, up to the first token that is in stop, then up to the limit: `kept`
// tokens. end: stop where the last one kept is such a token, else length where the limit is
// reached, else failed where the walk did. active: false from any end on.
struct StateCommitParams {
  int64_t* token;          // [B, X]
  int32_t* length;         // [B]
  bool* active;            // [B]
  const int32_t* limit;    // [B], at most X
  const int64_t* stop;     // [B, S], S <= kMaxStops; -1 for none
  const int64_t* emitted;  // [B, J]
  const int32_t* count;    // [B], how many of those are emitted, at most J
  const float* logprob;    // [B, J]
  const bool* failed;      // [B]
  const int32_t* depth;    // [B, N], of the tree's nodes; may be null
  int64_t* record;         // [B, 2 + 2 J]: kept, end, emitted, the bits of logprob; before them where
                           // there is a depth the greatest of it and count - 1
  int B, X, S, J, N;
};

}  // namespace kdtree
