// Kernels that take operands in the form in which torch's dispatcher has them, unboxed.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

namespace sing::client {

// Returns the kernel that sends this operator.
//
// Note [Boxing]: one kernel for all operators takes its operands boxed on a stack. The stack must
// be allocated and holds another reference to every tensor, for which torch calls into Python. So
// operators with the more frequent signatures have kernels that write their operands directly to
// the record. They handle only known geometries: everything else, such as the first call with a
// geometry, uses call().
torch::CppFunction shipping_kernel(const c10::OperatorHandle& op);

}  // namespace sing::client
