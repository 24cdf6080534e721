// INT4 tiles streamed through shared memory into tensor cores, by single warps.
//
// A warp multiplies runs of consecutive tiles of one tile row, one run after another. Its copies are
// kStages stages of kStageTiles tiles ahead of its products, across the ends of runs, so that memory
// never waits for sums to be met or rows to be found; rows are a stage ahead, in registers.
#pragma once

#include "int4_tile.cuh"

namespace kdtree::cuda {

constexpr int kStageTiles = 8;  // 4 KB of codes
constexpr int kStages = 2;
constexpr int kAhead = 4;  // tiles whose rows are on their way
static_assert(kStageTiles % kAhead == 0);

struct Int4Stage {
  uint4 code[kStageTiles][kWarp];
  __nv_bfloat16 scale[kStageTiles][kInt4Tile];
};

// Every step-th of the items (group, place), `places` of each group, group after group.
struct Item {
  int group, place;
};
struct Items {
  int groups, places, group_step, place_step;

  __device__ Items(int groups, int places, int step)
      : groups(groups), places(places), group_step(step / places), place_step(step % places) {}
  __device__ Item at(int i) const { return {i / places, i % places}; }
  __device__ bool hold(const Item& item) const { return item.group < groups; }
  __device__ Item after(const Item& item) const {
    const int place = item.place + place_step, carry = place >= places;
    return {item.group + group_step + carry, carry ? place - places : place};
  }
};

// The runs of `tiles` tiles from first(item) on of one warp, of the tiles w with their scales. A lane
// copies what it will read of the codes, and some scales for all.
template <class First>
class Int4Stream {
 public:
  __device__ Int4Stream(Int4Stage* stages, const void* w, const void* scale, int tiles,
                        const Item& item, const Items& items, const First& first)
      : stages_(shared_address(stages)),
        w_(static_cast<const uint4*>(w) + lane()),
        scale_(static_cast<const __nv_bfloat16*>(scale)),
        tiles_(tiles),
        items_(items),
        first_(first),
        item_(item) {
    begin();
    for (int s = 0; s < kStages; ++s) copy(at(s));
  }

  // Waits for the next stage.
  __device__ void wait() const {
    copy_wait<kStages - 1>();
    __syncwarp();  // the other lanes' copies have come, too
  }
  // Of the stage waited for.
  __device__ uint4 code(int i) const {
    return load_shared(at(slot_) + i * int{sizeof(Int4Stage::code[0])} +
                       lane() * int{sizeof(uint4)});
  }
  __device__ void scales(int i, uint32_t (&s)[4]) const {  // of tiles i and i + 1
    load_scales(at(slot_) + int{offsetof(Int4Stage, scale)} + i * int{sizeof(Int4Stage::scale[0])},
                s);
  }
  // Gives it back.
  __device__ void pop() {
    __syncwarp();  // all lanes have read it
    copy(at(slot_));
    slot_ = slot_ + 1 == kStages ? 0 : slot_ + 1;
  }

 private:
  static __device__ int lane() { return threadIdx.x % kWarp; }
  __device__ uint32_t at(int slot) const { return stages_ + slot * int{sizeof(Int4Stage)}; }

  __device__ void begin() {
    left_ = items_.hold(item_) ? tiles_ : 0;
    if (left_ > 0) tile_ = first_(item_);
  }

  // Begins the copy of the next tiles.
  __device__ void copy(uint32_t to) {
    if (left_ > 0) {
      const uint4* codes = w_ + int64_t{tile_} * kWarp;
      const uint32_t code = to + lane() * int{sizeof(uint4)};
      const int tiles = min(left_, kStageTiles);
      if (left_ >= kStageTiles) {
#pragma unroll
        for (int i = 0; i < kStageTiles; ++i)
          copy_async(code + i * int{sizeof(Int4Stage::code[0])}, codes + i * kWarp);
      } else {
#pragma unroll 1
        for (int i = 0; i < tiles; ++i)
          copy_async(code + i * int{sizeof(Int4Stage::code[0])}, codes + i * kWarp);
      }
      copy_scales(to + int{offsetof(Int4Stage, scale)}, tiles);
      tile_ += tiles, left_ -= tiles;
      if (left_ == 0) {
        item_ = items_.after(item_);
        begin();
      }
    }
    copy_commit();  // of nothing, at the end: what is awaited is counted
  }

