// A device for the client in this process: a session whose worker is a thread.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include "tests/harness.h"

namespace sing::test {

// Connects the client at the first call, and registers its kernels. The worker runs until the
// process ends.
Host& device();

// A tensor of the device with the geometry of a CPU tensor; its storage has room for it, and its
// values are whatever they are.
at::Tensor twin(const at::Tensor& tensor);
// The same for all tensors among the operands of an operator.
std::vector<c10::IValue> twins(const std::vector<c10::IValue>& operands);

at::Tensor to_device(const at::Tensor& tensor);
at::Tensor to_host(const at::Tensor& tensor);

}  // namespace sing::test
