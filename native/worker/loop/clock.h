#pragma once

#include <time.h>

#include <cstdint>

namespace sing {

// CLOCK_MONOTONIC in nanoseconds: the clock of all timestamps that processes share.
inline uint64_t monotonic_ns() noexcept {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
}

// The same clock, a few milliseconds behind, at a tenth of the cost.
inline uint64_t coarse_ns() noexcept {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
}

}  // namespace sing
