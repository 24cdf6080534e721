// An INT4 tile (32 outputs x 32 inputs) times rows of bf16, on tensor cores.
//
//   acc = fma(scale, (codes - 8) / kInt4Unit . x, acc), in float32
//
// The codes less 8 are exact in bf16; two mma add a tile's 32 products from zero on.
#pragma once

#include <cstddef>

#include "../early.cuh"
#include "../mma.cuh"
#include "barrier.cuh"

namespace kdtree::cuda {

constexpr int kRows = 8;  // of a B fragment

// Loads that begin where they are written, not where their value is wanted.
__device__ inline uint32_t load_now(const uint32_t* from) {
  uint32_t v;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(from));
  return v;
}
__device__ inline uint4 load_now(const uint4* from) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
}
__device__ inline void store_shared(uint32_t to, __nv_bfloat16 v) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"(__bfloat16_as_ushort(v)) : "memory");
}
__device__ inline void copy_async(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// The scales of outputs g and g + 8 (low and high half), 16 + g and 24 + g of two tiles, which stand
// one after the other from `scales` on.
__device__ inline void load_scales(uint32_t scales, uint32_t (&s)[4]) {
  constexpr int kTileBytes = kInt4Tile * sizeof(__nv_bfloat16), kEightBytes = kTileBytes / 4;
  const int lane = threadIdx.x % kWarp, matrix = lane / 8;
  const uint32_t row = scales + matrix / 2 * kTileBytes + (matrix % 2 * 2 + lane % 2) * kEightBytes;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(s[0]), "=r"(s[1]), "=r"(s[2]), "=r"(s[3])
               : "r"(row)
               : "memory");
}

// The B fragments of a tile's inputs of 8 rows. Lane 8 * j + r: the address of inputs 8 * j .. of row r.
__device__ inline void load_fragments(uint32_t from, uint32_t (&b)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
               : "r"(from)
               : "memory");
}

// d = c + a b, without a place among other instructions: the compiler may put it where it likes.
__device__ inline void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                           const float (&c)[4]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%10,%11,%12,%13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]),
        "f"(c[2]), "f"(c[3]));
}

// Where input i of a tile stands in rows that are kept by lanes: the 8 of a lane t side by side.
__device__ inline int lane_place(int i) { return i / 2 % 4 * 8 + i / 8 * 2 + i % 2; }

// A lane's part of a tile, as mma wants it.
struct Int4Tile {
  uint32_t a[2][2][4];  // [outputs 16 * m ..][inputs 16 * k ..]
  float scale[2][2];    // of outputs 16 * m + g, and + 8

  __device__ Int4Tile(const uint4& code, uint32_t scale0, uint32_t scale1) {
    int4_parts(code.x, a[0][0]), int4_parts(code.y, a[0][1]);
    int4_parts(code.z, a[1][0]), int4_parts(code.w, a[1][1]);
    scale[0][0] = __uint_as_float(scale0 << 16), scale[0][1] = __uint_as_float(scale0 & 0xffff0000);
    scale[1][0] = __uint_as_float(scale1 << 16), scale[1][1] = __uint_as_float(scale1 & 0xffff0000);
  }

  // acc[m] += this times the rows b: outputs 16 * m + g and g + 8, rows 2t and 2t + 1.
  __device__ void multiply(const uint32_t (&b)[4], float (&acc)[2][4]) const {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      float half[4], c[4];
      mma(half, a[m][0], b[0], b[1], {0, 0, 0, 0});
      mma(c, a[m][1], b[2], b[3], half);
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[m][i] = fmaf(scale[m][i / 2], c[i], acc[m][i]);
    }
  }
};

}  // namespace kdtree::cuda
