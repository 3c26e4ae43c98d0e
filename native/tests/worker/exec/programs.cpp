// Random programs, with snapshots taken while they run: whatever happens to the worker, the bytes
// at the end equal those of an undisturbed run.
#include <cstdio>
#include <exception>
#include <random>

#include "tests/check.h"
#include "tests/device/async_device.h"
#include "tests/harness.h"
#include "tests/worker/exec/random_program.h"

using namespace sing;
using namespace sing::test;

namespace {

std::vector<Bytes> undisturbed(uint64_t seed, int steps) {
  Host host(size_t{256} << 20);
  host.start();
  Program program(host, seed);
  for (int i = 0; i < steps; ++i) program.step();
  return program.result();
}

std::vector<Bytes> disturbed(uint64_t seed, int steps, int& snapshots, c10::Device device) {
  Host host(size_t{256} << 20);
  host.options.device = device;
  host.options.limits.piece_bytes = 4096;
  host.options.limits.mapped_bytes = uint64_t{4096}
                                     << seed % 5;  // some, all or none of the storages
  host.start();
  Disturber disturber(host, seed * 31 + 7);
  Program program(host, seed);
  for (int i = 0; i < steps; ++i) {
    program.step();
    disturber.step();
  }
  disturber.finish();
  snapshots += disturber.snapshots();
  return program.result();
}

// The undisturbed run is one on the CPU.
void compare(uint64_t seed, int steps, int& snapshots,
             c10::Device device = c10::Device(c10::DeviceType::CPU)) {
  try {
    const auto expected = undisturbed(seed, steps);
    const auto found = disturbed(seed, steps, snapshots, device);
    EXPECT_EQ(found.size(), expected.size());
    for (size_t i = 0; i < found.size(); ++i) {
      if (found[i] != expected[i]) throw CheckFailed("result " + std::to_string(i) + " differs");
    }
  } catch (const std::exception& error) {
    throw CheckFailed("program " + std::to_string(seed) + ": " + error.what());
  }
}

}  // namespace

TEST(random_programs_survive_whatever_happens_to_their_workers) {
  int snapshots = 0;
  for (uint64_t seed = 1; seed <= 100; ++seed) compare(seed, 80, snapshots);
  EXPECT(snapshots > 200);
  const uint64_t fresh = std::random_device()();
  std::printf("      and programs from %llu on\n", static_cast<unsigned long long>(fresh));
  for (uint64_t i = 0; i < 20; ++i) compare(fresh + i, 160, snapshots);
}

TEST(random_programs_end_on_an_asynchronous_device_as_on_the_cpu) {
  AsyncDevice& device = AsyncDevice::at();
  DeviceOptions options;
  options.queue = 64;
  int snapshots = 0;
  for (uint64_t seed = 1; seed <= 12; ++seed) {
    device.reset(options);
    compare(seed, 80, snapshots, AsyncDevice::device());
    EXPECT_EQ(device.violations(), std::vector<std::string>());
    EXPECT_EQ(device.used(), uint64_t{0});
  }
  EXPECT(snapshots > 20);
}
