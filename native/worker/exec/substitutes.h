// Operators that exist only for CUDA, computed on a software device.
//
// A notebook that sees a `cuda` device issues CUDA's operators. If the CPU has no kernel for one,
// or one whose bits differ from the CPU's own path, a substitute computes it from ATen operators
// such that the result equals that of the same program on `cpu`.
#pragma once

#include <ATen/core/stack.h>

#include <string_view>

namespace sing {

// Takes its operands from the stack and leaves its results there.
using Substitute = void (*)(torch::jit::Stack& stack);

// Returns null if the operator needs none.
Substitute find_substitute(std::string_view full_name);
// The same for a GPU, where few operators need one.
Substitute find_gpu_substitute(std::string_view full_name);

}  // namespace sing
