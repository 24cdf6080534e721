// Descriptions of tensors for the copy engine, made on the host.
#pragma once

#include <cuda.h>

#include "../common.cuh"

namespace kdtree::cuda {

// The driver's function that describes a tensor.
inline auto tensor_encoder() {
  static const auto encode = [] {
    void* found;
    cudaDriverEntryPointQueryResult result;
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000,
                                           cudaEnableDefault, &result));
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found);
  }();
  return encode;
}

// A tensor of three dimensions, the innermost first, in boxes.
struct Boxes {
  const void* at;
  uint64_t sizes[3], strides[2];  // elements; bytes of the second and third dimension
  uint32_t box[3];
  CUtensorMapDataType type = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_NONE;
};

// false where the strides are none that the copy engine takes.
inline bool describe(CUtensorMap& map, const Boxes& b) {
  const cuuint64_t sizes[] = {b.sizes[0], b.sizes[1], b.sizes[2]};
  const cuuint64_t strides[] = {b.strides[0], b.strides[1]};
  const cuuint32_t steps[] = {1, 1, 1};
  return tensor_encoder()(&map, b.type, 3, const_cast<void*>(b.at), sizes, strides, b.box, steps,
                          CU_TENSOR_MAP_INTERLEAVE_NONE, b.swizzle,
                          CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                          CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// The same of a tensor of four dimensions without holes; bytes: of an element.
inline bool describe_dense(CUtensorMap& map, CUtensorMapDataType type, int bytes, const void* at,
                           const cuuint64_t (&sizes)[4], const cuuint32_t (&box)[4]) {
  const cuuint64_t strides[] = {sizes[0] * bytes, sizes[0] * sizes[1] * bytes,
                                sizes[0] * sizes[1] * sizes[2] * bytes};
  const cuuint32_t steps[] = {1, 1, 1, 1};
  return tensor_encoder()(&map, type, 4, const_cast<void*>(at), sizes, strides, box, steps,
                          CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
                          CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                          CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace kdtree::cuda
