// The contract between the torch bindings (ops*.cpp) and the kernels (cpu/, cuda/).
//
// Neither torch nor CUDA headers may be included here: that is what lets a kernel compile in
// seconds, a CPU-only machine build the library, and a plain C++ program call a kernel.
//
// Every op is one Params struct plus one launcher per backend, all with the same signature. A
// launcher validates nothing (ops*.cpp have done so), allocates nothing and never synchronizes.
//
// Shape letters: B sequences, T rows of a call, N tree nodes a sequence, S committed context,
// J draft depth, M candidates a depth, L layers, D hidden, H heads, C latent, R rope part, P nope
// part, V value head, E experts, K experts a token, F expert hidden, W vocabulary, I and O in and
// out features of a product. T = B * N wherever a call has both.
//
// Row invariance: a row's result has the same bits whatever T, B, N and its neighbours are.
#pragma once

#include <cstdint>

struct CUstream_st;  // the pointee of cudaStream_t

namespace kdtree {

using Stream = CUstream_st*;  // cudaStream_t on CUDA, ignored on CPU

enum class DType : uint8_t { f32, bf16 };

inline constexpr int kPage = 64;      // tokens of a cache page
inline constexpr int kGroup = 32;     // input features that share an INT4 scale
inline constexpr int kInt4Tile = 32;  // an INT4 tile is 32 outputs x 32 inputs: see Int4PackParams
inline constexpr int kInt4Words = 128;  // int32 words of an INT4 tile
inline constexpr int kTail = 16;        // last positions that attention reduces one by one
inline constexpr int kSplit = 128;      // positions of a split of attention's other keys
inline constexpr int kHeadBlock = 8;    // heads that share attention's workspace
inline constexpr int kMaxNodes = 64;    // tree nodes a sequence: an ancestor set is one 64-bit word
inline constexpr int kMaxDepth = 15;    // draft depth: a row's ancestors lie in its last kTail keys

// y[t, :] = x[t, :] / sqrt(mean(x[t, :]^2) + eps) * w
struct RmsNormParams {
  const void* x;     // [T, D], rows x_stride elements apart
  const void* w;     // [D]
  void* y;           // [T, D], contiguous
  int64_t x_stride;  // elements
  int T, D;
  float eps;
  DType dtype;  // of x, w and y
};

// sum = x + residual, rounded to dtype; y = rms_norm(sum, w)
struct AddRmsNormParams {
  const void* x;         // [T, D], contiguous
  const void* residual;  // [T, D], contiguous
  const void* w;         // [D]
  void* y;               // [T, D], contiguous
  void* sum;             // [T, D], contiguous
  int T, D;
  float eps;
  DType dtype;  // of all five
};

// y[t, g, o] = sum_i x[t, g, i] * w[g, o, i], accumulated in float32
struct LinearParams {
  const void* x;           // [T, G, I], features contiguous
  const void* w;           // [G, O, I], contiguous
  void* y;                 // [T, G, O], contiguous
  int64_t x_row, x_group;  // strides of x, elements
  int T, G, O, I;
  DType x_dtype, w_dtype, y_dtype;  // y: of x or f32
};

// y[t, f] = silu(x[t, f]) * x[t, F + f]
struct SwigluParams {
  const void* x;  // [T, 2F], contiguous
  void* y;        // [T, F], contiguous
  int T, F;
  DType dtype;
};

// Repacks compressed-tensors INT4 codes (low nibble first, code = value + 8) into tiles of 32
// outputs x 32 inputs, 512 bytes each, that feed mma.m16n8k16 A fragments by 16-byte loads:
//
//   tile (o / 32, i / 32), lane = 4 * g + t (g < 8, t < 4), word = 2 * m + k (m, k < 2),
//   nibble n of that word: half = n / 4, pair = n % 4; pair bit 0 picks row + 8, bit 1 picks
//   column + 8; half picks the odd column:
//     output = 16 * m + g + 8 * (pair & 1),  input = 16 * k + 2 * t + 8 * (pair >> 1) + half
//
// so that (word >> 4 * pair) & 0x000f000f holds one A register's two values. Word `word` of lane
// `lane` is packed[tile][4 * lane + word]. Codes are stored as they are (value + 8).
struct Int4PackParams {
  const int32_t* codes;  // [E, O, I / 8]
  const void* scale;     // [E, O, I / 32]
  int32_t* packed;       // [E, O / 32, I / 32, 128]
  void* packed_scale;    // [E, O / 32, I / 32, 32]: the 32 outputs' scales of a tile
  int E, O, I;           // O and I multiples of 32
  DType dtype;           // of both scales
};

// y[t, o] = sum_i x[t, i] * (code[o, i] - 8) * scale[o, i / 32]
struct Int4LinearParams {
  const void* x;      // [T, I], rows x_stride elements apart
  const int32_t* w;   // [O / 32, I / 32, 128]
  const void* scale;  // [O / 32, I / 32, 32]
  void* y;            // [T, O], contiguous
  int64_t x_stride;   // elements
  int T, O, I;
  DType dtype;  // of x, scale and y
};

inline constexpr int kMaxExperts = 1024;
inline constexpr int kMaxExpertsPerToken = 64;

enum class Scoring : uint8_t { sigmoid, softmax };

// s = scoring(logits[t]); c = s + bias. Experts stand in `groups` equal runs; a group scores the
// sum of its two best c where group_sum2 (noaux_tc), else its best c; the kept_groups best stay.
// ids[t] = the K best c of those, best first, ties to the lower id; weights[t] = s[ids], divided by
// (their sum + 1e-20) where normalize, times scale. A padded row gets ids -1 and weights 0.
struct MoeRouteParams {
  const float* logits;      // [T, E]
  const float* bias;        // [E], may be null
  const int32_t* position;  // [T], may be null; negative marks a padded row
  int32_t* ids;             // [T, K]
  float* weights;           // [T, K]
  int T, E, K, groups, kept_groups;
  float scale;
  Scoring scoring;
  bool group_sum2, normalize;
};

// h[t, k] = silu(gate[ids[t, k]] x[t]) * (up[ids[t, k]] x[t]), rounded to dtype
// y[t] = sum over k in order of weights[t, k] * (down[ids[t, k]] h[t, k]), + shared[t]; no id < 0
struct MoeExpertsParams {
  const void* x;              // [T, D], rows x_stride elements apart
  const int32_t* ids;         // [T, K], each negative or < E; duplicates are legal
  const float* weights;       // [T, K]
  const void* gate_up;        // [E, 2F, D], gate first; packed [E, 2F/32, D/32, 128] where INT4
  const void* gate_up_scale;  // [E, 2F/32, D/32, 32] where INT4, else null
  const void* down;           // [E, D, F]; packed [E, D/32, F/32, 128] where INT4
  const void* down_scale;     // [E, D/32, F/32, 32] where INT4, else null
  const void* shared;         // [T, D], contiguous, may be null
  void* hidden;               // [T, K, F], workspace
  float* partial;             // [T, K, D], workspace
  int32_t* work;              // [2 + 3 T K], workspace
  void* y;                    // [T, D], contiguous
  int64_t x_stride;           // elements
  int T, D, F, E, K;
  DType dtype;  // of x, shared, y, and of the weights or the scales
};

// The k best of each row, best first, ties to the lower id: logprob = logit - logsumexp(row), NaN
// where the row holds a NaN, a +inf or nothing but -inf. W <= 2^24.
struct TopLogprobsParams {
  const float* logits;  // [T, W]
  float* logprob;       // [T, k]
  int64_t* id;          // [T, k]
  int T, W, k;
};

// A drafter's logits, sharpened, and coupled to the noise g that sample draws with for the token at
// position[b] + 1 + j: y = (a[j] logprob + b[j] T g) / (1 + c[j] T), logprob = logits -
// logsumexp(row), T = temperature[b]. Where b[j] T is 0 there is no noise. A -inf stays; a row with a
// NaN, a +inf or nothing but -inf becomes NaN.
struct DraftLogitsParams {
  const float* logits;       // [B, J, W]
  const int32_t* position;   // [B]: of the root; depth j + 1 is drawn at position + 1 + j
  const int64_t* seed;       // [B]
  const float* temperature;  // [B], >= 0
  const float* a;            // [J]
  const float* b;            // [J]
  const float* c;            // [J]
  float* y;                  // [B, J, W]
  int B, J, W;
};

// The best-first tree. score(child) = score(parent) + min(s, 0) in float32, s the candidate's; a
// NaN or -inf candidate is never taken. Order: score descending, then depth, parent, candidate.
// With chain_seed the chain of best children is inserted first. A missing node is padding: token 0,
// parent -2, depth 0, ancestors 0, score -inf.
struct TreeBuildParams {
  const float* score;        // [B, J, M], or where edges [B, J, M, M]: [b, j, m, m'] scores m' at
                             // depth j + 1 after m at depth j; at j = 0 only m = 0 is read
  const int64_t* candidate;  // [B, J, M]: token of each candidate
  const int64_t* root;       // [B, X]: node 0 is the length-th of a sequence's tokens
  const int32_t* length;     // [B], taken as 1 .. X; may be null: 1
  const bool* active;        // [B], may be null; where false all nodes are missing
  int64_t* token;            // [B, N]
  int32_t* parent;           // [B, N]; -1 at the root
  int32_t* depth;            // [B, N]
  int64_t* ancestors;        // [B, N]
  float* node_score;         // [B, N]; 0 at the root
  int B, N, J, M, X;
  bool edges, chain_seed;
};

inline constexpr int kKinds = 3;  // of nodes: on the spine, beside it, below what is beside it

// What a tree's first nodes are expected to emit, and which of some sizes brings the most a second.
// A node that is its parent's first child is its best; the spine is what best children alone lead
// to. A node comes true after its parent with min(exp(claim) * factor[depth - 1, kind], 1), claim =
// min(score - the parent's score, 0); expected[n] = the sum over sequences and nodes 0 .. n of the
// products of those over a node and its ancestors, 1 at a root; padding counts nothing.
// choice = the first of the sizes for which expected[size - 1] / seconds is the most.
struct TreeChooseParams {
  const int32_t* parent;  // [B, N], -1 at the root, -2 at padding, else below the node
  const int32_t* depth;   // [B, N], at most kMaxDepth
  const float* score;     // [B, N], 0 at the root
  const float* factor;    // [kMaxDepth, kKinds]
  const int32_t* sizes;   // [S], each 1 .. N
  const float* seconds;   // [S], above 0; +inf for a size that is not to be chosen
  int32_t* choice;        // [1], below S
  float* expected;        // [N]
  int B, N, S;
};

// times[slot] = nanoseconds, of the device's own clock or the CPU's, when all before it is done
struct ClockParams {
  int64_t* times;
  int slot;
};

// Draws the token that follows each row: the contract's filters, then argmax of fl(logit /
// temperature) + gumbel(seed, id, position + 1); at temperature 0 argmax of the logits.
// logprob = raw[token] - logsumexp(raw row). A row of either with a NaN, a +inf or nothing but -inf
// is not finite: token -1, logprob 0. A padded row: token -1, logprob 0, finite.
struct SampleParams {
  const float* logits;       // [B, N, W]
  const float* raw;          // [B, N, W], what log-probabilities are of; may be logits
  const int32_t* position;   // [B, N]: of the row, not of the drawn token; negative marks padding
  const int64_t* seed;       // [B]
  const float* temperature;  // [B], >= 0
  const int32_t* top_k;      // [B]; 0 keeps all
  const float* top_p;        // [B], in (0, 1]
  const float* min_p;        // [B], in [0, 1)
  int64_t* token;            // [B, N]
  float* logprob;            // [B, N]
  bool* finite;              // [B, N]
  int B, N, W;
};

// From the root: while a child of the current node carries its target token, go there (the earliest
// such child). path = the nodes walked, length = how many; tokens = their targets, what the round
// emits. A node that is not finite ends the walk before it emits: failed. A sequence whose root is
// padding has length 0.
struct TreeAcceptParams {
  const int64_t* token;   // [B, N]
  const int32_t* parent;  // [B, N]
  const int64_t* target;  // [B, N]
  const bool* finite;     // [B, N]
  const float* logprob;   // [B, N]: of the targets
  int32_t* path;          // [B, J], -1 from length on
  int32_t* length;        // [B]
  int64_t* tokens;        // [B, J], -1 from length on
  float* logprobs;        // [B, J]: of the tokens, 0 from length on
  bool* failed;           // [B]
  int B, N, J;            // J = min(N, kMaxDepth + 1)
};

}  // namespace kdtree
