// Registration of the device's kernels with torch's dispatcher.
#pragma once

namespace sing::client {

// Everything that is an operator. Done once, by connect().
void register_kernels();

}  // namespace sing::client
