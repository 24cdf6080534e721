// Graphs made of captured ones, as objects. A generation: a captured round again and again, until
// its last kernel says no more. A choice: of several captured rounds the one that the device picks.
//
// They copy the graphs that they are made of, and use the memory that those use. Neither Python's
// headers nor CUDA's may be included here. A constructor throws std::invalid_argument on what it
// can see to be wrong, std::runtime_error where the driver takes no such graph.
#pragma once

#include <vector>

#include "../kdtree.h"

struct CUgraph_st;      // the pointee of cudaGraph_t
struct CUgraphExec_st;  // the pointee of cudaGraphExec_t
struct CUevent_st;      // the pointee of cudaEvent_t

namespace kdtree::cuda {

// What both are.
class Graph {
 public:
  explicit Graph(int device) : device_(device) {}
  ~Graph();  // waits for its last launch
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  void launch(Stream stream) const;  // a stream of its device

 protected:
  void instantiate();  // once graph_ is whole

  const int device_;
  CUgraph_st* graph_ = nullptr;
  CUgraphExec_st* exec_ = nullptr;
  CUevent_st* done_ = nullptr;  // of the last launch
};

// Words of `control`, which both sides see: the device writes the first, the host the others.
enum Control {
  kRounds,  // that are done, their records in the ring
  kRead,    // of them, those that the host has read: the ring has room for `slots` more
  kLeast,   // sequences that must be running for another round
  kEnded,   // from here on, by sequence: not 0 where the host ends it
};

// After each round: ring[round % slots, :] = packed, then rounds += 1; active[b] = false where the
// host says so; another round follows while at least kLeast are active and the ring has room.
struct GenerationParams {
  const int64_t* packed;  // [words], what a round leaves for the host
  bool* active;           // [B]
  int64_t* ring;          // [slots, words], pinned memory of the host
  int64_t* control;       // [3 + B], pinned memory of the host
  uint64_t condition;     // of the WHILE node, which the generation makes
  int B, words, slots;
};

class Generation : public Graph {
 public:
  Generation(int device, CUgraph_st* round, GenerationParams p);
};

// After what comes before, the round number *choice: record[0] = that, then what it left.
struct ChoiceParams {
  struct Round {
    CUgraph_st* graph;
    const int64_t* packed;  // [words], what it leaves
    int64_t words;
  };

  const int32_t* choice;  // [1], a number of `rounds`, else none is run
  int64_t* record;        // [room]
  int64_t room;           // 1 + the most words of a round
  std::vector<Round> rounds;
};

class Choice : public Graph {
 public:
  Choice(int device, CUgraph_st* before, const ChoiceParams& p);
};

}  // namespace kdtree::cuda
