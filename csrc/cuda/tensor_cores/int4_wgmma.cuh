// Warpgroup products of sm_90a whose A operand, INT4 codes as bf16, is in registers.
#pragma once

#include "../mma.cuh"
#include "wgmma.cuh"

namespace kdtree::cuda {

#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
template <bool kAdd, int kNT>
__device__ inline void wgmma(float (&)[kNT][4], const uint32_t (&)[4], uint64_t) {
  __trap();
}
#else
// c = a b, or c += a b, over 16 inputs, by a warpgroup: a warp's a is its fragment of mma and has 16 of
// the 64 outputs, b has 8 * kNT rows.
template <bool kAdd>
__device__ inline void wgmma(float (&c)[1][4], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "{\n.reg .pred add;\nsetp.ne.b32 add, %9, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0,%1,%2,%3}, {%4,%5,%6,%7}, %8, add, "
      "1, 1, 0;\n}"
      : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(int{kAdd}));
}
template <bool kAdd>
__device__ inline void wgmma(float (&c)[2][4], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "{\n.reg .pred add;\nsetp.ne.b32 add, %13, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7}, "
      "{%8,%9,%10,%11}, %12, add, 1, 1, 0;\n}"
      : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]), "+f"(c[1][1]),
        "+f"(c[1][2]), "+f"(c[1][3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(int{kAdd}));
}
template <bool kAdd>
__device__ inline void wgmma(float (&c)[4][4], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "{\n.reg .pred add;\nsetp.ne.b32 add, %21, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, {%16,%17,%18,%19}, %20, add, "
      "1, 1, 0;\n}"
      : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]), "+f"(c[1][1]),
        "+f"(c[1][2]), "+f"(c[1][3]), "+f"(c[2][0]), "+f"(c[2][1]), "+f"(c[2][2]), "+f"(c[2][3]),
        "+f"(c[3][0]), "+f"(c[3][1]), "+f"(c[3][2]), "+f"(c[3][3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(int{kAdd}));
}
template <bool kAdd>
__device__ inline void wgmma(float (&c)[8][4], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "{\n.reg .pred add;\nsetp.ne.b32 add, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, "
      "add, 1, 1, 0;\n}"
      : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]), "+f"(c[1][1]),
        "+f"(c[1][2]), "+f"(c[1][3]), "+f"(c[2][0]), "+f"(c[2][1]), "+f"(c[2][2]), "+f"(c[2][3]),
        "+f"(c[3][0]), "+f"(c[3][1]), "+f"(c[3][2]), "+f"(c[3][3]), "+f"(c[4][0]), "+f"(c[4][1]),
        "+f"(c[4][2]), "+f"(c[4][3]), "+f"(c[5][0]), "+f"(c[5][1]), "+f"(c[5][2]), "+f"(c[5][3]),
        "+f"(c[6][0]), "+f"(c[6][1]), "+f"(c[6][2]), "+f"(c[6][3]), "+f"(c[7][0]), "+f"(c[7][1]),
        "+f"(c[7][2]), "+f"(c[7][3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(int{kAdd}));
}
#endif

// A lane's codes of 16 outputs and 32 inputs as A operands, over kInt4Unit. They are there when this has been made:
// what waits after it does not wait before.
struct Int4Codes {
  uint32_t a[2][4] = {};

  Int4Codes() = default;

  __device__ Int4Codes(uint32_t first, uint32_t second) {
    int4_parts(first, a[0]);
    int4_parts(second, a[1]);
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(a[0][i]), "+r"(a[1][i]));
  }
};

// 16 outputs of a warp's tile times 8 * kNT rows, under way: the codes and the sum of their 32 inputs.
template <int kNT>
struct Int4Group {
  Int4Codes codes;
  float sum[kNT][4] = {};

  __device__ Int4Group() {}

  // Begins the product of the codes with the rows at b.
  __device__ void begin(const Int4Codes& of, uint64_t b) {
    constexpr uint64_t kSixteenInputs = 32 >> 4;
    codes = of;
    wgmma_begin();
    wgmma<false>(sum, codes.a[0], b);
    wgmma<true>(sum, codes.a[1], b + kSixteenInputs);
    wgmma_commit();
  }

  // Waits for all groups but the kPending begun last; this one is not of these.
  template <int kPending>
  __device__ void wait() {
    wgmma_wait<kPending>();
#pragma unroll
    for (int i = 0; i < 4; ++i)  // not free before
      asm volatile("" ::"r"(codes.a[0][i]), "r"(codes.a[1][i]));
#pragma unroll
    for (int n = 0; n < kNT; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(sum[n][i])::"memory");  // nor there
  }

  // to += scale * the sum; low, high: of the outputs g and g + 8, bf16 in the halves of a word
  __device__ void add_to(float (&to)[kNT][4], uint32_t scale) const {
    const float low = __uint_as_float(scale << 16), high = __uint_as_float(scale & ~0xffffu);
#pragma unroll
    for (int n = 0; n < kNT; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) to[n][i] = fmaf(i < 2 ? low : high, sum[n][i], to[n][i]);
  }
};

}  // namespace kdtree::cuda
