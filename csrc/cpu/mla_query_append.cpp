#include "mla.h"

namespace kdtree::cpu {

void mla_query_append(const MlaQueryAppendParams& p, Stream stream) {
  mla_append(p.append, stream);
  mla_query(p.query, stream);
}

}  // namespace kdtree::cpu
