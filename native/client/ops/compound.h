// Sparse tensors of the client: torch's own classes, whose parts are device tensors.
#pragma once

#include "oplog/compound.h"

namespace sing::client {

inline bool is_compound(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() != at::kStrided;
}

// Returns a sparse tensor of parts that the worker has made.
at::Tensor assemble(const Compound& compound, const Parts& parts);

// Replaces the contents of a sparse tensor that an operator has changed by the worker's result.
void replace(const at::Tensor& self, const at::Tensor& changed);

}  // namespace sing::client
