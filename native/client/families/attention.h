// Scaled-dot-product attention: which kernel, decided here, without asking the worker.
#pragma once

#include <ATen/core/Tensor.h>

namespace sing::client {

// Without a kernel choice of ours torch takes the mathematical form.
void register_attention_choice();

// Kernel of aten::scaled_dot_product_attention on the device, with and without autograd. A
// software device takes what torch takes on a CPU, so that results agree bit for bit.
at::Tensor scaled_dot_product_attention(const at::Tensor& query, const at::Tensor& key,
                                        const at::Tensor& value,
                                        const std::optional<at::Tensor>& mask, double dropout,
                                        bool is_causal, std::optional<double> scale,
                                        bool enable_gqa);

}  // namespace sing::client
