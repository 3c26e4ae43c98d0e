// Group norms: in which order their elements lie, decided here.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace sing::client {

// Kernel of aten::group_norm on the device, with and without autograd. Torch computes the norms of
// channels that lie last as they lie on a CPU, and after a copy on CUDA: other sums. A software
// device takes what torch takes on a CPU, forward and backward, so that results agree bit for bit.
at::Tensor group_norm(const at::Tensor& input, int64_t groups,
                      const std::optional<at::Tensor>& weight,
                      const std::optional<at::Tensor>& bias, double eps, bool cudnn_enabled);

}  // namespace sing::client
