// Operators that exist for CUDA only, computed on a software device.
//
// A notebook that sees a `cuda` device issues CUDA's operators. Where the CPU has no kernel for
// one, or one with other bits than the CPU's own path gives, a substitute computes it from ATen
// operators such that the result is that of the same program on `cpu`.
#pragma once

#include <ATen/core/stack.h>

#include <string_view>

namespace sing {

// Takes its operands from the stack and leaves its results there.
using Substitute = void (*)(torch::jit::Stack& stack);

// Null if the operator needs none.
Substitute find_substitute(std::string_view full_name);
// The same on a GPU, where few operators need one.
Substitute find_gpu_substitute(std::string_view full_name);

}  // namespace sing
