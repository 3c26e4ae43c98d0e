// Recurrent networks: which kernel, decided here.
#pragma once

#include <tuple>

#include <ATen/core/Tensor.h>

namespace sing::client {

// Kernel of aten::lstm.input on the device, with and without autograd. A software device takes
// oneDNN's layers as torch does on a CPU, so that results agree bit for bit; everything else is
// torch's composite over fused cells.
std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm(const at::Tensor& input, at::TensorList state,
                                                    at::TensorList weights, bool has_biases,
                                                    int64_t layers, double dropout, bool train,
                                                    bool bidirectional, bool batch_first);

}  // namespace sing::client
