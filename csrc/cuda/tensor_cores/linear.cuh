// The kernels of the product of bf16 rows and bf16 weights, which have the same bits.
#pragma once

#include "product.cuh"

namespace kdtree::cuda {

// Whether x and w are made of vectors of 16 bytes.
inline bool in_vectors(const Product& p) {
  return aligned<Bf16>(p.w, p.I) && aligned<Bf16>(p.x, p.x_row) && aligned<Bf16>(p.x, p.x_group);
}

void linear_mma(const Product&, Stream);   // any GPU, any alignment
bool linear_sm90(const Product&, Stream);  // sm_90a and vectors; false: done nothing
bool linear_rows_sm90(Product, Stream);    // likewise, up to 64 rows and a wave of outputs

}  // namespace kdtree::cuda
