// Sparse tensors of the client: torch's own, whose parts are device tensors.
#pragma once

#include "oplog/compound.h"

namespace sing::client {

inline bool is_compound(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() != at::kStrided;
}

// A sparse tensor of parts that the worker has made.
at::Tensor assemble(const Compound& compound, const Parts& parts);

// Makes a sparse tensor, which an operator has changed, what the worker has made of it.
void replace(const at::Tensor& self, const at::Tensor& changed);

}  // namespace sing::client
