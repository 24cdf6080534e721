// linear of few inputs, and queries in the cache's space: short_product.cuh has the kernel.
#include "short_product.cuh"

namespace kdtree::cuda {

void linear_short(const Product& p, Stream stream) {
  short_product({.p = p, .y_row = int64_t{p.G} * p.O, .y_group = p.O}, stream);
}

void mla_query_short(const MlaQueryParams& p, const MlaAppendParams& append, Stream stream) {
  const Product product{
      .w = p.w_uk,
      .x = static_cast<const Bf16*>(p.q),
      .y = p.out,
      .x_row = p.q_stride,
      .x_group = p.P + p.R,
      .T = p.T,
      .G = p.H,
      .O = p.C,
      .I = p.P,
      .y_dtype = p.dtype,
  };
  const Rotation rotation{.rope = p.rope,
                          .position = p.position,
                          .R = p.R,
                          .positions = p.positions,
                          .interleaved = p.interleaved};
  const int64_t head = p.C + p.R;
  short_product({.p = product,
                 .y_row = p.H * head,
                 .y_group = head,
                 .rotation = rotation,
                 .append = append},
                stream);
}

}  // namespace kdtree::cuda
