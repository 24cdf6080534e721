#include <algorithm>

#include "fp8.h"
#include "mla.h"

namespace kdtree::cpu {
namespace {

// The norm's factor of a row.
template <class Element>
double norm_scale(const MlaAppendParams& p, const Element* x) {
  double sum = 0;
  for (int c = 0; c < p.C; ++c) sum += double(x[c]) * double(x[c]);
  return 1 / std::sqrt(sum / p.C + p.eps);
}

template <class Element>
void append_fp8(const MlaAppendParams& p, const Element* x, double norm, uint8_t* y) {
  const auto* w = static_cast<const Element*>(p.w);
  const auto latent = [&](int c) { return float(double(x[c]) * norm * double(w[c])); };
  float most = 0;
  for (int c = 0; c < p.C; ++c) most = std::fmax(most, std::fabs(latent(c)));
  const float scale = fp8_scale(most);
  for (int c = 0; c < p.C; ++c) y[c] = to_e4m3(latent(c) / scale);
  std::memcpy(y + p.C, &scale, sizeof scale);
}

template <class Element>
void append_row(const MlaAppendParams& p, int64_t t) {
  if (p.slot[t] < 0 || p.slot[t] >= p.slots) return;
  const auto* x = static_cast<const Element*>(p.kv) + t * p.kv_stride;
  const auto* w = static_cast<const Element*>(p.w);
  const double norm = norm_scale(p, x);
  const int position = std::clamp(p.position[t], 0, p.positions - 1);
  const float* table = p.rope + int64_t{position} * p.R;
  if (p.fp8_bytes) {
    uint8_t* y = static_cast<uint8_t*>(p.cache) + int64_t{p.slot[t]} * p.fp8_bytes;
    append_fp8(p, x, norm, y);
    return rotate(x + p.C, table, p.R, p.interleaved, rope_of(y, p.C));
  }
  auto* y = static_cast<Element*>(p.cache) + int64_t{p.slot[t]} * (p.C + p.R);
  for (int c = 0; c < p.C; ++c) y[c] = Element(float(double(x[c]) * norm * double(w[c])));
  rotate(x + p.C, table, p.R, p.interleaved, y + p.C);
}

}  // namespace

void mla_append(const MlaAppendParams& p, Stream) {
  constexpr int kGrain = 16;  // rows worth a thread
  parallel_for(p.T, kGrain, [&](int64_t begin, int64_t end) {
    dispatch(p.dtype, [&](auto element) {
      for (int64_t t = begin; t < end; ++t) append_row<decltype(element)>(p, t);
    });
  });
}

}  // namespace kdtree::cpu
