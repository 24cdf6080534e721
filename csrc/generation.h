// Graphs made of captured ones. A generation on the device: a captured round again and again, until
// its last kernel says no more. A choice: of several captured rounds the one that the device picks.
#pragma once

#include "kdtree.h"

namespace kdtree {

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
  uint64_t condition;     // of the WHILE node; set by generation_build
  int B, words, slots;
};

// After what comes before, the round number *choice: record[0] = that, then what it left.
struct ChoiceParams {
  const int32_t* choice;  // below `count`, else no round is run
  int64_t* record;        // [1 + the most words of a round]
  int count;
};

namespace cuda {

// Captured graphs (cudaGraph_t), which are copied, come and made ones go as integers. All throw
// std::runtime_error where the driver takes no such graph.
int64_t generation_build(GenerationParams p, uint64_t round);
int64_t choice_build(ChoiceParams p, uint64_t before);
void choice_add(int64_t made, int number, uint64_t round, const int64_t* packed, int64_t words,
                int64_t* record);
void choice_end(int64_t made);  // when every number has its round
void graph_launch(int64_t made, Stream stream);
void graph_free(int64_t made);

}  // namespace cuda

}  // namespace kdtree
