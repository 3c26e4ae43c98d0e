// Freed memory of a device: kept for the next tensors, and given back when the agent orders that.
// See Note [Caches] in worker/loop/session.cpp.
#include "tests/check.h"
#include "tests/device/async_device.h"
#include "tests/harness.h"

using namespace sing;
using namespace sing::test;

namespace {

constexpr uint64_t kCache = 4 << 20;

// A session whose device keeps `kCache` bytes that were freed.
struct Caching {
  AsyncDevice& device = AsyncDevice::at();
  Host host;
  Tensor kept;

  explicit Caching(const DeviceOptions& options = {}) {
    device.reset(options);
    host.options.device = AsyncDevice::device();
    host.start();
    kept = host.upload({1, 2, 3}, {3});
    const Tensor large = host.allocate({kCache / 4});
    const uint32_t fill = host.define("aten::fill_", "Scalar");
    host.call(CallRecord(fill, 2, 1).tensor(large).real(1).returns_nothing());
    host.free(large.id);
    EXPECT(host.synchronize().ok());
    EXPECT_EQ(device.kept(), kCache);
  }
};

}  // namespace

TEST(a_device_cache_is_given_back_while_the_gate_is_closed_or_there_is_no_lease) {
  for (const bool leased : {true, false}) {
    Caching session;
    if (leased) {
      session.host.session().gate(false);
    } else {
      session.host.session().lease(1, false);
    }
    session.host.session().await_parked();
    session.host.session().give_back_cache();
    EXPECT_EQ(session.device.kept(), uint64_t{0});
    session.host.session().gate(true);
    session.host.session().lease(2, true);
    EXPECT_EQ(session.host.values(session.kept), (std::vector<float>{1, 2, 3}));
  }
}

TEST(a_device_cache_is_given_back_by_a_worker_that_executes) {
  Caching session;
  const uint32_t add = session.host.define("aten::add_", "Scalar");
  for (int i = 0; i < 200; ++i) {
    session.host.call(
        CallRecord(add, 3, 1).tensor(session.kept).real(1).integer(1).returns_nothing());
    if (i == 100) session.host.session().give_back_cache();
  }
  EXPECT_EQ(session.device.kept(), uint64_t{0});
  EXPECT_EQ(session.host.values(session.kept), (std::vector<float>{201, 202, 203}));
}

TEST(a_device_cache_that_was_given_back_is_there_for_other_processes) {
  DeviceOptions options;
  options.capacity = 8 << 20;
  Caching session(options);
  session.host.session().give_back_cache();
  session.device.occupy(options.capacity - session.device.used());  // as another one would
  const Tensor more = session.host.allocate({kCache / 4});
  const uint32_t fill = session.host.define("aten::fill_", "Scalar");
  session.host.call(CallRecord(fill, 2, 1).tensor(more).real(1).returns_nothing());
  const Answer failed = session.host.synchronize();
  EXPECT(failed.kind() == ErrorKind::out_of_memory);
}

TEST(a_state_that_finds_no_memory_at_its_start_says_so_and_loads_when_there_is_some) {
  Caching session;
  Host& host = session.host;
  uint64_t position = 0;
  const int snapshot = host.snapshot(&position);
  host.commit(position);
  host.stop();
  session.device.reset();
  session.device.refuse_allocation(0);
  try {
    host.start(snapshot);
    EXPECT(false);
  } catch (const c10::OutOfMemoryError& error) {
    EXPECT(std::string(error.what()).find("out of memory") != std::string::npos);
  }
  host.start(snapshot);
  EXPECT_EQ(host.values(session.kept), (std::vector<float>{1, 2, 3}));
  close(snapshot);
}
