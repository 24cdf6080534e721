// Checks that the ops about the latent cache share.
#pragma once

#include "ops.h"

namespace kdtree {

// The rotation table.
inline void check_rope(const Tensor& rope, const Tensor& like) {
  check_dim("rope", rope, 2);
  check("rope", rope, {rope.size(0), rope.size(1)}, ScalarType::Float, like);
  require(rope.size(1) % 2 == 0, "rope has ", rope.size(1), " features, wants an even number");
  require(rope.size(0) > 0, "rope has no positions");
}

// And, per row, a position.
inline void check_rope(const Tensor& rope, const Tensor& position, int64_t rows, const Tensor& like) {
  check_rope(rope, like);
  check("position", position, {rows}, ScalarType::Int, like);
}

// A tensor whose features alone must be contiguous, of like's dtype and device.
inline void check_features(const char* name, const Tensor& t, std::initializer_list<int64_t> shape,
                    const Tensor& like) {
  const torch::headeronly::IntHeaderOnlyArrayRef wants(shape.begin(), shape.size());
  const int64_t last = t.dim() - 1;
  require(t.sizes() == wants, name, " has shape ", text(t.sizes()), ", wants ", text(wants));
  require(t.scalar_type() == like.scalar_type(), name, " has dtype ", t.scalar_type(), ", wants ",
          like.scalar_type());
  check_device(name, t, like);
  require(t.size(last) <= 1 || t.stride(last) == 1, name, " must have contiguous features");
}

inline void check_pages(const char* name, const Tensor& t, int64_t dim) {
  check_dim(name, t, dim);
  require(t.size(dim - 2) == kPage, name, " has pages of ", t.size(dim - 2), " tokens, wants ",
          kPage);
  require(t.is_contiguous(), name, " must be contiguous");
}

// Rows of FP8 latents: see attention.h.
inline void check_fp8(const Tensor& cache, int64_t C, int64_t R) {
  require(C % kFp8Align == 0, "the cache's latents are FP8, but have ", C,
          " features, wants a multiple of ", kFp8Align);
  require(cache.size(2) == fp8_row_bytes(C, R), "cache has rows of ", cache.size(2),
          " bytes, wants ", fp8_row_bytes(C, R), " for FP8 latents of ", C, " and ", R, " features");
  require(reinterpret_cast<uintptr_t>(cache.const_data_ptr()) % kFp8Align == 0,
          "cache must start at a multiple of ", kFp8Align, " bytes");
}

inline void check_table(const Tensor& block_table, int64_t B, const Tensor& like) {
  check_dim("block_table", block_table, 2);
  check("block_table", block_table, {B, block_table.size(1)}, ScalarType::Int, like);
  extent("block_table's tokens", block_table.size(1) * kPage);
}

}  // namespace kdtree
