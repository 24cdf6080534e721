// How a checker of shared memory sees handshakes that the kernels use. Each is one that PTX's memory
// model orders: what a thread did before a barrier of its warp or group is before what the thread that
// then arrives at an mbarrier tells. racecheck follows an mbarrier from the arriving thread alone.
//
//   nvcc -std=c++20 -lineinfo -gencode=arch=compute_90a,code=sm_90a handshakes.cu -o handshakes
//   for i in 0 1 2 3 4 5; do compute-sanitizer --tool racecheck ./handshakes $i; done
//
// 0: a stage that one warp reads and the copy engine fills anew, lane 0 arriving for its warp: hazards.
// 1: the same with every lane arriving: none. 2: a group that meets at a named barrier, then one thread
// arrives: hazards. 3: what latent_spread.cuh does, round after round: hazards. 4: that with every lane
// arriving: none. 5: that in a cluster of two blocks, every lane arriving in both: none.
#include <cstdio>

#include "../../csrc/cuda/tensor_cores/barrier.cuh"

using namespace kdtree::cuda;

constexpr int kGroup = 128, kRounds = 4;

__device__ void copy_bulk(uint32_t to, const void* from, int bytes, uint32_t full) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to), "l"(from), "r"(bytes), "r"(full)
      : "memory");
}

template <bool kAll>
__global__ void refill(const int* from, int* out) {
  __shared__ __align__(128) int stage[kWarp];
  __shared__ uint64_t barriers[2];
  const uint32_t full = shared_address(&barriers[0]), empty = shared_address(&barriers[1]);
  const int lane = threadIdx.x % kWarp;
  if (threadIdx.x == 0) {
    Barrier::init(full, 1), Barrier::init(empty, kAll ? kWarp : 1);
    Barrier::fence_init();
  }
  __syncthreads();
  int sum = 0;
  for (int i = 0; i < kRounds; ++i) {
    if (threadIdx.x == 0) {
      if (i > 0) Barrier::wait(empty, (i - 1) % 2);
      Barrier::expect(full, sizeof(stage));
      copy_bulk(shared_address(stage), from, sizeof(stage), full);
    } else if (threadIdx.x >= kWarp) {
      Barrier::wait(full, i % 2);
      sum += stage[lane ^ 5];
      __syncwarp();
      if (kAll || lane == 0) Barrier::arrive(empty);
    }
  }
  out[threadIdx.x] = sum;
}

__global__ void tell(int* out) {
  __shared__ int told[kGroup];
  __shared__ uint64_t barrier;
  const uint32_t at = shared_address(&barrier);
  if (threadIdx.x == 0) Barrier::init(at, 1), Barrier::fence_init();
  __syncthreads();
  if (threadIdx.x < kGroup) {
    told[threadIdx.x] = threadIdx.x;
    asm volatile("bar.sync 1, %0;" ::"n"(kGroup) : "memory");
    if (threadIdx.x == 0) Barrier::arrive(at);
  } else {
    Barrier::wait(at, 0);
    out[threadIdx.x] = told[threadIdx.x - kGroup];
  }
}

template <bool kAll, int kBlocks>
__global__ void __cluster_dims__(kBlocks) rounds(int* out) {
  __shared__ int told[kGroup / 4];
  __shared__ uint64_t barrier;
  const uint32_t done = shared_address(&barrier);
  if (threadIdx.x == 0) {
    Barrier::init(done, kBlocks * (kAll ? kGroup : kGroup / kWarp));
    Barrier::fence_init();
  }
  cluster_sync();
  int sum = 0;
  for (int i = 0; i < kRounds; ++i) {
    if (threadIdx.x < kGroup) {
      if (i > 0) Barrier::wait_for_cluster(done, (i - 1) % 2);
      if (threadIdx.x % 4 == 0) told[threadIdx.x / 4] = threadIdx.x + i;
      __syncwarp();
      asm volatile("bar.arrive 3, %0;" ::"n"(2 * kGroup) : "memory");
      asm volatile("bar.sync 1, %0;" ::"n"(kGroup) : "memory");
    } else {
      asm volatile("bar.sync 3, %0;" ::"n"(2 * kGroup) : "memory");
      sum += told[(threadIdx.x - kGroup) / 4];
      __syncwarp();
      if (kAll || threadIdx.x % kWarp == 0)
        for (int block = 0; block < kBlocks; ++block)
          if (kBlocks == 1)
            Barrier::arrive(done);
          else
            Barrier::arrive_in(block, done);
    }
  }
  cluster_sync();
  out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

int main(int, char** arguments) {
  int *from, *out;
  check(cudaMalloc(&from, 4096)), check(cudaMalloc(&out, 4096));
  check(cudaMemset(from, 0, 4096));
  switch (arguments[1] ? arguments[1][0] : 0) {
    case '0':
      refill<false><<<1, 2 * kWarp>>>(from, out);
      break;
    case '1':
      refill<true><<<1, 2 * kWarp>>>(from, out);
      break;
    case '2':
      tell<<<1, 2 * kGroup>>>(out);
      break;
    case '3':
      rounds<false, 1><<<1, 2 * kGroup>>>(out);
      break;
    case '4':
      rounds<true, 1><<<1, 2 * kGroup>>>(out);
      break;
    case '5':
      rounds<true, 2><<<2, 2 * kGroup>>>(out);
      break;
    default:
      return std::puts("which handshake? 0 to 5"), 1;
  }
  check(cudaDeviceSynchronize());
}
