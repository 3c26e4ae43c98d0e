// Kernels that take operands as torch's dispatcher has them.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

namespace sing::client {

// The kernel that ships this operator.
//
// Note [Boxing]: one kernel for all operators takes its operands in boxes on a stack, which has to
// be allocated, and holds every tensor once more, for which torch asks Python. So operators of the
// more frequent signatures have kernels that write their operands to the record as they come. Only
// what is known is done so: everything else, such as the first call with a geometry, goes by
// call().
torch::CppFunction shipping_kernel(const c10::OperatorHandle& op);

}  // namespace sing::client
