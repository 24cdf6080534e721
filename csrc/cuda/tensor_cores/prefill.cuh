// mla_prefill on tensor cores: the one shape, in bf16, and who runs it.
#pragma once

#include "../../launchers.h"

namespace kdtree::cuda {

inline constexpr int kPrefillNope = 128, kPrefillRope = 64, kPrefillValue = 128;

// By wgmma; throws where the copy engine cannot take the tensors.
void prefill_sm90(const MlaPrefillParams& p, Stream stream);

}  // namespace kdtree::cuda
