// Copies of the asynchronous device, and tensors of the CPU over its memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "tests/device/async_device.h"

namespace sing::test {

// The same memory as a tensor of the CPU, for the device's threads. Adds its block to `uses`.
at::Tensor host_alias(const at::Tensor& tensor, std::vector<DeviceBlockPtr>& uses);
at::Tensor to_device(const at::Tensor& host, int index);

}  // namespace sing::test
