// What a generation and a choice share: their graph, which is launched as a whole.
#include "graph.cuh"

namespace kdtree::cuda {

Graph::~Graph() {
  if (!graph_) return;
  int before = 0;  // no guard, which may throw
  cudaGetDevice(&before);
  cudaSetDevice(device_);
  cudaDeviceSynchronize();
  if (exec_) cudaGraphExecDestroy(exec_);
  cudaGraphDestroy(graph_);
  cudaSetDevice(before);
}

void Graph::launch(Stream stream) const {
  const DeviceGuard guard(device_);
  check(cudaGraphLaunch(exec_, stream));
}

}  // namespace kdtree::cuda
