// Generations: see generation.h. They are objects behind an integer, and there are none on a CPU.
#include "generation.h"

#include "ops.h"

namespace kdtree {
namespace {

#ifdef KDTREE_CUDA

void check_pinned(const char* name, const Tensor& t, int64_t numel) {
  require(!t.is_cuda() && t.is_contiguous() && t.scalar_type() == ScalarType::Long, name,
          " must be contiguous Long memory of the host");
  require(t.numel() == numel, name, " has ", t.numel(), " elements, wants ", numel);
}

// graph: a cudaGraph_t as an integer; slots: of the ring
int64_t generation_build(int64_t graph, const Tensor packed, const Tensor active, const Tensor ring,
                         const Tensor control) {
  check_dim("packed", packed, 2);
  const int64_t B = packed.size(0), words = packed.numel();
  check("packed", packed, {B, packed.size(1)}, ScalarType::Long, active);
  check("active", active, {B}, ScalarType::Bool, active);
  check_dim("ring", ring, 2);
  const int64_t slots = ring.size(0);
  require(slots > 0 && words > 0, "ring has ", slots, " slots for ", words, " words, wants some");
  check_pinned("ring", ring, slots * words);
  check_pinned("control", control, kEnded + B);
  const torch::stable::accelerator::DeviceGuard guard(active.get_device_index());
  return cuda::generation_build(
      {
          .packed = data<int64_t>(packed),
          .active = mutable_data<bool>(active),
          .ring = mutable_data<int64_t>(ring),
          .control = mutable_data<int64_t>(control),
          .condition = 0,
          .B = extent("active", B),
          .words = extent("packed", words),
          .slots = extent("ring", slots),
      },
      static_cast<uint64_t>(graph));
}

void generation_launch(const Tensor active, int64_t generation) {
  const torch::stable::accelerator::DeviceGuard guard(active.get_device_index());
  void* stream = nullptr;
  require(aoti_torch_get_current_cuda_stream(active.get_device_index(), &stream) == 0,
          "no current CUDA stream");
  cuda::generation_launch(generation, static_cast<Stream>(stream));
}

void generation_free(const Tensor active, int64_t generation) { cuda::generation_free(generation); }

#endif

}  // namespace

#ifdef KDTREE_CUDA
STABLE_TORCH_LIBRARY_IMPL(kdtree, CUDA, m) {
  m.impl("generation_build", TORCH_BOX(&generation_build));
  m.impl("generation_launch", TORCH_BOX(&generation_launch));
  m.impl("generation_free", TORCH_BOX(&generation_free));
}
#endif

}  // namespace kdtree
