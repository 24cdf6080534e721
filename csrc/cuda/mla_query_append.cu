// Queries in the cache's space and the appending of the same rows to it: where queries are on tensor
// cores one launch, whose first blocks append while the others' weights are on their way; elsewhere
// two. The bits are those of mla_query and mla_append.
#include "tensor_cores/linear.cuh"
#include "tensor_cores/query_parts.cuh"

namespace kdtree::cuda {

void mla_query_append(const MlaQueryAppendParams& p, Stream stream) {
  if (is_short(p.query) && p.append.C <= kAppendFeatures && !p.append.fp8_bytes)
    return mla_query_short(p.query, p.append, stream);
  mla_append(p.append, stream);
  mla_query(p.query, stream);
}

}  // namespace kdtree::cuda
