// Operators of CUDA that the host computes.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace sing_double {

// Executes an operator of the CPU instead of that of CUDA. The results arrive in the order of the
// current stream. An index out of range is a fault of the card, as in CUDA's kernels.
void on_host(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

}  // namespace sing_double
