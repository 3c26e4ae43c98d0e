#include "worker/loop/warm.h"

#include "tests/check.h"
#include "tests/device/async_device.h"
#include "worker/exec/failures.h"

using namespace sing;
using namespace sing::test;

TEST(a_warm_device_has_a_context_and_keeps_no_other_memory) {
  AsyncDevice& device = AsyncDevice::at();
  device.reset({.context_bytes = 1 << 20});
  EXPECT(!device.has_context());
  warm(AsyncDevice::device());
  EXPECT(device.has_context());
  EXPECT(device.launched() > 0);
  EXPECT_EQ(device.kept(), uint64_t{0});
  EXPECT_EQ(device.used(), uint64_t{0});  // the context is not counted there
}

TEST(a_device_that_is_lost_while_it_is_warmed_is_reported) {
  AsyncDevice& device = AsyncDevice::at();
  device.reset();
  device.fail_kernel(0);
  EXPECT_THROWS(DeviceLost, warm(AsyncDevice::device()));
  device.reset();
}
