// Graphs that are put together of captured ones, and of a few kernels of ours.
#pragma once

#include <memory>

#include "../generation.h"
#include "common.cuh"

namespace kdtree::cuda {

// What an integer of Python's stands for.
struct MadeGraph {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  std::unique_ptr<cudaGraph_t[]> bodies;  // of a choice

  ~MadeGraph() {
    if (exec) cudaGraphExecDestroy(exec);
    if (graph) cudaGraphDestroy(graph);
  }
};

// A copy of a captured graph (cudaGraph_t as an integer), the first node of `graph`.
inline cudaGraphNode_t add_graph(cudaGraph_t graph, uint64_t captured) {
  cudaGraphNode_t node;
  const auto child = reinterpret_cast<cudaGraph_t>(captured);
  check(cudaGraphAddChildGraphNode(&node, graph, nullptr, 0, child));
  return node;
}

// What f(stream) launches, one kernel, after a node of `graph`; returns its node.
template <class F>
cudaGraphNode_t add_launch(cudaGraph_t graph, cudaGraphNode_t after, F&& f) {
  struct CaptureStream {  // which no other work is on
    cudaStream_t stream = nullptr;

    CaptureStream() { check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)); }
    ~CaptureStream() { cudaStreamDestroy(stream); }
  };
  const CaptureStream capture;
  check(cudaStreamBeginCaptureToGraph(capture.stream, graph, &after, nullptr, 1,
                                      cudaStreamCaptureModeThreadLocal));
  f(capture.stream);
  cudaStreamCaptureStatus status;
  const cudaGraphNode_t* last;
  size_t count;
  check(cudaStreamGetCaptureInfo(capture.stream, &status, nullptr, nullptr, &last, nullptr,
                                 &count));
  const cudaGraphNode_t node = *last;
  check(cudaStreamEndCapture(capture.stream, &graph));
  return node;
}

}  // namespace kdtree::cuda
