// Operators of nested tensors in the strided layout: a buffer on the device, and sizes, strides and
// offsets on the host. All of torch's functions for them on the CPU are made of operators of the
// buffer or of the tensors within, so that they run here; what they call is shipped.
#pragma once

namespace sing::client {

void register_nested();

}  // namespace sing::client
