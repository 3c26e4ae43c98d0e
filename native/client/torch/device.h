// What torch's core asks a CUDA build for: hooks, the device guard, pinned memory.
#pragma once

namespace sing::client {

// Before `import torch` runs: torch asks for the hooks once, early, and keeps what it gets.
void register_device();

}  // namespace sing::client
