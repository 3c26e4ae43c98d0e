// Interfaces that torch's core expects from a CUDA build: hooks, the device guard, pinned memory.
#pragma once

namespace sing::client {

// To be called before `import torch` runs: torch requests the hooks once, early, and keeps them.
void register_device();

// To be called once torch is imported and before its first backward pass.
void keep_autograd_single_threaded();

}  // namespace sing::client
