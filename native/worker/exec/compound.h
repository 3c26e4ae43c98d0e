// Sparse operands: assembled from parts that a record names.
#pragma once

#include "oplog/compound.h"

namespace sing {

// Returns the sparse tensor of these parts. Raises an error if they are inconsistent: kernels
// follow the indices unchecked. It reads the indices, so it waits for the device.
at::Tensor assemble(const Compound& compound, const Parts& parts);

}  // namespace sing
