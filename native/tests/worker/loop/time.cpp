// Time of the asynchronous device: how far the worker runs ahead of it, the time that is counted,
// and a program's events. All of it is simulated, and does not depend on how busy the machine is.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <thread>

#include "tests/check.h"
#include "tests/device/async_device.h"
#include "tests/harness.h"
#include "worker/state/device_time.h"

using namespace sing;
using namespace sing::test;

namespace {

constexpr uint64_t kMs = 1'000'000;

template <class Ready>
void wait_for(Ready ready) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (!ready()) {
    if (std::chrono::steady_clock::now() > end) throw CheckFailed("waited too long");
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

// A program of kernels that all take the same time.
class Program {
 public:
  explicit Program(uint64_t kernel_ns) : device(AsyncDevice::at()) {
    DeviceOptions options;
    options.kernel_ns = kernel_ns;
    device.reset(options);
    host.options.device = AsyncDevice::device();
    host.start();
    fill_ = host.define("aten::fill_", "Scalar");
    x_ = host.allocate({8});
    // Its worker learns how long they take.
    for (int i = 0; i < 20; ++i) {
      compute(1);
      rest();
    }
  }

  void compute(int kernels) {
    for (int i = 0; i < kernels; ++i) {
      host.call(CallRecord(fill_, 2, 1).tensor(x_).real(i).returns_nothing());
    }
  }
  void wait_begun() {
    wait_for([&] { return host.worker().consumed.load() == host.head(); });
  }
  // Waits until the device has executed everything.
  void rest() {
    wait_begun();
    device.synchronize();
  }
  // The device executes these one directly after the other.
  template <class Work>
  void burst(Work work) {
    const std::unique_ptr<AsyncDevice, void (*)(AsyncDevice*)> held(
        &device, [](AsyncDevice* device) { device->hold(false); });
    device.hold(true);
    work();
    wait_begun();
    // Its worker has marked the end.
    wait_for([&] { return host.worker().asleep.load() != 0; });
    device.hold(false);
    rest();
  }
  // As when another session gets the device, and this one gets it again.
  uint64_t busy_ns() {
    host.session().lease(++token_, false);
    host.session().await_parked();
    const uint64_t busy = host.worker().busy_ns.load();
    host.session().lease(token_, true);
    return busy;
  }
  // The next worker continues from a snapshot.
  void another_worker() {
    uint64_t position = 0;
    const File snapshot(host.snapshot(&position));
    host.stop();
    host.commit(position);
    host.start(snapshot.fd());
  }

  void record(uint32_t event) { host.append(RecordKind::event, 0, payload(event, {})); }
  double elapsed_ms(uint32_t from, uint32_t to) {
    const Answer answer = host.request(RecordKind::event, payload(from, to));
    EXPECT(answer.ok());
    return Reader(answer.bytes).get<double>();
  }

  AsyncDevice& device;
  Host host;

 private:
  static Writer payload(uint32_t event, std::optional<uint32_t> other) {
    Writer out;
    out.put<uint32_t>(event);
    out.put(other ? EventAction::elapsed : EventAction::record);
    for (int i = 0; i < 3; ++i) out.put<uint8_t>(0);
    if (other) out.put<uint32_t>(*other);
    return out;
  }

  uint64_t token_ = 0;
  uint32_t fill_ = 0;
  Tensor x_;
};

void expect_near(uint64_t found, uint64_t expected) {
  std::printf("      %.3f ms of %.3f ms\n", static_cast<double>(found) / 1e6,
              static_cast<double>(expected) / 1e6);
  EXPECT(found >= expected - expected / 50);
  EXPECT(found <= expected + expected / 50);
}

}  // namespace

TEST(time_in_flight_is_bounded_when_a_lease_is_taken) {
  Program program(10 * kMs);
  const uint64_t launched = program.device.launched();
  program.compute(300);
  wait_for([&] { return program.device.launched() >= launched + 40; });
  program.host.session().lease(1, false);
  program.host.session().orders().await_parked();
  const uint64_t queued = program.device.queued_ns();
  EXPECT(queued > 0);
  EXPECT(queued <= DeviceTime::kAheadNs + 20 * kMs);
  EXPECT(program.host.worker().consumed.load() < program.host.head());
  // What the device has executed is known, as well.
  program.host.session().await_parked();
  EXPECT_EQ(program.host.worker().completed.load(), program.host.worker().consumed.load());
}

TEST(time_of_the_device_is_not_lost_by_the_bound) {
  Program program(2 * kMs);
  const uint64_t launched = program.device.launched();
  program.compute(400);
  wait_for([&] { return program.device.launched() >= launched + 60; });
  const uint64_t lost = program.device.lost_ns();
  program.rest();
  EXPECT(program.device.lost_ns() - lost <= 2 * kMs);
}

TEST(time_is_counted_by_the_device_of_bursts_and_of_a_slow_program) {
  Program program(4 * kMs);
  const uint64_t before = program.busy_ns();
  for (int i = 0; i < 5; ++i) program.burst([&] { program.compute(12); });
  const uint64_t bursts = program.busy_ns();
  expect_near(bursts - before, 60 * 4 * kMs);
  for (int i = 0; i < 40; ++i) {
    program.burst([&] { program.compute(1); });
    std::this_thread::sleep_for(std::chrono::milliseconds(5));  // the program does something else
  }
  expect_near(program.busy_ns() - bursts, 40 * 4 * kMs);
}

TEST(time_is_counted_across_workers) {
  Program program(4 * kMs);
  const uint64_t before = program.busy_ns();
  program.burst([&] { program.compute(12); });
  const uint64_t first = program.busy_ns();
  program.another_worker();
  EXPECT(program.busy_ns() >= first);
  const uint64_t between = program.busy_ns();
  program.burst([&] { program.compute(12); });
  expect_near(program.busy_ns() - between, 12 * 4 * kMs);
  expect_near(first - before, 12 * 4 * kMs);
}

TEST(time_of_the_last_work_is_counted_by_a_worker_that_ends) {
  Program program(4 * kMs);
  const uint64_t before = program.busy_ns();
  program.device.hold(true);
  program.compute(12);
  program.wait_begun();
  program.device.hold(false);
  program.host.stop();
  expect_near(program.host.worker().busy_ns.load() - before, 12 * 4 * kMs);
}

TEST(time_between_events_is_the_devices_and_they_do_not_wait_for_it) {
  Program program(10 * kMs);
  program.burst([&] {
    program.record(1);
    program.compute(3);
    program.record(2);
    program.compute(4);
    program.wait_begun();  // although the device executes nothing
    EXPECT(program.device.queued() >= 9);
  });
  EXPECT_EQ(program.elapsed_ms(1, 2), 30.0);
  EXPECT_EQ(program.elapsed_ms(2, 1), -30.0);
}

TEST(time_between_events_of_two_workers_is_the_devices) {
  Program program(10 * kMs);
  program.burst([&] {
    program.compute(8);
    program.record(1);
  });
  const uint64_t first = program.device.now_ns();
  program.another_worker();
  program.compute(1);
  program.rest();
  program.burst([&] {
    program.compute(8);
    program.record(2);
  });
  const auto between = static_cast<double>(program.device.now_ns() - first) / 1e6;
  const double elapsed = program.elapsed_ms(1, 2);
  std::printf("      %.3f ms of %.3f ms\n", elapsed, between);
  EXPECT(between > 80);
  EXPECT(std::abs(elapsed - between) < 5);
}

TEST(time_that_a_snapshot_holds_is_of_the_device_not_of_when_it_was_asked) {
  Program program(10 * kMs);
  program.burst([&] {
    program.record(1);
    program.compute(5);
    program.record(2);
  });
  program.another_worker();
  EXPECT(std::abs(program.elapsed_ms(1, 2) - 50) < 0.001);
}

TEST(time_of_waiting_shows_that_the_device_is_lost) {
  Program program(10 * kMs);
  const uint64_t launched = program.device.launched();
  program.device.fail_kernel(40);
  program.compute(300);
  const DeviceLost lost = program.host.lost();
  EXPECT_EQ(lost.code, 710);
  EXPECT(lost.position < program.host.head());
  EXPECT(program.device.launched() - launched <= 40 + 13);
}
