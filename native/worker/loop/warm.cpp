#include "worker/loop/warm.h"

#include <ATen/Context.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/conv2d.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>

#include "worker/exec/failures.h"

namespace sing {

namespace {

void use_libraries(c10::Device device) {
  const at::TensorOptions options(device);
  const at::Tensor product = at::mm(at::ones({64, 64}, options), at::ones({64, 64}, options));
  if (!device.is_cuda()) return;  // a test's device has no convolutions
  at::conv2d(product.view({1, 1, 64, 64}), at::ones({1, 1, 3, 3}, options));
}

}  // namespace

void warm(c10::Device device) {
  if (device.is_cpu()) return;
  at::globalContext().lazyInitDevice(device.type());
  const c10::DeviceGuard guard(device);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const c10::NoGradGuard no_grad;
  try {
    use_libraries(device);
    wait_for_device(device);
    c10::getDeviceAllocator(device.type())->emptyCache();
  } catch (...) {
    throw_if_lost(device, 0, "");
    throw;
  }
}

}  // namespace sing
