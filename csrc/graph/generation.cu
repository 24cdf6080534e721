// A WHILE node around a captured round, and the kernel at the end of its body.
//
// The kernel is one block: it moves `words` words over PCIe to the host and reads 3 + B of them back
// in one go. Floor: the latency of that read, about 1 us; the writes are not waited for by the next
// round, only by the fence that puts a record before its count.
#include "graph.cuh"

namespace kdtree::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) end_of_round(GenerationParams p) {
  __shared__ int64_t control[kEnded];
  volatile int64_t* shared = p.control;
  const int t = static_cast<int>(threadIdx.x);
  if (t < kEnded) control[t] = shared[t];
  int active = 0;
  for (int b = t; b < p.B; b += kThreads) {
    if (shared[kEnded + b]) p.active[b] = false;
    active += p.active[b];
  }
  __syncthreads();
  const int64_t round = control[kRounds];
  int64_t* record = p.ring + round % p.slots * p.words;
  for (int i = t; i < p.words; i += kThreads) record[i] = p.packed[i];
  __threadfence_system();
  __shared__ int running;
  if (t == 0) running = 0;
  __syncthreads();
  if (active) atomicAdd(&running, active);
  __syncthreads();
  if (t != 0) return;
  shared[kRounds] = round + 1;
  const bool room = round + 1 - control[kRead] < p.slots;
  cudaGraphSetConditional(p.condition, room && running >= control[kLeast]);
}

}  // namespace

Generation::Generation(int device, cudaGraph_t round, GenerationParams p) : Graph(device) {
  require_graph("round", round);
  require_some("B", p.B);
  require_some("words", p.words);
  require_some("slots", p.slots);
  const DeviceGuard guard(device);
  require_memory("packed", p.packed, device);
  require_memory("active", p.active, device);
  require_memory("ring", p.ring, device, cudaMemoryTypeHost);
  require_memory("control", p.control, device, cudaMemoryTypeHost);

  check(cudaGraphCreate(&graph_, 0));
  cudaGraphConditionalHandle condition;
  check(cudaGraphConditionalHandleCreate(&condition, graph_, 1, cudaGraphCondAssignDefault));
  cudaGraphNodeParams loop = {cudaGraphNodeTypeConditional};
  loop.conditional.handle = condition;
  loop.conditional.type = cudaGraphCondTypeWhile;
  loop.conditional.size = 1;
  cudaGraphNode_t node;
  check(cudaGraphAddNode(&node, graph_, nullptr, nullptr, 0, &loop));

  const cudaGraph_t body = loop.conditional.phGraph_out[0];
  const cudaGraphNode_t child = add_graph(body, round);
  p.condition = condition;
  add_launch(body, child, [&](Stream stream) {
    cuda::launch(end_of_round, {.blocks = 1, .threads = kThreads}, stream, p);
  });
  instantiate();
}

}  // namespace kdtree::cuda
