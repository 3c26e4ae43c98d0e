// Group norms: chooses in the client in which memory order the elements are processed.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace sing::client {

// Kernel of aten::group_norm on the device, with and without autograd. For channels-last input,
// torch on a CPU computes the norms in that layout, but on CUDA after a copy, which gives other
// sums. A software device does the same as torch on a CPU, forward and backward, so that results
// agree bit for bit.
at::Tensor group_norm(const at::Tensor& input, int64_t groups,
                      const std::optional<at::Tensor>& weight,
                      const std::optional<at::Tensor>& bias, double eps, bool cudnn_enabled);

}  // namespace sing::client
