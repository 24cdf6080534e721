// What the tensor-core kernels share: mma.m16n8k16 on bf16, asynchronous copies, INT4 codes as bf16.
//
// Weights are A (16 outputs x 16 inputs), rows are B (16 inputs x 8 rows), so that one row fills an
// eighth of a tile where a tile of 16 rows would leave 15 empty. Lane 4 * g + t holds
//
//   a[0] outputs g,     inputs 2t, 2t + 1        b[0] row g, inputs 2t, 2t + 1
//   a[1] outputs g + 8, inputs 2t, 2t + 1        b[1] row g, inputs 2t + 8, 2t + 9
//   a[2] outputs g,     inputs 2t + 8, 2t + 9    c[0], c[1] output g, rows 2t, 2t + 1
//   a[3] outputs g + 8, inputs 2t + 8, 2t + 9    c[2], c[3] output g + 8, rows 2t, 2t + 1
#pragma once

#include "common.cuh"

namespace kdtree::cuda {

// c += a b; column n of c depends on column n of b alone.
__device__ inline void mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// The four A registers of a word of the INT4 layout: two codes - 8 each, exact in bf16, over kInt4Unit.
// A nibble at the low or at the high end of a byte, taken for a bf16 without its other bits, is
// code * 2^-133 or code * 2^-129, whether that is subnormal or not; one fma brings it to its place.
// Sums of such products want a factor of kInt4Unit.
inline constexpr float kInt4Unit = 64;
__device__ inline void int4_parts(uint32_t word, uint32_t (&a)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t byte = i < 2 ? word : word >> 8;
    const uint32_t code = byte & (i % 2 ? 0x00f000f0 : 0x000f000f);
    asm("fma.rn.bf16x2 %0, %1, %2, %3;"
        : "=r"(a[i])
        : "r"(code), "r"(i % 2 ? 0x7d007d00 : 0x7f007f00),  // 2^123, 2^127
          "r"(0xbe00be00));                                 // -8 / kInt4Unit
  }
}

// 16 bytes of shared memory.
__device__ inline uint4 load_shared(uint32_t from) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(from)
               : "memory");
  return v;
}

// 16 bytes to shared memory, past the first-level cache; zeros where not `valid`.
__device__ inline void copy_async(void* to, const void* from, bool valid = true) {
  const auto at = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from),
               "r"(valid ? 16 : 0));
}
__device__ inline void copy_commit() { asm volatile("cp.async.commit_group;"); }
template <int kPending>  // groups that may still be on their way
__device__ inline void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending));
}

// c = a b
__device__ inline void mma_first(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%10,%10,%10,%10};"
      : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(0.0f));
}

// N 8 x 8 matrices of bf16 from shared memory, the rows' addresses in lanes 0 .. 8 * N - 1: lane
// 4 * g + t holds the elements 2t and 2t + 1 of row g.
__device__ inline void load_matrices(uint32_t row, uint32_t (&m)[2]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
               : "=r"(m[0]), "=r"(m[1])
               : "r"(row));
}
__device__ inline void load_matrices(uint32_t row, uint32_t (&m)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(row));
}

// Matrices whose columns stand in the rows: lane 4 * g + t holds the elements g of the rows 2t and
// 2t + 1.
__device__ inline void load_transposed(uint32_t row, uint32_t (&m)[2]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
               : "=r"(m[0]), "=r"(m[1])
               : "r"(row));
}
__device__ inline void load_transposed(uint32_t row, uint32_t (&m)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(row));
}

}  // namespace kdtree::cuda
