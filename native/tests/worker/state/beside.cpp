// Snapshots beside what a device computes, by the device's own time.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <future>
#include <thread>

#include "tests/check.h"
#include "tests/device/async_device.h"
#include "tests/harness.h"

using namespace sing;
using namespace sing::test;

namespace {

constexpr uint64_t kKernelNs = 1'000'000;
constexpr uint64_t kParameterBytes = 1 << 20;

DeviceOptions options(uint64_t copy_bytes_per_s) {
  DeviceOptions options;
  options.capacity = uint64_t{3} << 30;
  options.kernel_ns = kKernelNs;
  options.copy_bytes_per_s = copy_bytes_per_s;
  options.poison = false;
  return options;
}

// A program that trains: many kernels that change none of the parameters, then one for each.
class Training {
 public:
  Training(Host& host, uint64_t bytes) : host_(host) {
    fill_ = host.define("aten::fill_", "Scalar");
    x_ = host.allocate({8});
    for (uint64_t i = 0; i < bytes / kParameterBytes; ++i) {
      parameters_.push_back(host.allocate({static_cast<int64_t>(kParameterBytes / 4)}));
    }
    for (int i = 0; i < 300; ++i) small_.push_back(host.allocate({2}));
    for (const Tensor& tensor : small_) fill(tensor, 1);
    update(1);
  }
  void fill(const Tensor& tensor, double value) {
    host_.call(CallRecord(fill_, 2, 1).tensor(tensor).real(value).returns_nothing());
  }
  void compute(uint64_t kernels) {
    for (uint64_t i = 0; i < kernels; ++i) fill(x_, static_cast<double>(i));
  }
  void update(double value) {
    for (const Tensor& tensor : parameters_) fill(tensor, value);
  }
  const std::vector<Tensor>& parameters() const { return parameters_; }
  const std::vector<Tensor>& small() const { return small_; }

 private:
  Host& host_;
  uint32_t fill_;
  Tensor x_;
  std::vector<Tensor> parameters_, small_;
};

template <class Ready>
void wait_for(Ready ready) {
  while (!ready()) std::this_thread::yield();
}

struct Running {
  explicit Running(uint64_t copy_bytes_per_s) : Running(options(copy_bytes_per_s)) {}
  explicit Running(const DeviceOptions& options) {
    AsyncDevice::at().reset(options);
    host.options.device = AsyncDevice::device();
    host.start();
  }
  Host host{size_t{64} << 20};
};

void expect_values(Host& host, const std::vector<Tensor>& tensors, float value) {
  for (const Tensor& tensor : tensors) {
    const auto values = host.values(tensor);
    EXPECT(std::all_of(values.begin(), values.end(), [=](float one) { return one == value; }));
  }
}

}  // namespace

namespace {

// The part of its time that a device loses by a snapshot of a state of this size.
double lost_share(uint64_t bytes) {
  AsyncDevice& device = AsyncDevice::at();
  Running running(uint64_t{16} << 30);
  Host& host = running.host;
  Training training(host, bytes);
  host.synchronize();
  const uint64_t kernels = std::max<uint64_t>(300, 3 * (bytes >> 20));
  training.compute(2 * kernels);
  training.update(2);
  wait_for([&] { return host.worker().consumed.load() == host.head(); });
  const uint64_t before = device.lost_ns(), launched = device.launched();
  Taken taken;
  std::thread taking([&] { taken = host.session().snapshot(Manner::beside); });
  training.compute(kernels);
  training.update(3);
  training.compute(kernels);
  taking.join();
  const File snapshot(taken.fd);
  host.synchronize();
  const double lost = static_cast<double>(device.lost_ns() - before) / 1e6;
  const double computed = static_cast<double>((device.launched() - launched) * kKernelNs) / 1e6;
  std::printf("      %llu MiB in %.0f ms: the device lost %.2f of %.0f ms; by the worker %.2f ms\n",
              static_cast<unsigned long long>(taken.copied >> 20),
              static_cast<double>(taken.duration_ns) / 1e6, lost, computed,
              static_cast<double>(taken.stalled_ns) / 1e6);
  EXPECT_EQ(device.violations(), std::vector<std::string>());
  expect_values(host, training.parameters(), 3);
  expect_values(host, training.small(), 1);
  return lost / computed;
}

}  // namespace

// A busy machine may delay the threads that launch and copy, which costs the device time as well:
// the least of some attempts counts.
TEST(a_snapshot_beside_a_busy_device_costs_it_little) {
  double least = 1;
  for (int attempt = 0; attempt < 3 && least > 0.02; ++attempt) {
    least = std::min(least, lost_share(exhaustive() ? 1 << 30 : 64 << 20));
  }
  EXPECT(least <= 0.02);
}

TEST(what_a_snapshot_costs_is_what_the_device_lost) {
  AsyncDevice& device = AsyncDevice::at();
  Running running(uint64_t{512} << 20);  // slow: 2 ms for a parameter
  Host& host = running.host;
  Training training(host, 128 << 20);
  host.synchronize();
  training.compute(100);
  training.update(2);
  const uint64_t before = device.lost_ns();
  Taken taken;
  std::atomic<bool> frozen{false};
  std::thread taking(
      [&] { taken = host.session().snapshot(Manner::beside, [&] { frozen = true; }); });
  wait_for([&] { return frozen.load(); });
  training.update(3);  // at once: its kernels wait for the copies
  taking.join();
  const File snapshot(taken.fd);
  host.synchronize();
  const uint64_t lost = device.lost_ns() - before;
  EXPECT(lost > 50'000'000);
  EXPECT(taken.stalled_ns > 50'000'000);
  EXPECT(taken.stalled_ns < lost * 13 / 10);
}

