// The asynchronous device as torch's backend PrivateUse1: guard, allocators, generators.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <vector>

#include "tests/device/async_device.h"

namespace sing::test {

void register_backend();

AsyncDevice& async_device_of(const at::Tensor& tensor);
// Of this thread, on the device.
size_t current_stream(const AsyncDevice& device);
// Null for a storage without memory.
DeviceBlockPtr block_of(const c10::Storage& storage);
bool is_pinned(const void* data);
// The generator on the CPU that a generator of the device stands for; the device's default one for
// none. A kernel's results are those of the CPU.
at::Generator host_generator(const std::optional<at::Generator>& generator, int index);

}  // namespace sing::test
