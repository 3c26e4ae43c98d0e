#include "client/log/clock.h"

#include <time.h>

#include <fstream>
#include <string>

namespace sing::client {

namespace {
constexpr int64_t kSecondNs = 1'000'000'000;
}  // namespace

int64_t monotonic_ahead_ns() {
  // The file has lines of a clock's name, seconds and nanoseconds. No file: the system has no time
  // namespaces.
  std::ifstream file("/proc/self/timens_offsets");
  std::string clock;
  int64_t seconds = 0, nanoseconds = 0;
  while (file >> clock >> seconds >> nanoseconds) {
    if (clock == "monotonic") return seconds * kSecondNs + nanoseconds;
  }
  return 0;
}

uint64_t monotonic_ns(int64_t ahead_ns) noexcept {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  const int64_t here = static_cast<int64_t>(now.tv_sec) * kSecondNs + now.tv_nsec;
  return here > ahead_ns ? static_cast<uint64_t>(here - ahead_ns) : 0;
}

}  // namespace sing::client
