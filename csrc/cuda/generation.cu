// A WHILE node around a captured round, and the kernel at the end of its body.
//
// The kernel is one block: it moves `words` words over PCIe to the host and reads 3 + B of them back
// in one go. Floor: the latency of that read, about 1 us; the writes are not waited for by the next
// round, only by the fence that puts a record before its count.
#include <memory>

#include "../generation.h"
#include "common.cuh"

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

struct Generation {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;

  ~Generation() {
    if (exec) cudaGraphExecDestroy(exec);
    if (graph) cudaGraphDestroy(graph);
  }
};

// A stream to capture on, which no other work is on.
struct CaptureStream {
  cudaStream_t stream = nullptr;

  CaptureStream() { check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)); }
  ~CaptureStream() { cudaStreamDestroy(stream); }
};

}  // namespace

int64_t generation_build(GenerationParams p, uint64_t round) {
  auto made = std::make_unique<Generation>();
  check(cudaGraphCreate(&made->graph, 0));
  cudaGraphConditionalHandle condition;
  check(cudaGraphConditionalHandleCreate(&condition, made->graph, 1, cudaGraphCondAssignDefault));
  cudaGraphNodeParams loop = {cudaGraphNodeTypeConditional};
  loop.conditional.handle = condition;
  loop.conditional.type = cudaGraphCondTypeWhile;
  loop.conditional.size = 1;
  cudaGraphNode_t node, child;
  check(cudaGraphAddNode(&node, made->graph, nullptr, nullptr, 0, &loop));

  cudaGraph_t body = loop.conditional.phGraph_out[0];
  check(cudaGraphAddChildGraphNode(&child, body, nullptr, 0, reinterpret_cast<cudaGraph_t>(round)));
  p.condition = condition;
  const CaptureStream capture;
  check(cudaStreamBeginCaptureToGraph(capture.stream, body, &child, nullptr, 1,
                                      cudaStreamCaptureModeThreadLocal));
  launch(end_of_round, {.blocks = 1, .threads = kThreads}, capture.stream, p);
  check(cudaStreamEndCapture(capture.stream, &body));
  check(cudaGraphInstantiate(&made->exec, made->graph, 0));
  return reinterpret_cast<int64_t>(made.release());
}

void generation_launch(int64_t generation, Stream stream) {
  check(cudaGraphLaunch(reinterpret_cast<Generation*>(generation)->exec, stream));
}

void generation_free(int64_t generation) { delete reinterpret_cast<Generation*>(generation); }

}  // namespace kdtree::cuda
