// The clock that client and agent share.
#pragma once

#include <cstdint>

namespace sing::client {

// How far this process's CLOCK_MONOTONIC is ahead of its host's. A process that was restored from
// images may live in a time namespace, so that the clock goes on for it where it was.
int64_t monotonic_ahead_ns();

// The host's CLOCK_MONOTONIC.
uint64_t monotonic_ns(int64_t ahead_ns) noexcept;

}  // namespace sing::client
