// Captured rounds of which the device runs the one that it has chosen: a SWITCH node after the choice.
//
// The kernel before the node is one thread, which passes the choice on and writes it before the
// record. Floor: 12 bytes, launch latency; and the record's copy after the round.
#include "graph.cuh"

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

std::string nth(size_t i) { return "round " + std::to_string(i); }

// All that can be told without the device.
void check_params(cudaGraph_t before, const ChoiceParams& p) {
  require_graph("before", before);
  const size_t count = p.rounds.size();
  require(count >= 1 && count <= kMaxNodes, "there are ", count, " rounds, wants 1 to ", kMaxNodes);
  for (size_t i = 0; i < count; ++i) {
    const auto& [graph, packed, words] = p.rounds[i];
    require_graph(nth(i), graph);
    require(words > 0 && words < p.room, nth(i), " leaves ", words, " words, wants 1 to ",
            p.room - 1, ": the record has room for ", p.room);
  }
}

}  // namespace

Choice::Choice(int device, cudaGraph_t before, const ChoiceParams& p) : Graph(device) {
  check_params(before, p);
  const DeviceGuard guard(device);
  require_memory("choice", p.choice, device);
  require_memory("record", p.record, device);

  check(cudaGraphCreate(&graph_, 0));
  const cudaGraphNode_t head = add_graph(graph_, before);
  cudaGraphConditionalHandle condition;
  check(cudaGraphConditionalHandleCreate(&condition, graph_, 0, 0));
  const cudaGraphNode_t set = add_launch(graph_, head, [&](Stream stream) {
    cuda::launch(switch_kernel, {1, 1}, stream, SwitchParams{p.choice, p.record, condition});
  });
  cudaGraphNodeParams branch = {cudaGraphNodeTypeConditional};
  branch.conditional.handle = condition;
  branch.conditional.type = cudaGraphCondTypeSwitch;
  branch.conditional.size = static_cast<unsigned>(p.rounds.size());
  cudaGraphNode_t node;
  check(cudaGraphAddNode(&node, graph_, &set, nullptr, 1, &branch));

  for (size_t i = 0; i < p.rounds.size(); ++i) {
    const auto& [round, packed, words] = p.rounds[i];
    require_memory(nth(i) + "'s packed", packed, device);
    const cudaGraph_t body = branch.conditional.phGraph_out[i];
    const cudaGraphNode_t child = add_graph(body, round);
    cudaGraphNode_t copy;
    check(cudaGraphAddMemcpyNode1D(&copy, body, &child, 1, p.record + 1, packed,
                                   words * sizeof(int64_t), cudaMemcpyDeviceToDevice));
  }
  instantiate();
}

}  // namespace kdtree::cuda