TEST(small_storages_are_brought_to_the_host_by_one_copy) {
  AsyncDevice& device = AsyncDevice::at();
  Running running(0);
  Host& host = running.host;
  Training training(host, 0);
  host.synchronize();
  const uint64_t before = device.copied();
  const File snapshot(host.session().snapshot(Manner::beside).fd);
  EXPECT(training.small().size() > 100);
  EXPECT_EQ(device.copied() - before, 1u);
}

// The device executes all that it was given while the main thread is parked, and then nothing.
TEST(a_pause_for_a_snapshot_costs_what_the_device_lost) {
  AsyncDevice& device = AsyncDevice::at();
  DeviceOptions slow = options(0);
  slow.kernel_ns = 4'000'000;
  slow.pinning_ns = 250'000'000;
  Running running(slow);
  Host& host = running.host;
  Training training(host, 0);
  host.synchronize();
  training.compute(250);
  const uint64_t launched = device.launched();
  wait_for([&] { return device.launched() >= launched + 20; });
  const uint64_t before = device.lost_ns();
  const Taken taken = host.session().snapshot(Manner::beside);
  const File snapshot(taken.fd);
  host.wait_consumed();
  const uint64_t lost = device.lost_ns() - before;
  std::printf("      the device lost %.2f ms; by the worker %.2f ms\n",
              static_cast<double>(lost) / 1e6, static_cast<double>(taken.stalled_ns) / 1e6);
  EXPECT(lost > 50'000'000);
  EXPECT(taken.stalled_ns >= lost - lost / 10);
  EXPECT(taken.stalled_ns <= lost + lost / 10);
}

TEST(memory_that_waits_for_a_snapshot_is_part_of_its_cost) {
  AsyncDevice& device = AsyncDevice::at();
  Running running(uint64_t{256} << 20);  // slow: 4 ms for a parameter
  Host& host = running.host;
  Training training(host, 128 << 20);
  host.synchronize();
  training.compute(50);
  wait_for([&] { return host.worker().consumed.load() == host.head(); });
  const uint64_t before = device.lost_ns();
  host.grant(160 << 20);
  Taken taken;
  std::atomic<bool> frozen{false};
  std::thread taking(
      [&] { taken = host.session().snapshot(Manner::beside, [&] { frozen = true; }); });
  wait_for([&] { return frozen.load(); });
  // The old ones stay in memory until they were copied.
  for (const Tensor& tensor : training.parameters()) host.free(tensor.id);
  for (size_t i = 0; i < training.parameters().size(); ++i) {
    training.fill(host.allocate({static_cast<int64_t>(kParameterBytes / 4)}), 3);
  }
  wait_for([&] { return host.worker().consumed.load() == host.head(); });
  device.synchronize(0);
  const uint64_t lost = device.lost_ns() - before;
  taking.join();
  const File snapshot(taken.fd);
  std::printf("      the device lost %.2f ms; by the worker %.2f ms\n",
              static_cast<double>(lost) / 1e6, static_cast<double>(taken.stalled_ns) / 1e6);
  EXPECT(lost > 50'000'000);
  EXPECT(taken.stalled_ns > lost / 2);  // a busy machine launches its kernels late, too
  EXPECT(taken.stalled_ns < lost * 13 / 10);
}

TEST(a_snapshot_of_a_program_that_rests_costs_nothing) {
  AsyncDevice& device = AsyncDevice::at();
  Running running(0);
  Host& host = running.host;
  Training training(host, 1 << 20);
  for (int i = 0; i < 3; ++i) {
    host.synchronize();
    training.compute(1);
    host.synchronize();
    wait_for([&] { return host.worker().asleep.load() != 0; });
    const Taken taken = host.session().snapshot(Manner::beside);
    const File snapshot(taken.fd);
    EXPECT_EQ(taken.stalled_ns, uint64_t{0});
    device.synchronize();
  }
}

TEST(a_program_that_synchronizes_does_not_wait_for_a_snapshots_copies) {
  AsyncDevice& device = AsyncDevice::at();
  Running running(0);
  Host& host = running.host;
  Training training(host, 4 << 20);
  host.synchronize();
  device.hold_pool(true);
  Taken taken;
  std::atomic<bool> frozen{false};
  std::thread taking(
      [&] { taken = host.session().snapshot(Manner::beside, [&] { frozen = true; }); });
  wait_for([&] { return frozen.load(); });
  training.compute(5);
  auto synchronized = std::async(std::launch::async, [&] { host.synchronize(); });
  const bool waited = synchronized.wait_for(std::chrono::seconds(60)) != std::future_status::ready;
  device.hold_pool(false);
  taking.join();
  const File snapshot(taken.fd);
  synchronized.get();
  EXPECT(!waited);
}
