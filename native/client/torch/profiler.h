// What torch's profilers need to time operators on the device.
#pragma once

namespace sing::client {

// Also of a CUDA build, whose own would ask the driver.
void register_profiler();

}  // namespace sing::client
