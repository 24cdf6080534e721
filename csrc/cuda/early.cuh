// A kernel that begins before the one before it has ended: Grid::early, sm_90 on.
#pragma once

namespace kdtree::cuda {

// The kernel launched after this one, if early, may begin from here on, where it finds room.
__device__ inline void let_next_begin() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
// Of an early kernel: the kernel before it has ended and what it wrote is seen. Every thread that
// reads or writes calls it before, and some thread of every block at all, so that the wait of the
// next kernel is for all that came before. What a thread touches before it calls (moe_one_down,
// moe_few_down, moe_experts_int4's sum, latent_merge) must stand since before the kernel before it,
// which must let it in after its own wait: not by begin_early.
__device__ inline void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// Both, first thing: of a kernel whose blocks take little room, so that the next one's launch is
// over by the time that it ends.
__device__ inline void begin_early() {
  let_next_begin();
  wait_for_previous();
}

}  // namespace kdtree::cuda
