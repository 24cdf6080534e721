// Python's face of kdtree._graph: handles and addresses come as integers.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <tuple>

#include "graph.h"

namespace py = pybind11;

namespace kdtree::cuda {
namespace {

using Address = uint64_t;
using Round = std::tuple<Address, Address, int64_t>;  // graph, packed, words

template <class T>
T at(Address address) {
  return reinterpret_cast<T>(address);
}

// keeps: what must live as long
std::unique_ptr<Generation> generation(int device, Address round, Address packed, Address active,
                                       Address ring, Address control, int B, int words, int slots,
                                       const py::object& keeps) {
  return std::make_unique<Generation>(device, at<CUgraph_st*>(round),
                                      GenerationParams{
                                          .packed = at<const int64_t*>(packed),
                                          .active = at<bool*>(active),
                                          .ring = at<int64_t*>(ring),
                                          .control = at<int64_t*>(control),
                                          .condition = 0,
                                          .B = B,
                                          .words = words,
                                          .slots = slots,
                                      });
}

std::unique_ptr<Choice> choice(int device, Address before, Address choice, Address record,
                               int64_t room, const std::vector<Round>& rounds,
                               const py::object& keeps) {
  ChoiceParams p = {
      .choice = at<const int32_t*>(choice),
      .record = at<int64_t*>(record),
      .room = room,
      .rounds = {},
  };
  for (const auto& [graph, packed, words] : rounds)
    p.rounds.push_back({at<CUgraph_st*>(graph), at<const int64_t*>(packed), words});
  return std::make_unique<Choice>(device, at<CUgraph_st*>(before), p);
}

void launch(const Graph& graph, Address stream) { graph.launch(at<Stream>(stream)); }

// They let Python go on while they wait, for the driver or, when they are freed, for the last launch.
void define(py::module_& m) {
  using namespace py::literals;
  const py::release_gil_before_calling_cpp_dtor waits;
  py::class_<Graph>(m, "Graph", waits)
      .def("launch", &launch, "stream"_a, py::call_guard<py::gil_scoped_release>());
  py::class_<Generation, Graph>(m, "Generation", waits)
      .def(py::init(&generation), py::kw_only(), "device"_a, "round"_a, "packed"_a, "active"_a,
           "ring"_a, "control"_a, "B"_a, "words"_a, "slots"_a, "keeps"_a, py::keep_alive<1, 11>());
  py::class_<Choice, Graph>(m, "Choice", waits)
      .def(py::init(&choice), py::kw_only(), "device"_a, "before"_a, "choice"_a, "record"_a,
           "room"_a, "rounds"_a, "keeps"_a, py::keep_alive<1, 8>());
}

}  // namespace
}  // namespace kdtree::cuda

PYBIND11_MODULE(_graph, m) {
  m.doc() = "A generation and a choice on the device: csrc/graph/graph.h";
  kdtree::cuda::define(m);
}
