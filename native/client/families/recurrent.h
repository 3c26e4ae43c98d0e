// Recurrent networks: chooses the kernel in the client.
#pragma once

#include <tuple>

#include <ATen/core/Tensor.h>

namespace sing::client {

// Kernels of aten::lstm.input and aten::gru.input on the device, with and without autograd. A GPU
// uses cuDNN's network, in one operator. A software device uses oneDNN's layers for an LSTM, like
// torch on a CPU, so that results agree bit for bit; everything else is torch's composite over
// fused cells.
std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm(const at::Tensor& input, at::TensorList state,
                                                    at::TensorList weights, bool has_biases,
                                                    int64_t layers, double dropout, bool train,
                                                    bool bidirectional, bool batch_first);
std::tuple<at::Tensor, at::Tensor> gru(const at::Tensor& input, const at::Tensor& state,
                                       at::TensorList weights, bool has_biases, int64_t layers,
                                       double dropout, bool train, bool bidirectional,
                                       bool batch_first);

}  // namespace sing::client
