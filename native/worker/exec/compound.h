// Sparse operands: made of parts that a record names.
#pragma once

#include "oplog/compound.h"

namespace sing {

// The sparse tensor of these parts. Raises an error if they do not make one: kernels go where the
// indices lead, unchecked. It looks at the indices, so it waits for the device.
at::Tensor assemble(const Compound& compound, const Parts& parts);

}  // namespace sing
