// The clock that client and agent share.
#pragma once

#include <cstdint>

namespace sing::client {

// Offset of this process's CLOCK_MONOTONIC relative to its host's. A process that was restored from
// images may live in a time namespace, so that its clock continues from the value at the dump.
int64_t monotonic_ahead_ns();

// The host's CLOCK_MONOTONIC.
uint64_t monotonic_ns(int64_t ahead_ns) noexcept;

}  // namespace sing::client
