// A generation on the device: a captured round again and again, until its last kernel says no more.
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

namespace cuda {

// round: a captured graph (CUgraph), which is copied. Returns what the others take. Throws
// std::runtime_error where the driver takes no such graph.
int64_t generation_build(GenerationParams p, uint64_t round);
void generation_launch(int64_t generation, Stream stream);
void generation_free(int64_t generation);

}  // namespace cuda

}  // namespace kdtree
