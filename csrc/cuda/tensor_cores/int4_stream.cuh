// INT4 tiles streamed through shared memory into tensor cores, by single warps.
//
// A warp multiplies runs of consecutive tiles of one tile row, or of two (sides) by the same rows,
// one run after another. Its copies are N stages of S x K tiles ahead of its products, across the
// ends of runs, so that memory never waits for sums to be met or rows to be found; rows are a stage
// ahead, in registers. What a stage costs besides its products is kept to some 25 instructions: a
// product takes 56 a tile, and nearly as much time as the tile's bytes.
#pragma once

#include "int4_tile.cuh"

namespace kdtree::cuda {

template <int S, int K>
struct Int4Stage {  // K columns: tiles of each of S sides
  static_assert(S * K % 2 == 0);  // scales are read by pairs of tiles
  uint4 code[K][S][kWarp];
  __nv_bfloat16 scale[K][S][kInt4Tile];
};

// The runs of `columns` tiles of S sides of one warp, of the tiles w with their scales. next(tile,
// apart): the next run's first tile, and how far from it the other side's is; whether there is a
// run. A lane copies what it will read of the codes, and some scales for all.
template <int S, int K, int N, class Next>
class Int4Stream {
 public:
  using Stage = Int4Stage<S, K>;

  __device__ Int4Stream(Stage* stages, const void* w, const void* scale, int columns,
                        const Next& next)
      : at_(shared_address(stages) + lane() * kBytes),
        end_(at_ + N * int{sizeof(Stage)}),
        w_(static_cast<const uint4*>(w)),
        s_(static_cast<const __nv_bfloat16*>(scale)),
        columns_(columns),
        whole_(reinterpret_cast<uintptr_t>(scale) % kBytes ? columns + 1 : K),
        next_(next) {
    if (columns > 0) begin();
    for (int s = 0; s < N; ++s) pop();
  }

  // Waits for the next stage.
  __device__ void wait() const {
    copy_wait<N - 1>();
    __syncwarp();  // the other lanes' copies have come, too
  }
  __device__ uint4 code(int i, int side) const {
    return load_shared(at_ + (i * S + side) * int{sizeof(Stage::code[0][0])});
  }
  __device__ void scales(int i, uint32_t (&s)[4]) const {  // of the stage's tiles i and i + 1
    load_scales(
        at_ - lane() * kBytes + int{offsetof(Stage, scale)} + i * int{sizeof(Stage::scale[0][0])},
        s);
  }
  // Gives it back and begins the copy of the tiles that come N stages later.
  __device__ void pop() {
    __syncwarp();  // all lanes have read it
    if (left_ >= whole_) {
#pragma unroll
      for (int i = 0; i < K; ++i)
#pragma unroll
        for (int side = 0; side < S; ++side) copy_code(i, side);
      if (S * kOwn == kWarp || lane() < S * kOwn) copy_async(scale_place(), scale_from_);
      advance(K);
    } else if (left_ > 0) {
      copy_some(min(left_, K));
    }
    copy_commit();  // of nothing, at the end: what is awaited is counted
    at_ += sizeof(Stage);
    if (at_ == end_) at_ -= N * int{sizeof(Stage)};
  }

 private:
  static constexpr int kBytes = sizeof(uint4);
  static constexpr int kVector = kBytes / sizeof(__nv_bfloat16);
  static constexpr int kChunks = kInt4Tile / kVector;  // of a tile's scales
  static constexpr int kOwn = K * kChunks;             // of a side

  static __device__ int lane() { return threadIdx.x % kWarp; }
  // Which 16 bytes of a stage's scales this lane copies: of which side, and which of these.
  static __device__ int side() { return S == 1 ? 0 : lane() / kOwn; }
  static __device__ int chunk() { return lane() % kOwn; }
  __device__ uint32_t scale_place() const {
    const int tile = chunk() / kChunks * S + side();
    return at_ + int{offsetof(Stage, scale)} +
           (tile * kChunks + chunk() % kChunks - lane()) * kBytes;
  }

