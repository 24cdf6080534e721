// What graphs are put together with: checks, their device, captured graphs and kernels as nodes.
#pragma once

#include <sstream>

#include "../cuda/common.cuh"
#include "graph.h"

namespace kdtree::cuda {

// Throws, as Python's ValueError, a message that says what is wrong and what is wanted.
template <class... Parts>
void require(bool ok, const Parts&... parts) {
  if (ok) return;
  std::ostringstream message;
  (message << ... << parts);
  throw std::invalid_argument(message.str());
}

inline void require_some(const std::string& name, int n) {
  require(n > 0, name, " is ", n, ", wants at least 1");
}

inline void require_graph(const std::string& name, cudaGraph_t graph) {
  require(graph, name, " is a null handle, wants that of a captured graph");
}

inline std::string text(cudaMemoryType type, int device) {
  switch (type) {
    case cudaMemoryTypeDevice:
      return "memory of device " + std::to_string(device);
    case cudaMemoryTypeHost:
      return "pinned memory of the host";
    case cudaMemoryTypeManaged:
      return "managed memory";
    default:
      return "memory that CUDA does not know";
  }
}

// That p is memory of this device, or pinned memory of the host where that is wanted.
inline void require_memory(const std::string& name, const void* p, int device,
                           cudaMemoryType wants = cudaMemoryTypeDevice) {
  require(p, name, " is a null pointer, wants ", text(wants, device));
  cudaPointerAttributes is;
  check(cudaPointerGetAttributes(&is, p));
  const bool there = wants == cudaMemoryTypeHost || is.device == device;
  require(is.type == wants && there, name, " is ", text(is.type, is.device), ", wants ",
          text(wants, device));
}

// Makes a device the current one while it lives, and touches no other one where it is that already:
// to make a device current gives it a context.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    int count;
    check(cudaGetDeviceCount(&count));
    require(device >= 0 && device < count, "device is ", device, ", wants 0 to ", count - 1);
    check(cudaGetDevice(&before_));
    if (before_ != device) check(cudaSetDevice(device));
    cudaGetLastError();  // forgets that of a graph that was refused
  }
  ~DeviceGuard() {
    int now;
    if (cudaGetDevice(&now) == cudaSuccess && now != before_) cudaSetDevice(before_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int before_;
};

// A copy of a captured graph, the first node of `graph`.
inline cudaGraphNode_t add_graph(cudaGraph_t graph, cudaGraph_t captured) {
  cudaGraphNode_t node;
  check(cudaGraphAddChildGraphNode(&node, graph, nullptr, 0, captured));
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
