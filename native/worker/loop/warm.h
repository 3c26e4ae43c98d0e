// Preparation of a device in a process that has no session yet.
#pragma once

#include <c10/core/Device.h>

namespace sing {

// Makes the context and initialises the libraries that most operators need, which takes longer than
// loading a small state. Keeps no memory but theirs. To be called by the main thread, as libraries
// keep handles for each thread. Throws DeviceLost, or what torch throws.
void warm(c10::Device device);

}  // namespace sing
