// Support for torch's profilers, to time operators on the device.
#pragma once

namespace sing::client {

// Also replaces the profiler of a CUDA build, which would call the driver.
void register_profiler();

}  // namespace sing::client
