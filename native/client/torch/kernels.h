// Registration of the device's kernels with torch's dispatcher.
#pragma once

namespace sing::client {

// Registers all operators. Called once, by connect().
void register_kernels();

}  // namespace sing::client
