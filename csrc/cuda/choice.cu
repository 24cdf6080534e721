// Captured rounds of which the device runs the one that it has chosen: a SWITCH node after the choice.
//
// The kernel before the node is one thread, which passes the choice on and writes it before the
// record. Floor: 12 bytes, launch latency; and the record's copy after the round.
#include "made_graph.cuh"

namespace kdtree::cuda {
namespace {

struct SwitchParams {
  const int32_t* choice;
  int64_t* record;
  uint64_t condition;
};

__global__ void switch_kernel(SwitchParams p) {
  *p.record = *p.choice;
  cudaGraphSetConditional(p.condition, static_cast<unsigned>(*p.choice));
}

}  // namespace

int64_t choice_build(ChoiceParams p, uint64_t before) {
  auto made = std::make_unique<MadeGraph>();
  check(cudaGraphCreate(&made->graph, 0));
  const cudaGraphNode_t head = add_graph(made->graph, before);
  cudaGraphConditionalHandle condition;
  check(cudaGraphConditionalHandleCreate(&condition, made->graph, 0, 0));
  const cudaGraphNode_t set = add_launch(made->graph, head, [&](Stream stream) {
    launch(switch_kernel, {1, 1}, stream, SwitchParams{p.choice, p.record, condition});
  });
  cudaGraphNodeParams branch = {cudaGraphNodeTypeConditional};
  branch.conditional.handle = condition;
  branch.conditional.type = cudaGraphCondTypeSwitch;
  branch.conditional.size = p.count;
  cudaGraphNode_t node;
  check(cudaGraphAddNode(&node, made->graph, &set, nullptr, 1, &branch));
  made->bodies = std::make_unique<cudaGraph_t[]>(p.count);
  for (int i = 0; i < p.count; ++i) made->bodies[i] = branch.conditional.phGraph_out[i];
  return reinterpret_cast<int64_t>(made.release());
}

void choice_add(int64_t made, int number, uint64_t round, const int64_t* packed, int64_t words,
                int64_t* record) {
  const cudaGraph_t body = reinterpret_cast<MadeGraph*>(made)->bodies[number];
  const cudaGraphNode_t child = add_graph(body, round);
  cudaGraphNode_t copy;
  check(cudaGraphAddMemcpyNode1D(&copy, body, &child, 1, record + 1, packed,
                                 words * sizeof(int64_t), cudaMemcpyDeviceToDevice));
}

void choice_end(int64_t made) {
  auto* choice = reinterpret_cast<MadeGraph*>(made);
  check(cudaGraphInstantiate(&choice->exec, choice->graph, 0));
}

void graph_launch(int64_t made, Stream stream) {
  check(cudaGraphLaunch(reinterpret_cast<MadeGraph*>(made)->exec, stream));
}

void graph_free(int64_t made) { delete reinterpret_cast<MadeGraph*>(made); }

}  // namespace kdtree::cuda
