// The worker on the asynchronous device, and what this device shows.
#include <ATen/core/Tensor.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "tests/check.h"
#include "tests/device/async_device.h"
#include "tests/harness.h"
#include "worker/state/storages.h"

using namespace sing;
using namespace sing::test;

namespace {

constexpr int64_t kCount = 1 << 20;

// Of one program: a stream that is held shows what happens before it executes anything.
AsyncDevice& fresh(const DeviceOptions& options = {}) {
  AsyncDevice& device = AsyncDevice::at();
  device.reset(options);
  return device;
}

at::TensorOptions on_device() { return at::TensorOptions(AsyncDevice::device()); }
c10::impl::VirtualGuardImpl driver() {
  return c10::impl::VirtualGuardImpl(c10::DeviceType::PrivateUse1);
}
c10::Stream other_stream() { return driver().getStreamFromGlobalPool(AsyncDevice::device()); }

template <class Ready>
void wait_for(Ready ready) {
  while (!ready()) std::this_thread::yield();
}

}  // namespace

TEST(a_worker_runs_ahead_of_its_device) {
  AsyncDevice& device = fresh();
  Host host;
  host.options.device = AsyncDevice::device();
  host.start();
  const Tensor x = host.upload({1, 2, 3}, {3});
  device.hold(true);
  const uint32_t add = host.define("aten::add_", "Scalar");
  for (int i = 0; i < 10; ++i) {
    host.call(CallRecord(add, 3, 1).tensor(x).real(1).integer(1).returns_nothing());
  }
  wait_for([&] { return host.worker().consumed.load() == host.head(); });
  EXPECT(device.queued() >= 10);
  device.hold(false);
  EXPECT_EQ(host.values(x), (std::vector<float>{11, 12, 13}));
  EXPECT_EQ(device.violations().size(), size_t{0});
}

TEST(a_worker_makes_no_context_on_another_device) {
  AsyncDevice::at(0).reset();
  AsyncDevice::at(1).reset();
  Host host;
  host.options.device = AsyncDevice::device(1);
  host.start();
  host.upload({1, 2, 3}, {3});
  host.wait_consumed();
  std::thread([&] {
    const File taken(host.snapshot());
    host.session().orders().gate(false);
    host.session().await_parked();
    host.session().orders().gate(true);
  }).join();
  EXPECT(AsyncDevice::at(1).has_context());
  EXPECT(!AsyncDevice::at(0).has_context());
}

TEST(an_asynchronous_device_reports_a_fault_late_and_at_every_later_call) {
  AsyncDevice& device = fresh();
  const at::Tensor x = at::full({8}, 1.0, on_device());
  device.fail_kernel(0, {719, "CUBLAS_STATUS_EXECUTION_FAILED", DeviceFault::Form::error});
  device.hold(true);
  const at::Tensor y = at::add(x, x);
  device.hold(false);
  try {
    driver().synchronizeDevice(0);
    EXPECT(false);
  } catch (const c10::AcceleratorError&) {
    throw CheckFailed("the first call has another form");
  } catch (const c10::Error&) {
  }
  EXPECT_THROWS(c10::AcceleratorError, at::add(x, x));
  EXPECT_THROWS(c10::AcceleratorError, at::empty({8}, on_device()));
  EXPECT_THROWS(c10::AcceleratorError, pinned_bytes(8));
  EXPECT_THROWS(c10::AcceleratorError, driver().synchronizeDevice(0));
}

TEST(a_kernel_of_an_asynchronous_device_that_fails_is_a_fault) {
  AsyncDevice& device = fresh();
  const at::Tensor values = at::full({4}, 1.0, on_device());
  const at::Tensor index = at::full({1}, 9, on_device().dtype(at::kLong));
  const at::Tensor found = values.gather(0, index);
  EXPECT_THROWS(c10::AcceleratorError, driver().synchronizeDevice(0));
  EXPECT(device.lost());
}

TEST(an_asynchronous_device_has_no_more_than_its_memory_and_keeps_what_is_freed) {
  DeviceOptions options;
  options.capacity = 10 << 20;
  options.context_bytes = 1 << 20;
  AsyncDevice& device = fresh(options);
  at::Tensor x = at::empty({kCount}, on_device());  // 4 MiB
  EXPECT_EQ(device.used(), uint64_t{4} << 20);
  at::Tensor y = at::empty({kCount}, on_device());
  EXPECT_THROWS(c10::OutOfMemoryError, at::empty({kCount}, on_device()));
  y = at::Tensor();
  EXPECT_EQ(device.kept(), uint64_t{4} << 20);
  c10::getDeviceAllocator(c10::DeviceType::PrivateUse1)->emptyCache();
  EXPECT_EQ(device.kept(), uint64_t{0});
  device.refuse_allocation(1);
  y = at::empty({8}, on_device());
  EXPECT_THROWS(c10::OutOfMemoryError, at::empty({8}, on_device()));
  y = at::empty({8}, on_device());
}

TEST(an_asynchronous_device_notes_what_a_gpu_would_do_wrongly_in_silence) {
  AsyncDevice& device = fresh();
  const at::Tensor host = pinned_bytes(1024);
  host.fill_(1);
  at::Tensor there = at::empty({1024}, on_device().dtype(at::kByte));
  device.hold(true);
  there.copy_(host, /*non_blocking=*/true);
  host.fill_(2);  // before the copy
  device.hold(false);
  driver().synchronizeDevice(0);
  EXPECT_EQ(device.violations().size(), size_t{1});

  const c10::Stream other = other_stream();
  device.hold(true);
  c10::Event event(c10::DeviceType::PrivateUse1);
  event.record(driver().getStream(AsyncDevice::device()));  // not before this stream continues
  {
    const c10::StreamGuard guard(other);
    event.block(other);
    there.zero_();
  }
  there = at::Tensor();
  EXPECT_EQ(device.violations().size(), size_t{2});
  device.hold(false);
  driver().synchronizeDevice(0);
}

TEST(an_asynchronous_device_overlaps_its_streams_in_its_own_time) {
  DeviceOptions options;
  options.copy_bytes_per_s = uint64_t{4} << 30;  // 1 ms
  options.kernel_ns = 2'000'000;
  AsyncDevice& device = fresh(options);
  const at::Tensor x = at::full({kCount}, 1.0, on_device());
  const at::Tensor host = pinned_bytes(kCount * 4);
  const c10::Stream main = driver().getStream(AsyncDevice::device()), other = other_stream();
  c10::Event began(c10::DeviceType::PrivateUse1, c10::EventFlag::BACKEND_DEFAULT);
  c10::Event ended(c10::DeviceType::PrivateUse1, c10::EventFlag::BACKEND_DEFAULT);
  device.hold(true);
  began.record(main);
  {
    const c10::StreamGuard guard(other);
    began.block(other);
    host.copy_(bytes_of(x.storage(), 0, kCount * 4), /*non_blocking=*/true);
  }
  for (int i = 0; i < 3; ++i) x.add_(1);
  ended.record(main);
  device.hold(false);
  driver().synchronizeDevice(0);
  EXPECT_EQ(device.launched(), uint64_t{4});
  EXPECT_EQ(began.elapsedTime(ended), 6.0);
  EXPECT_EQ(device.violations().size(), size_t{0});
}