  __device__ void begin() {
    int tile, apart;
    if (!next_(tile, apart)) return;
    left_ = columns_;
    code_from_ = w_ + (int64_t{tile} * kWarp + lane());
    apart_ = apart * kWarp;
    scale_from_ = s_ + (int64_t{tile + side() * apart} * kInt4Tile + chunk() * kVector);
  }
  __device__ void advance(int n) {
    code_from_ += n * kWarp;
    scale_from_ += n * kInt4Tile;
    left_ -= n;
    if (left_ == 0) begin();
  }
  __device__ void copy_code(int i, int side) const {
    copy_async(at_ + (i * S + side) * int{sizeof(Stage::code[0][0])},
               (side ? code_from_ + apart_ : code_from_) + i * kWarp);
  }
  // The last n columns of a run, or scales that start anywhere.
  __device__ void copy_some(int n) {
#pragma unroll 1
    for (int i = 0; i < n; ++i)
#pragma unroll
      for (int side = 0; side < S; ++side) copy_code(i, side);
    if (lane() < S * kOwn && chunk() / kChunks < n) {
      auto from = scale_from_;
      asm volatile("" : "+l"(from));  // else it is kept in registers from stage to stage, too
#pragma unroll 1
      for (int i = 0; i < kVector; ++i)
        store_shared(scale_place() + i * int{sizeof(__nv_bfloat16)}, from[i]);
    }
    advance(n);
  }

  uint32_t at_, end_;
  const uint4* w_;
  const __nv_bfloat16* s_;
  int columns_, whole_;  // whole_: from so many columns on a stage is copied at once
  const Next& next_;
  const uint4* code_from_ = nullptr;
  const __nv_bfloat16* scale_from_ = nullptr;
  int apart_ = 0, left_ = 0;
};

// The B fragments of a stage, from one row a lane.
template <int K>
using Int4Rows = uint32_t[K][4];
template <int S>
using Int4Sums = float[S][2][4];

// b = the first tiles of the row at `row`, of which there are `tiles`.
template <int K, class Load>
__device__ inline void load_first(const __nv_bfloat16* row, int tiles, Load load, Int4Rows<K>& b) {
#pragma unroll
  for (int i = 0; i < K; ++i)
    if (i < tiles) load(row + i * kInt4Tile, b[i]);
}

// acc += the next run of the stream, of `columns` columns, times the row at `row`, whose first
// tiles stand in b; then row is next() and its first tiles stand there.
template <int S, int K, class Stream, class Load, class Next>
__device__ inline void multiply_run(Stream& stream, int columns, const __nv_bfloat16*& row,
                                    Next next, Load load, Int4Rows<K>& b, Int4Sums<S>& acc) {
  const auto multiply = [&](int i, int side, int at, const uint32_t (&scale)[4],
                            const uint32_t (&b)[4]) {
    Int4Tile(stream.code(i, side), scale[2 * at], scale[2 * at + 1]).multiply(b, acc[side]);
  };
  const bool whole = columns % K == 0;
#pragma unroll 1
  for (int left = columns; left > 0; left -= K) {
    row += K * kInt4Tile;
    if (left <= K) row = next();
    stream.wait();
    if (whole || left >= 2 * K) {  // this stage is, and what b is to hold
      uint32_t scale[4];
#pragma unroll
      for (int i = 0; i < K; ++i) {
#pragma unroll
        for (int side = 0; side < S; ++side) {
          const int tile = i * S + side;
          if (tile % 2 == 0) stream.scales(tile, scale);
          multiply(i, side, tile % 2, scale, b[i]);
        }
        load(row + i * kInt4Tile, b[i]);
      }
    } else {
#pragma unroll 1
      for (int i = 0; i < min(left, K); ++i) {
        uint32_t scale[4];  // of an even tile and the next, which is the stage's, too
        stream.scales(i * S / 2 * 2, scale);
        if (i * S % 2) scale[0] = scale[2], scale[1] = scale[3];
#pragma unroll
        for (int side = 0; side < S; ++side) multiply(i, side, side, scale, b[0]);
#pragma unroll
        for (int j = 0; j < (K - 1) * 4; ++j) b[j / 4][j % 4] = b[j / 4 + 1][j % 4];
      }
      load_first<K>(row, left > K ? left - K : columns, load, b);
    }
    stream.pop();
  }
}

}  // namespace kdtree::cuda
