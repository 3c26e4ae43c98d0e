// Copies between the host and the device.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Scalar.h>

namespace sing::client {

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking);
at::Scalar local_scalar(const at::Tensor& self);

}  // namespace sing::client
