// Generations and choices: see generation.h. They are objects behind an integer, and there are none on a CPU.
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

// graph: what comes before the choice, as an integer
int64_t choice_build(int64_t graph, const Tensor choice, const Tensor record, int64_t count) {
  check("choice", choice, {1}, ScalarType::Int, choice);
  check_dim("record", record, 1);
  check("record", record, {record.size(0)}, ScalarType::Long, choice);
  require(count >= 1 && count <= kMaxNodes, "count is ", count, ", wants 1 to ", kMaxNodes);
  const torch::stable::accelerator::DeviceGuard guard(record.get_device_index());
  return cuda::choice_build(
      {
          .choice = data<int32_t>(choice),
          .record = mutable_data<int64_t>(record),
          .count = static_cast<int>(count),
      },
      static_cast<uint64_t>(graph));
}

void choice_add(int64_t made, int64_t number, int64_t graph, const Tensor packed,
                const Tensor record) {
  check_dim("record", record, 1);
  check("record", record, {record.size(0)}, ScalarType::Long, packed);
  check_dim("packed", packed, 2);
  check("packed", packed, {packed.size(0), packed.size(1)}, ScalarType::Long, record);
  require(packed.numel() < record.size(0), "packed has ", packed.numel(), " words, record room for ",
          record.size(0) - 1);
  const torch::stable::accelerator::DeviceGuard guard(record.get_device_index());
  cuda::choice_add(made, static_cast<int>(number), static_cast<uint64_t>(graph),
                   data<int64_t>(packed), packed.numel(), mutable_data<int64_t>(record));
}

void choice_end(const Tensor record, int64_t made) {
  const torch::stable::accelerator::DeviceGuard guard(record.get_device_index());
  cuda::choice_end(made);
}

void graph_launch(const Tensor on, int64_t made) {
  const torch::stable::accelerator::DeviceGuard guard(on.get_device_index());
  void* stream = nullptr;
  require(aoti_torch_get_current_cuda_stream(on.get_device_index(), &stream) == 0,
          "no current CUDA stream");
  cuda::graph_launch(made, static_cast<Stream>(stream));
}

void graph_free(const Tensor on, int64_t made) { cuda::graph_free(made); }

#endif

}  // namespace

#ifdef KDTREE_CUDA
STABLE_TORCH_LIBRARY_IMPL(kdtree, CUDA, m) {
  m.impl("generation_build", TORCH_BOX(&generation_build));
  m.impl("choice_build", TORCH_BOX(&choice_build));
  m.impl("choice_add", TORCH_BOX(&choice_add));
  m.impl("choice_end", TORCH_BOX(&choice_end));
  m.impl("graph_launch", TORCH_BOX(&graph_launch));
  m.impl("graph_free", TORCH_BOX(&graph_free));
}
#endif

}  // namespace kdtree