  __device__ void copy_scales(uint32_t to, int tiles) {
    constexpr int kVector = sizeof(uint4) / sizeof(__nv_bfloat16);
    const auto* from = scale_ + int64_t{tile_} * kInt4Tile;
    if (reinterpret_cast<uintptr_t>(scale_) % sizeof(uint4) == 0) {
      if (lane() * kVector < tiles * kInt4Tile)
        copy_async(to + lane() * int{sizeof(uint4)}, from + lane() * kVector);
    } else {  // scales may start anywhere
#pragma unroll 1
      for (int i = lane(); i < tiles * kInt4Tile; i += kWarp)
        store_shared(to + i * int{sizeof(__nv_bfloat16)}, from[i]);
    }
  }

  uint32_t stages_;
  const uint4* w_;
  const __nv_bfloat16* scale_;
  int tiles_;
  const Items& items_;
  const First& first_;
  Item item_;
  int tile_ = 0, left_, slot_ = 0;
};

// The B fragments of tiles to come, from one row a lane.
using Int4Rows = uint32_t[kAhead][4];

// b = the first tiles of the row at `row`, of which there are `tiles`.
template <class Load>
__device__ inline void load_first(const __nv_bfloat16* row, int tiles, Load load, Int4Rows& b) {
  if (tiles >= kAhead) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) load(row + i * kInt4Tile, b[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
      if (i < tiles) load(row + i * kInt4Tile, b[i]);
  }
}

// acc += the tiles part .. of the stream's stage, kAhead or, if fewer, `tiles`, times the rows b.
template <class Stream>
__device__ inline void multiply_part(const Stream& stream, int part, int tiles, const Int4Rows& b,
                                     float (&acc)[2][4]) {
  uint32_t scale[4];
  const auto multiply = [&](int i) {
    if (i % 2 == 0) stream.scales(part + i, scale);
    Int4Tile(stream.code(part + i), scale[i % 2 * 2], scale[i % 2 * 2 + 1]).multiply(b[i], acc);
  };
  if (tiles >= kAhead) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) multiply(i);
  } else {
#pragma unroll
    for (int i = 0; i < kAhead - 1; ++i)
      if (i < tiles) multiply(i);
  }
}

// acc += the next run of the stream, of `tiles` tiles, times the row at `row`, whose first tiles stand
// in b; then the first tiles of the row at `next` stand there.
template <class Stream, class Load>
__device__ inline void multiply_run(Stream& stream, int tiles, const __nv_bfloat16* row,
                                    const __nv_bfloat16* next, Load load, Int4Rows& b,
                                    float (&acc)[2][4]) {
  static_assert(kStageTiles == 2 * kAhead);
  const auto load_after = [&](int left, Int4Rows& b) {  // what follows the first of `left` tiles
    row += kAhead * kInt4Tile;
    const bool more = left > kAhead;
    load_first(more ? row : next, more ? left - kAhead : tiles, load, b);
  };
  for (int left = tiles; left > 0; left -= kStageTiles) {
    stream.wait();
    if (left > kAhead) {
      Int4Rows c;
      load_after(left, c);
      multiply_part(stream, 0, kAhead, b, acc);
      load_after(left - kAhead, b);
      multiply_part(stream, kAhead, left - kAhead, c, acc);
    } else {
      multiply_part(stream, 0, left, b, acc);
      load_after(left, b);
    }
    stream.pop();
  }
}

}  // namespace kdtree::cuda
