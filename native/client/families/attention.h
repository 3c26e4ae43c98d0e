// Scaled dot-product attention: chooses the kernel in the client, without a request to the worker.
#pragma once

#include <ATen/core/Tensor.h>

namespace sing::client {

// Registers our choice of kernels; without it torch uses the mathematical form.
void register_attention_choice();

// Kernel of aten::scaled_dot_product_attention on the device, with and without autograd. A software
// device uses the same kernel as torch on a CPU, so that results agree bit for bit.
at::Tensor scaled_dot_product_attention(const at::Tensor& query, const at::Tensor& key,
                                        const at::Tensor& value,
                                        const std::optional<at::Tensor>& mask, double dropout,
                                        bool is_causal, std::optional<double> scale,
                                        bool enable_gqa);

}  // namespace sing::client
