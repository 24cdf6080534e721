// What a generation and a choice share: their graph, which is launched as a whole.
#include "graph.cuh"

namespace kdtree::cuda {

Graph::~Graph() {  // whatever the current device is
  if (done_) cudaEventSynchronize(done_), cudaEventDestroy(done_);
  if (exec_) cudaGraphExecDestroy(exec_);
  if (graph_) cudaGraphDestroy(graph_);
}

void Graph::instantiate() {
  check(cudaEventCreateWithFlags(&done_, cudaEventDisableTiming));
  check(cudaGraphInstantiate(&exec_, graph_, 0));
}

void Graph::launch(Stream stream) const {
  const DeviceGuard guard(device_);
  check(cudaGraphLaunch(exec_, stream));
  check(cudaEventRecord(done_, stream));
}

}  // namespace kdtree::cuda
