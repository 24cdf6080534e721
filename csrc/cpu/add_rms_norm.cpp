#include "norm.h"

namespace kdtree::cpu {
namespace {

template <class Element>
[[gnu::target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")]]
void add_rms_norm_rows(const AddRmsNormParams& p, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t) {
    const auto* x = static_cast<const Element*>(p.x) + t * p.D;
    const auto* residual = static_cast<const Element*>(p.residual) + t * p.D;
    auto* sum = static_cast<Element*>(p.sum) + t * p.D;
    for (int d = 0; d < p.D; ++d) sum[d] = Element(float(x[d]) + float(residual[d]));
    norm_row(sum, static_cast<const Element*>(p.w), static_cast<Element*>(p.y) + t * p.D, p.D,
             p.eps);
  }
}

}  // namespace

void add_rms_norm(const AddRmsNormParams& p, Stream) {
  dispatch(p.dtype, [&](auto element) {
    parallel_for(p.T, norm_grain(p.D), [&](int64_t begin, int64_t end) {
      add_rms_norm_rows<decltype(element)>(p, begin, end);
    });
  });
}

}  // namespace kdtree::cpu
